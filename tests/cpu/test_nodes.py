"""Arena memory over NUMA nodes: which pieces are asked for where, and what is said."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcascade.tiers.cpu.huge_pages import PIECE_BYTES, address_of
from kvcascade.tiers.cpu.nodes import PIECES_MAX, bind_memory, memory_nodes, spread


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("nodes")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [
        ("0\n", "0", (0,)),
        ("0-1,4\n", "0-7", (0, 1, 4)),
        ("0-1\n", "1", (1,)),
        ("\n", "0", ()),
    ],
)
def test_nodes_are_those_with_memory_that_the_process_may_use(
    has_memory: str, allowed: str, nodes: tuple[int, ...], tmp_path: Path
) -> None:
    system, status = tmp_path / "has_memory", tmp_path / "status"
    system.write_text(has_memory)
    status.write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\nThreads:\t1\n")
    assert memory_nodes(system, status) == nodes
    assert memory_nodes(tmp_path / "none", status) == ()


@pytest.mark.parametrize(
    ("has_cpu", "nodes"),
    [("0\n", (0,)), ("0-1\n", (0, 1)), ("4\n", (0, 1, 2)), ("\n", (0, 1, 2)), (None, (0, 1, 2))],
)
def test_memory_without_cpus_is_left_out(
    has_cpu: str | None, nodes: tuple[int, ...], tmp_path: Path
) -> None:
    system, status = tmp_path / "has_memory", tmp_path / "status"
    system.write_text("0-2\n")
    status.write_text("Mems_allowed_list:\t0-7\n")
    if has_cpu is not None:
        (tmp_path / "has_cpu").write_text(has_cpu)
    assert memory_nodes(system, status) == nodes


def test_pieces_take_turns(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvcascade")
    length = 3 * PIECE_BYTES + 8192
    os.ftruncate(fd, length)
    asked: list[tuple[int, int]] = []
    spread(fd, length, (0, 2), lambda at, size, node: asked.append((size, node)))
    assert asked == [(PIECE_BYTES, 0), (PIECE_BYTES, 2), (PIECE_BYTES, 0), (8192, 2)]
    assert "nodes 0, 2" in caplog.text


def test_of_a_large_arena_pieces_are_larger(fd: int) -> None:
    length = 3 * PIECES_MAX * PIECE_BYTES
    os.ftruncate(fd, length)
    asked: list[int] = []
    spread(fd, length, (0, 1), lambda at, size, node: asked.append(size))
    assert len(asked) <= PIECES_MAX and sum(asked) == length


@pytest.mark.parametrize("page_bytes", [2 << 20, 512 << 20, 1 << 30])
def test_a_piece_has_whole_pages(page_bytes: int, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On hugetlbfs the kernel maps, assigns and unmaps whole pages only."""
    length = 3 << 30
    os.ftruncate(fd, length)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bsize=page_bytes))
    asked: list[int] = []
    spread(fd, length, (0, 1), lambda at, size, node: asked.append(size))
    assert set(asked) == {max(page_bytes, PIECE_BYTES)} and sum(asked) == length


@pytest.mark.parametrize(("code", "has_remedy"), [(errno.EPERM, True), (errno.EINVAL, False)])
def test_a_refusal_is_one_line_and_no_fault(
    code: int, has_remedy: bool, fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    os.ftruncate(fd, PIECE_BYTES)

    def refuse(address: int, length: int, node: int) -> None:
        raise OSError(code, os.strerror(code))

    caplog.set_level("INFO", "kvcascade")
    spread(fd, PIECE_BYTES, (0, 1), refuse)
    (line,) = caplog.messages
    assert os.strerror(code) in line and ("CAP_SYS_NICE" in line) == has_remedy


def test_the_kernel_keeps_the_node_for_who_maps_the_file_later(fd: int) -> None:
    os.ftruncate(fd, 2 * PIECE_BYTES)
    with mmap.mmap(fd, 8192) as mapped, memoryview(mapped) as memory:
        try:
            bind_memory(address_of(memory), 8192, memory_nodes()[0])
        except OSError as error:
            pytest.skip(f"this machine refuses mbind: {error}")
    spread(fd, 2 * PIECE_BYTES, memory_nodes()[:1])
    with mmap.mmap(fd, PIECE_BYTES, offset=PIECE_BYTES) as mapped, memoryview(mapped) as memory:
        memory[0] = 1
        at = f"{address_of(memory):x} "
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (policy,) = (line.split()[1] for line in lines if line.startswith(at))
        assert policy == f"prefer:{memory_nodes()[0]}"
