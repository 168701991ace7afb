"""Two engines of a path are stopped together: the writer ends first, and no dirty block is lost."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest
from support.keys import keys
from support.waiting import wait_until

from kvcascade.assembly.build import Cascade, Geometry, open_cascade
from kvcascade.config.schema import parse
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.policies import known_names

BLOCK, SLOTS = 4096, 64


def opened(root: Path, model: str) -> Cascade:
    """An engine that may write to the path."""
    tiers: list[dict[str, object]] = [
        {"type": "cpu", "capacity": SLOTS * BLOCK, "prefault": False},
        {"type": "nvme", "path": str(root), "capacity": 256 << 20, "min_free": 0},
    ]
    cascade = open_cascade(
        parse({"tiers": tiers}, known_names()),
        Geometry(BLOCK, 1, 1),
        f"test-{uuid.uuid4().hex}",
        NamespaceKey(model, {"model": model}),
        steps_until_flushed=1,
        with_events=False,
        expect_workers=False,
    )

    def is_ready() -> bool:
        cascade.manager.end_step()
        return cascade.below[0].port.takes_puts

    wait_until(is_ready)
    return cascade


def store(cascade: Cascade, hashes: list[BlockHash]) -> None:
    """Bring blocks into the first tier."""
    request = Request()
    output = cascade.manager.prepare_store(hashes, request)
    assert output is not None and output.block_hashes_to_store == hashes
    cascade.manager.complete_store(set(hashes), True, request)
    cascade.manager.finish_request(request)


def found(cascade: Cascade, hashes: list[BlockHash]) -> int:
    """The number of blocks on disk."""
    port = cascade.below[0].port

    def count() -> int:
        cascade.manager.end_step()
        with cascade.manager.lock:
            return sum(port.may_hold(block_hash) > 0 for block_hash in hashes)

    wait_until(lambda: count() > 0)
    return count()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("other", ["first", "second"], ids=["same model", "another model"])
def test_dirty_blocks_of_both_are_on_disk(tmp_path: Path, other: str, delay_s: float) -> None:
    writer, second = opened(tmp_path, "first"), opened(tmp_path, other)
    of_writer, of_second = keys(SLOTS // 2), keys(SLOTS, SLOTS + SLOTS // 2)
    store(writer, of_writer)
    store(second, of_second)
    closes = [threading.Thread(target=each.close) for each in (writer, second)]
    closes[0].start()
    closes[0].join(delay_s)
    closes[1].start()
    for close in closes:
        close.join()
    for model, hashes in (("first", of_writer), (other, of_second)):
        again = opened(tmp_path, model)
        assert found(again, hashes) == len(hashes)
        again.close()
