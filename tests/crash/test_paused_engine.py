"""An engine is paused in a write to the disk, for longer than its writer can queue messages."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from support.children import children

import kvcascade
from kvcascade.handlers.node.path import path_link

BLOCK, BATCH = 4096, 256
SLOTS = 2048
"""More slots than there are."""
PAUSED = f"""
import sys
import numpy as np
import kvcascade
from kvcascade.handlers.node import node_keeper
from kvcascade.handlers.node.path.path_node import PathNode
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles

node_keeper.SILENCE_LIMIT_S = 3600.0
write_run, lost = PayloadFiles.write_run, PathNode.lost

def wait_then_write(files, first, buffers):
    PayloadFiles.write_run = write_run
    print("granted", flush=True)
    sys.stdin.readline()
    write_run(files, first, buffers)

def tell_that_it_is_lost(node):
    PathNode.lost = lost
    lost(node)
    print("lost", flush=True)

PayloadFiles.write_run, PathNode.lost = wait_then_write, tell_that_it_is_lost
cache = kvcascade.open(sys.argv[1], namespace="n", block_bytes={BLOCK}, timeout_s=3600)
keys = [b"paused %d" % number for number in range(32)]
while not all(each.is_there for each in cache.put(keys, [np.full({BLOCK}, 255, np.uint8)] * 32)):
    "The writer is another one now, or is lost."
print("stored", flush=True)
cache.close()
"""


class Blocks:
    """Blocks that the writer acknowledged, and their contents."""

    def __init__(self, cache: kvcascade.BlockCache) -> None:
        self._cache = cache
        self._count = 0
        self._stored: list[int] = []

    def store(self, count: int) -> None:
        """Store so many other blocks."""
        for first in range(self._count, self._count + count, BATCH):
            numbers = range(first, first + BATCH)
            outcomes = self._cache.put(
                [_key(number) for number in numbers], [_content(number) for number in numbers]
            )
            pairs = zip(numbers, outcomes, strict=True)
            self._stored += [number for number, outcome in pairs if outcome.is_there]
        self._count += count

    def found(self) -> int:
        """Return the number of blocks that are there; none of them is lost or wrong."""
        keys = [_key(number) for number in self._stored]
        pairs = zip(self._stored, self._cache.exists(keys), strict=True)
        here = [number for number, is_there in pairs if is_there]
        got = self._cache.get([_key(number) for number in here])
        for number, block in zip(here, got, strict=True):
            assert block is not None, f"block {number} is lost"
            assert np.array_equal(block, _content(number))
        return len(here)


def _key(number: int) -> bytes:
    return (b"%d-" % number).ljust(64, b"x")


def _content(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    block = np.zeros(BLOCK, np.uint8)
    block[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return block


def test_a_late_write_of_a_paused_engine_damages_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(path_link, "MAX_UNSENT_BYTES", 1 << 18)
    with (
        kvcascade.open(
            tmp_path,
            namespace="n",
            block_bytes=BLOCK,
            capacity=SLOTS * BLOCK,
            min_free=0,
            segment_size="1MiB",
        ) as cache,
        children() as start,
    ):
        paused, blocks = start(PAUSED, tmp_path), Blocks(cache)
        assert paused.stdin is not None and paused.stdout is not None
        paused.send_signal(signal.SIGSTOP)
        blocks.store(10 * SLOTS)
        assert "does not read what the writer of the path sends" in caplog.text
        blocks.store(2 * SLOTS)
        paused.send_signal(signal.SIGCONT)
        assert paused.stdout.readline() == "lost\n"
        blocks.store(2 * SLOTS)
        paused.stdin.write("write\n")
        paused.stdin.flush()
        assert paused.stdout.readline() == "stored\n", "it has joined again"
        assert blocks.found() > SLOTS // 4
