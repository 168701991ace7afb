"""A cascade of three tiers is opened, and closed to the end, whatever one part of it does."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from support.open_tiers import nodes_of

from kvcascade.assembly.build import Cascade, Geometry, open_cascade
from kvcascade.assembly.node_parts import OpenTier
from kvcascade.config.schema import parse
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.policies import known_names
from kvcascade.tools.commands.saved_state import SavedState

BLOCK = 4096
GEOMETRY = Geometry(rank_bytes=BLOCK, world_size=1, blocks_per_chunk=1)
KEY = NamespaceKey("closing", {"weights": "files:x", "vllm": "none"})


class FailsToClose(OpenTier):
    """A tier whose close ends in a fault of ours."""

    def close(self) -> None:
        """As it should, and then the fault."""
        OpenTier.close(self)
        raise OverflowError("a number that does not fit")


def opened(path: Path, cpu_bytes: int = 9 * BLOCK) -> Cascade:
    """With its arena in `path`, too."""
    nvme = {"type": "nvme", "capacity": "8MiB", "segment_size": "64KiB", "min_free": 0}
    tiers = [
        {"type": "cpu", "capacity": cpu_bytes, "arena_dir": str(path), "prefault": False},
        {**nvme, "path": str(path / "a"), "movers": "threads"},
        {**nvme, "path": str(path / "b")},
    ]
    return open_cascade(
        parse({"tiers": tiers}, known_names()),
        GEOMETRY,
        "engine",
        KEY,
        steps_until_flushed=3,
        with_events=False,
        expect_workers=False,
    )


@pytest.mark.parametrize(("cpu_bytes", "is_warned"), [(8 << 20, False), (9 << 20, True)])
def test_a_start_logs_each_nvme_tier_that_is_smaller_than_the_cpu_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cpu_bytes: int, is_warned: bool
) -> None:
    opened(tmp_path, cpu_bytes).close()
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = [text.split('"')[0] for text in texts if "smaller than the CPU tier" in text]
    named = [f"kvcascade: tiers[{number}].capacity: " for number in (1, 2)]
    assert found == (named if is_warned else [])


def test_a_tier_that_fails_to_close_leaves_no_other_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cascade = opened(tmp_path)
    first, second = nodes_of(cascade)
    cascade.below[0] = FailsToClose(first.port, first.node, first.mapper, first.admission)
    with caplog.at_level(logging.ERROR):
        cascade.close()
    assert "OverflowError" in caplog.text
    assert not second.node.is_up
    assert not [name for name in os.listdir(tmp_path) if "kvcascade" in name], "the arena's file"
    again = opened(tmp_path)
    assert [tier.port.feed.can_write for tier in nodes_of(again)] == [True, True]
    again.close()


def test_the_order_of_prompts_that_ended_is_logged(tmp_path: Path) -> None:
    cascade = opened(tmp_path)
    assert cascade.chains is not None
    ends = {bytes([n]) * 32 + bytes(4): 16 * n for n in range(1, 4)}  # of one KV group
    cascade.chains.note(ends, dict.fromkeys(ends, True))
    folder = nodes_of(cascade)[0].folder
    assert folder is not None
    cascade.close()
    assert len(SavedState(folder / "state").chains()) == len(ends)
