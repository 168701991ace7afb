"""Huge pages between the arena and the disk: whose they are, and what passes through them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from kvcascade.handlers.bounce import HUGE_PAGE_BYTES, BounceBuffers, copy_block, has_huge_pages

BLOCK = 4096


def address(block: memoryview) -> int:
    return np.frombuffer(block, np.uint8).ctypes.data


def test_blocks_lie_in_a_row_from_a_huge_page_on() -> None:
    blocks = BounceBuffers(BLOCK).blocks(600)
    first = address(blocks[0])
    assert first % HUGE_PAGE_BYTES == 0
    assert [address(block) - first for block in blocks] == [i * BLOCK for i in range(600)]
    assert all(len(block) == BLOCK and not block.readonly for block in blocks)


def test_a_buffer_is_used_again_until_it_is_too_small() -> None:
    buffers = BounceBuffers(BLOCK)
    first = buffers.blocks(4)
    assert address(buffers.blocks(3)[0]) == address(first[0])
    assert buffers.blocks(0) == []
    more = buffers.blocks(HUGE_PAGE_BYTES // BLOCK * 3)
    more[-1][:] = b"x" * BLOCK
    assert address(buffers.blocks(4)[0]) == address(more[0])


def test_every_thread_has_its_own() -> None:
    buffers = BounceBuffers(BLOCK)
    mine = buffers.blocks(1)
    with ThreadPoolExecutor(1) as executor:
        theirs = executor.submit(buffers.blocks, 1).result()
        assert address(mine[0]) != address(theirs[0])


def test_what_a_thread_made_before_is_there_when_it_is_used() -> None:
    blocks = 32 * HUGE_PAGE_BYTES // BLOCK
    buffers = BounceBuffers(BLOCK)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(buffers.blocks, blocks).result()
        before = resident_bytes()
        for block in executor.submit(buffers.blocks, blocks).result():
            block[:1] = b"x"
        assert resident_bytes() - before < 16 * HUGE_PAGE_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def test_copies() -> None:
    blocks = [memoryview(bytearray([i]) * BLOCK) for i in range(5)]
    assert BounceBuffers(BLOCK).copies(blocks) == blocks
    target = memoryview(bytearray(BLOCK))
    copy_block(target, blocks[3])
    assert target == blocks[3]


@pytest.mark.parametrize(
    "setting", [("always [madvise] never", True), ("always madvise [never]", False), (None, False)]
)
def test_whether_there_are_huge_pages(tmp_path: Path, setting: tuple[str | None, bool]) -> None:
    text, expected = setting
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text + "\n")
    assert has_huge_pages(path) is expected
