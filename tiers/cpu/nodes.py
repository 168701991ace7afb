"""Shared memory over the NUMA nodes of a machine with several sockets.

One process takes all of the arena's memory, so it would lie on that process' node, and half of the
GPUs would reach it through the link between sockets. The kernel keeps a preferred node for each
piece of a shared file (`mbind` on tmpfs and hugetlbfs), whoever takes its pages later; pieces take
turns at the nodes. The kernel's own interleaving does not do: it chooses a node by the number of a
small page, and those from which huge pages are gathered are all even.

Preferred means that a full node takes nothing and fails nothing. Docker's default profile forbids
the call without CAP_SYS_NICE; memory then lies where the process runs, as a line in the log says.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from ...logs import get_logger
from .header import round_up
from .huge_pages import PIECE_BYTES, address_of

logger = get_logger(__name__)

Bind = Callable[[int, int, int], None]
"""`bind(address, length, node)`. Raises `OSError`."""

PIECES_MAX = 4096
"""Of an arena; each is a call of some microseconds, and a record in the kernel."""
_CALLS = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call `mbind`."""
_PREFERRED = 1
_NODE_BITS = 64

_syscall = ctypes.CDLL(None, use_errno=True).syscall


def memory_nodes(
    system: Path = Path("/sys/devices/system/node/has_memory"),
    status: Path = Path("/proc/self/status"),
) -> tuple[int, ...]:
    """Nodes with memory that this process may use; none if the kernel does not say."""
    try:
        nodes = _numbers(system.read_text())
        allowed = next(
            _numbers(line.partition(":")[2])
            for line in status.read_text().splitlines()
            if line.startswith("Mems_allowed_list:")
        )
    except (OSError, ValueError, StopIteration):
        return ()
    return tuple(sorted(nodes & allowed))


def bind_memory(address: int, length: int, node: int) -> None:
    """Prefer a node for mapped memory. Raises `OSError`."""
    number = _CALLS.get(platform.machine())
    if number is None or node >= _NODE_BITS:
        raise OSError(f"not known how to ask for node {node} on {platform.machine()}")
    mask, bits = ctypes.c_uint64(1 << node), ctypes.c_ulong(_NODE_BITS + 1)
    call = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length))
    if _syscall(*call, _PREFERRED, ctypes.byref(mask), bits, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def spread(fd: int, length: int, nodes: Sequence[int], bind: Bind = bind_memory) -> bool:
    """Let pieces of a file that has no pages yet take turns at the nodes; a line says how it went.

    False if the kernel refuses; nothing else changes then. Raises `OSError` if it cannot be mapped.
    """
    piece = round_up(max(PIECE_BYTES, length // PIECES_MAX), PIECE_BYTES)
    for start, node in zip(range(0, length, piece), cycle(nodes), strict=False):
        size = min(piece, length - start)
        # Each by itself: in one mapping they would be as many, and a process may have 65,530.
        with mmap.mmap(fd, size, offset=start) as mapped, memoryview(mapped) as memory:
            try:
                bind(address_of(memory), size, node)
            except OSError as error:
                logger.warning(
                    "the CPU arena lies on the NUMA node of the process that made it: spreading it "
                    "over nodes %s was refused (%s); in a container, allow CAP_SYS_NICE",
                    _named(nodes),
                    error,
                )
                return False
    logger.info(
        "the CPU arena takes turns at NUMA nodes %s, %d MiB at a time", _named(nodes), piece >> 20
    )
    return True


def _named(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))


def _numbers(text: str) -> set[int]:
    """`0-1,4` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
