"""Huge pages between the arena and the disk: whose they are, and what passes through them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_file_system import MemoryFileSystem
from support.path_engine import PathEngine

from kvcascade.handlers.node import bounce
from kvcascade.handlers.node.bounce import ArenaBounce, PieceBounce, huge_pages, neighbours
from kvcascade.handlers.node.path import path_loop
from kvcascade.handlers.node.path.path_jobs import PART_BYTES
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.cpu.huge_pages import HUGE_PAGE_BYTES
from kvcascade.tiers.nvme.path.path_messages import PathOptions

BLOCK = 4096


def address(block: memoryview) -> int:
    return np.frombuffer(block, np.uint8).ctypes.data


def test_blocks_lie_in_a_row_from_a_huge_page_on() -> None:
    blocks = ArenaBounce(memoryview(b""), BLOCK).blocks(600)
    first = address(blocks[0])
    assert first % HUGE_PAGE_BYTES == 0
    assert [address(block) - first for block in blocks] == [i * BLOCK for i in range(600)]
    assert all(len(block) == BLOCK and not block.readonly for block in blocks)


def test_a_buffer_is_used_again_until_it_is_too_small() -> None:
    buffers = ArenaBounce(memoryview(b""), BLOCK)
    first = buffers.blocks(4)
    assert address(buffers.blocks(3)[0]) == address(first[0])
    assert buffers.blocks(0) == []
    more = buffers.blocks(HUGE_PAGE_BYTES // BLOCK * 3)
    more[-1][:] = b"x" * BLOCK
    assert address(buffers.blocks(4)[0]) == address(more[0])


def test_every_thread_has_its_own() -> None:
    buffers = ArenaBounce(memoryview(b""), BLOCK)
    mine = buffers.blocks(1)
    with ThreadPoolExecutor(1) as executor:
        theirs = executor.submit(buffers.blocks, 1).result()
        assert address(mine[0]) != address(theirs[0])


def test_what_a_thread_made_before_is_there_when_it_is_used() -> None:
    blocks = 32 * HUGE_PAGE_BYTES // BLOCK
    buffers = ArenaBounce(memoryview(b""), BLOCK)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(buffers.blocks, blocks).result()
        before = resident_bytes()
        for block in executor.submit(buffers.blocks, blocks).result():
            block[:1] = b"x"
        assert resident_bytes() - before < 16 * HUGE_PAGE_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@given(slots=st.lists(st.integers(0, 15), unique=True))
def test_what_is_taken_is_what_lay_there(slots: list[int]) -> None:
    arena = bytearray().join(bytes([slot]) * BLOCK for slot in range(16))
    taken = ArenaBounce(memoryview(arena), BLOCK).take(np.array(slots, dtype=np.int32))
    assert [bytes(block) for block in taken] == [bytes([slot]) * BLOCK for slot in slots]


@given(data=st.data(), slots=st.lists(st.integers(0, 15), unique=True, min_size=1))
def test_only_what_is_given_comes_to_its_slot(data: st.DataObject, slots: list[int]) -> None:
    places = data.draw(st.lists(st.sampled_from(range(len(slots))), unique=True))
    arena = bytearray(16 * BLOCK)
    buffers = ArenaBounce(memoryview(arena), BLOCK)
    for place, block in enumerate(buffers.blocks(len(slots))):
        block[:] = bytes([1 + place]) * BLOCK
    buffers.give(np.array(slots, dtype=np.int32), places)
    expected = {slots[place]: 1 + place for place in places}
    for slot in range(16):
        found = arena[slot * BLOCK : (slot + 1) * BLOCK]
        assert found == bytes([expected.get(slot, 0)]) * BLOCK


def test_neighbours_are_moved_in_one_go() -> None:
    slots = np.array([7, 8, 9, 3, 4, 9, 8], dtype=np.int32)
    assert neighbours(slots, range(7)) == [(0, 7, 3), (3, 3, 2), (5, 9, 1), (6, 8, 1)]
    assert neighbours(slots, [0, 2, 3, 4]) == [(0, 7, 1), (2, 9, 1), (3, 3, 2)]
    assert neighbours(slots, []) == []


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_large_blocks_pass_in_pieces(length: int) -> None:
    fs = MemoryFileSystem()
    file = fs.open(Path("/a"), create=True)
    pieces = PieceBounce(2 * BLOCK)
    blocks = [bytes([n + 1, n + 2]) * (length * BLOCK // 2) for n in range(3)]
    pieces.write(file, [memoryview(block) for block in blocks], BLOCK)
    assert fs.calls["pwritev"] == 3 * -(-length // 2)
    found = [bytearray(length * BLOCK) for _ in blocks]
    pieces.read(file, [memoryview(block) for block in found], BLOCK)
    assert found == blocks
    assert file.size() == BLOCK + 3 * length * BLOCK


def test_large_blocks_need_no_larger_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def note(length: int) -> memoryview:
        lengths.append(length)
        return huge_pages(length)

    monkeypatch.setattr(bounce, "huge_pages", note)
    monkeypatch.setattr(path_loop, "has_huge_pages", lambda: True)
    block_bytes = 2 * PART_BYTES + BLOCK
    options = PathOptions(256 << 20, segment_bytes=block_bytes)
    engine = PathEngine(
        [tmp_path], options, block_bytes=block_bytes, arena_slots=3, is_thread=True
    ).open()
    engine.store(range(3))
    assert engine.get(range(3)) == [BlockOutcome.OK] * 3
    engine.close()
    assert lengths and set(lengths) == {PART_BYTES}
