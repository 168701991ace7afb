"""What the machine has for an arena, asked before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...config.cgroup import group_memory
from ...config.machine import HUGETLBFS, file_system_of
from ...config.sizes import human
from ...errors import ConfigError, os_errors
from .huge_pages import may_share_huge_pages
from .nodes import memory_nodes

_PAGE_BYTES = 4096
_START_TIME_FIELD = 19  # of /proc/<pid>/stat, counted after the command name


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Room for an arena in one directory."""

    available_bytes: int
    """Memory that can be had without swapping, within the limits of the container."""
    dir_free_bytes: int
    """Free space of the directory's file system."""
    block_bytes: int
    """Sizes of files in the directory are multiples of this (2 MiB or more on hugetlbfs)."""
    huge: bool
    """True for hugetlbfs, whose memory is set aside and not part of `available_bytes`."""
    may_gather: bool = False
    """True if the kernel may be asked for huge pages there."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes among which its memory can be spread."""


def probe_machine(arena_dir: str) -> MachineMemory:
    """Ask the machine. Raises ours for a directory that cannot be asked."""
    with os_errors(f"asking for the free space of arena_dir {arena_dir}"):
        free = psutil.disk_usage(arena_dir).free
        block_bytes = os.statvfs(arena_dir).f_bsize
    file_system = file_system_of(arena_dir)
    huge = file_system == HUGETLBFS
    may_gather = file_system == "tmpfs" and may_share_huge_pages()
    available = min(int(psutil.virtual_memory().available), group_memory().available)
    page_bytes = block_bytes if huge else _PAGE_BYTES
    nodes = memory_nodes() if huge or file_system == "tmpfs" else ()
    return MachineMemory(available, int(free), page_bytes, huge, may_gather, nodes)


def check_capacity(total_bytes: int, arena_dir: str, memory: MachineMemory) -> None:
    """Raise `ConfigError` if an arena of `total_bytes` does not fit."""
    asked = f"capacity: the cpu tier asks for {human(total_bytes)}"
    if total_bytes > memory.dir_free_bytes:
        raise ConfigError(
            f"{asked}, but {arena_dir} has {human(memory.dir_free_bytes)} free; lower it, "
            f"enlarge that file system (docker: --shm-size), or set arena_dir to a larger one"
        )
    if not memory.huge and total_bytes > memory.available_bytes:
        raise ConfigError(
            f"{asked}, but {human(memory.available_bytes)} of memory is available; "
            f"lower it or free memory"
        )


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
    except (OSError, ValueError, IndexError):
        return 0
