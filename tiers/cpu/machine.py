"""What the machine has for an arena, asked before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...errors import ConfigError, os_errors
from .huge_pages import may_share_huge_pages

_PAGE_BYTES = 4096
_CGROUP = Path("/sys/fs/cgroup")
_START_TIME_FIELD = 19  # of /proc/<pid>/stat, counted after the command name


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Room for an arena in one directory."""

    available_bytes: int
    """Memory that can be had without swapping, within the limit of the container."""
    dir_free_bytes: int
    """Free space of the directory's file system."""
    block_bytes: int
    """Sizes of files in the directory are multiples of this (2 MiB or more on hugetlbfs)."""
    huge: bool
    """True for hugetlbfs, whose memory is set aside and not part of `available_bytes`."""
    may_gather: bool = False
    """True if the kernel may be asked for huge pages there."""


def probe_machine(arena_dir: str) -> MachineMemory:
    """Ask the machine. Raises ours for a directory that cannot be asked."""
    with os_errors(f"asking for the free space of arena_dir {arena_dir}"):
        free = psutil.disk_usage(arena_dir).free
        block_bytes = os.statvfs(arena_dir).f_bsize
    file_system = _file_system_of(arena_dir)
    huge = file_system == "hugetlbfs"
    may_gather = file_system == "tmpfs" and may_share_huge_pages()
    available = min(int(psutil.virtual_memory().available), _cgroup_available())
    page_bytes = block_bytes if huge else _PAGE_BYTES
    return MachineMemory(available, int(free), page_bytes, huge, may_gather)


def check_capacity(total_bytes: int, arena_dir: str, memory: MachineMemory) -> None:
    """Raise `ConfigError` if an arena of `total_bytes` does not fit."""
    asked = f"capacity: the cpu tier asks for {show_bytes(total_bytes)}"
    if total_bytes > memory.dir_free_bytes:
        raise ConfigError(
            f"{asked}, but {arena_dir} has {show_bytes(memory.dir_free_bytes)} free; lower it, "
            f"enlarge that file system (docker: --shm-size), or set arena_dir to a larger one"
        )
    if not memory.huge and total_bytes > memory.available_bytes:
        raise ConfigError(
            f"{asked}, but {show_bytes(memory.available_bytes)} of memory is available; "
            f"lower it or free memory"
        )


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


def show_bytes(count: int) -> str:
    """`count` bytes for a message, such as `64.0 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _file_system_of(directory: str) -> str:
    """Type of the file system that a directory is on, as /proc names it."""
    real = os.path.realpath(directory)
    best, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, mount.fstype
    return kind


def _cgroup_available() -> int:
    """Memory left under the container's limit (cgroup v2); without one, no bound."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return 1 << 62  # no limit ("max"), or no cgroup v2 here
