"""Spread shared memory over the NUMA nodes of a machine with several sockets.

One process reserves all of the arena's memory. By default the memory lies on that process's node,
so half of the GPUs reach it through the link between sockets. The kernel keeps a preferred node for
each piece of a shared file (`mbind` on tmpfs and hugetlbfs), whichever process faults in its pages.
This module assigns the pieces to the nodes in round-robin order.

The kernel's own interleaving does not work here. It chooses a node by the number of a small page,
and huge pages are gathered from pages whose numbers are all even.

The node is a preference: if it is full, the memory comes from another node and no call fails.
Docker's default profile forbids the call without CAP_SYS_NICE. The memory then lies where the
process runs, and a warning is logged.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from ...logs import get_logger
from .header import round_up
from .huge_pages import PIECE_BYTES, address_of

logger = get_logger(__name__)

Bind = Callable[[int, int, int], None]
"""`bind(address, length, node)` sets the preferred node of a memory range. Raises `OSError`."""

PIECES_MAX = 4096
"""Maximum number of pieces of an arena. Each piece costs a call of some microseconds and a record
in the kernel."""
_CALLS = {"x86_64": 237, "aarch64": 235}
"""Number of the system call `mbind`, by machine type."""
_PREFERRED = 1
_NODE_BITS = 64

_syscall = ctypes.CDLL(None, use_errno=True).syscall


def memory_nodes(
    system: Path = Path("/sys/devices/system/node/has_memory"),
    status: Path = Path("/proc/self/status"),
) -> tuple[int, ...]:
    """Return the nodes with memory that this process may use; empty if the kernel does not tell.

    Nodes without CPUs are left out, unless there is no other: their memory is that of a GPU, or far
    away (CXL).
    """
    try:
        nodes = _numbers(system.read_text())
        allowed = next(
            _numbers(line.partition(":")[2])
            for line in status.read_text().splitlines()
            if line.startswith("Mems_allowed_list:")
        )
    except (OSError, ValueError, StopIteration):
        return ()
    usable = nodes & allowed
    with suppress(OSError, ValueError):
        usable = usable & _numbers(system.with_name("has_cpu").read_text()) or usable
    return tuple(sorted(usable))


def bind_memory(address: int, length: int, node: int) -> None:
    """Set the preferred node of a range of mapped memory. Raises `OSError`."""
    number = _CALLS.get(platform.machine())
    if number is None or node >= _NODE_BITS:
        raise OSError(f"not known how to ask for node {node} on {platform.machine()}")
    mask, bits = ctypes.c_uint64(1 << node), ctypes.c_ulong(_NODE_BITS + 1)
    call = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length))
    if _syscall(*call, _PREFERRED, ctypes.byref(mask), bits, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def spread(fd: int, length: int, nodes: Sequence[int], bind: Bind = bind_memory) -> None:
    """Assign the pieces of a file that has no pages yet to the nodes, in round-robin order.

    Logs the result. If the kernel refuses, pieces assigned before keep their node. Raises `OSError`
    if the file cannot be mapped.
    """
    step = max(PIECE_BYTES, os.fstatvfs(fd).f_bsize)  # pages of hugetlbfs may be larger
    piece = round_up(max(step, length // PIECES_MAX), step)
    for start, node in zip(range(0, length, piece), cycle(nodes), strict=False):
        size = min(piece, length - start)
        # One mapping a piece: each piece of a shared one becomes a mapping, of 65,530 allowed.
        with mmap.mmap(fd, size, offset=start) as mapped, memoryview(mapped) as memory:
            try:
                bind(address_of(memory), size, node)
            except OSError as error:
                is_forbidden = error.errno == errno.EPERM
                logger.warning(
                    "the CPU arena lies on the NUMA node of the process that made it: spreading it "
                    "over nodes %s was refused (%s)%s",
                    _named(nodes),
                    error,
                    "; in a container, allow CAP_SYS_NICE" if is_forbidden else "",
                )
                return
    logger.info(
        "the CPU arena takes turns at NUMA nodes %s, %d MiB at a time", _named(nodes), piece >> 20
    )


def _named(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as `0-1,4`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
