"""Memory and space available for an arena, checked before any allocation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...config.machine import HUGETLBFS, Machine
from ...config.sizes import human
from ...errors import ConfigError, os_errors
from .huge_pages import may_share_huge_pages
from .nodes import memory_nodes

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory and space that an arena in one directory can use."""

    available_bytes: int
    """Memory that can be allocated without swapping, within the container's limits, in bytes."""
    dir_free_bytes: int
    """Free space of the directory's file system, in bytes."""
    block_bytes: int
    """Unit of file sizes in the directory, in bytes (2 MiB or more on hugetlbfs)."""
    huge: bool
    """True for hugetlbfs. Its memory is reserved and not part of `available_bytes`."""
    may_gather: bool = False
    """True if this process may request huge pages for files in the directory."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes over which the arena's memory can be spread."""


def probe_machine(arena_dir: str) -> MachineMemory:
    """Read the limits of this machine. Raises a `KVCascadeError` if that fails."""
    machine, folder = Machine(), Path(arena_dir)
    with os_errors(f"asking for the free space of arena_dir {arena_dir}"):
        free = machine.disk(folder).free
        block_bytes = os.statvfs(folder).f_bsize
    file_system = machine.file_system(folder)
    huge = file_system == HUGETLBFS
    may_gather = file_system == "tmpfs" and may_share_huge_pages()
    page_bytes = block_bytes if huge else _PAGE_BYTES
    nodes = memory_nodes() if huge or file_system == "tmpfs" else ()
    return MachineMemory(machine.memory().available, free, page_bytes, huge, may_gather, nodes)


def check_capacity(total_bytes: int, arena_dir: str, memory: MachineMemory) -> None:
    """Raise `ConfigError` if an arena of `total_bytes` does not fit."""
    asked = f"capacity: the cpu tier asks for {human(total_bytes)}"
    if total_bytes > memory.dir_free_bytes:
        raise ConfigError(
            f"{asked}, but {arena_dir} has {human(memory.dir_free_bytes)} free; lower it, "
            "enlarge that file system (docker: --shm-size), set arena_dir to a larger one, or free "
            "kept memory with `kvcascade shm drop`"
        )
    if not memory.huge and total_bytes > memory.available_bytes:
        raise ConfigError(
            f"{asked}, but {human(memory.available_bytes)} of memory is available; "
            f"lower it or free memory"
        )
