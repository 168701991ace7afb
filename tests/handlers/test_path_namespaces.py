"""Engines of several models on one path: each option of an engine reaches the writer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcascade.assembly.node_parts import EngineFacts, OpenTier, SlotMemory, open_node_tier
from kvcascade.config.schema import Movers, NvmeTierOptions
from kvcascade.config.sizes import Bytes
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.writer.path_options import load_record

BLOCK, ARENA_SLOTS = 4096, 8
CAPACITY = Bytes(64 << 20)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, path: Path, model: str, min_share: Bytes | None) -> OpenTier:
    """A tier of an engine, opened as the assembly does."""
    options = NvmeTierOptions(
        "tiers[1]",
        (path,),
        CAPACITY,
        min_free=Bytes(0),
        movers=Movers.THREADS,
        min_share=min_share,
    )
    memory = SlotMemory(BLOCK, ARENA_SLOTS, memoryview(mmap.mmap(-1, BLOCK * ARENA_SLOTS)))
    key = NamespaceKey(model, {"model": model})
    tier = open_node_tier("nvme", options, EngineFacts(key, memory, False, False, 10.0))
    stack.callback(tier.close)
    return tier


def test_a_min_share_is_recorded_and_is_no_part_of_the_fingerprint(
    tmp_path: Path, stack: ExitStack
) -> None:
    first = opened(stack, tmp_path, "one", Bytes(1 << 20))
    second = opened(stack, tmp_path, "one", Bytes(2 << 20))
    opened(stack, tmp_path, "two", None)
    assert first.folder == second.folder, "engines with other shares share their blocks"
    record = load_record(RealFileSystem(), tmp_path)
    assert first.folder and record and record.min_shares == {first.folder.name: 2 << 20}
