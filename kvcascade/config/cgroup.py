"""Read the memory limits of this process's container from its control groups.

A limit may be set for the group of the process and for every group above it; the lowest applies. A
container sees its own group as the root, or the whole path if it shares the host's view. Both
versions of control groups are read. If neither is found, there is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""One line per hierarchy: number, controllers (none in version 2), path of this process's group."""
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Memory limits by control groups, in bytes; `NO_LIMIT` if they set none."""

    limit: int = NO_LIMIT
    """Lowest limit of all groups."""
    available: int = NO_LIMIT
    """Memory that can be allocated under all limits without swapping."""


@dataclass(frozen=True, slots=True)
class _Names:
    """File and field names of one version of control groups."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    """The lowest applies. Above `memory.high` the kernel slows the processes down to a halt."""
    used: str
    reclaimable: tuple[str, ...]
    """Lines of `memory.stat` for memory that the kernel can reclaim, such as the page cache. They
    do not count shared memory, such as an arena."""


_V2 = _Names(
    ("", "unified"),
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
)
_V1 = _Names(
    ("memory",),
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def group_memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> GroupMemory:
    """Return the limits of this process; `root` is where control groups are mounted."""
    found = [memory for names, path in _groups(membership) for memory in _walk(root, names, path)]
    return GroupMemory(
        min((memory.limit for memory in found), default=NO_LIMIT),
        min((memory.available for memory in found), default=NO_LIMIT),
    )


def _groups(membership: Path) -> Iterator[tuple[_Names, PurePosixPath]]:
    """Yield the groups of this process that may limit memory; the roots if no list is readable."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield _V2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)


def _walk(root: Path, names: _Names, path: PurePosixPath) -> Iterator[GroupMemory]:
    """Yield the limits of a group and of those above it, as far as this process can see them."""
    inner = path.relative_to(path.anchor)
    if ".." in inner.parts:  # it lies outside of this process's view
        inner = PurePosixPath()
    for mount in names.mounts:
        for group in (inner, *inner.parents):
            memory = _read(root / mount / group, names)
            if memory is not None:
                yield memory


def _read(folder: Path, names: _Names) -> GroupMemory | None:
    limits: list[int] = []
    for name in names.limits:
        with suppress(OSError, ValueError):  # "max": no limit here
            limits.append(int((folder / name).read_text()))
    try:
        limit = min(limits)
        used = int((folder / names.used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        stat = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):  # no limit
        return None
    reclaimable = sum(stat.get(name, 0) for name in names.reclaimable)
    return GroupMemory(limit, max(limit - used + reclaimable, 0))
