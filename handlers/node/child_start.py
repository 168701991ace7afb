"""First steps of a process that moves blocks: end with the parent, schedule as `SCHED_BATCH`."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ...errors import KVCascadeError
from ...logs import log_to_stderr
from ...tiers.cpu.huge_pages import address_of
from ...tiers.cpu.prefault import PIECE_BYTES, populate
from ...tiers.nvme.path.frames import DECODE_ERRORS, FrameReader, WireError

SETUP_LIMIT_S = 30.0
"""Longest wait for the setup."""
_PR_SET_PDEATHSIG = 1

Setup = TypeVar("Setup", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


def run_child(
    arguments: Sequence[str], name: str, serve: Callable[[socket.socket, int], None]
) -> int:
    """Run a process that moves blocks; return its exit status.

    `arguments` are the descriptors of its socket and of the arena, and the number of its parent.
    `serve` gets both descriptors and returns when the parent has closed the socket. `name` is
    in every line of its log.
    """
    socket_fd, arena_fd, parent_pid = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the closed socket ends it
        signal.signal(number, signal.SIG_IGN)
    die_with(parent_pid)
    give_way()
    allow_open_files()
    log_to_stderr(name)
    try:
        serve(socket.socket(fileno=socket_fd), arena_fd)
    except (KVCascadeError, OSError, WireError) as error:
        _log.error("ends: %s", error)
        return 1
    return 0


def receive_setup(
    connection: socket.socket, decode: Callable[[bytes], Any], kind: type[Setup]
) -> Setup | None:
    """Return the first message of the scheduler; None if it closed the socket.

    The scheduler sends nothing else before the node is ready. Raises `WireError`.
    """
    reader = FrameReader()
    connection.settimeout(SETUP_LIMIT_S)
    while data := reader.receive(connection):
        for body in reader.feed(data):
            try:
                setup = decode(body)
            except DECODE_ERRORS as error:
                raise WireError(str(error)) from None
            if not isinstance(setup, kind):
                raise WireError("an order before the setup")
            return setup
    return None


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread ends. Exit if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def give_way() -> None:
    """Lower the scheduling class, so that threads woken by the disk preempt no other process."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def allow_open_files() -> None:
    """Raise the limit of open files as far as this process may: it keeps a share of them open."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prefault(memory: memoryview) -> None:
    """Map every page of the arena, so that no transfer takes page faults. Changes no byte."""
    address = address_of(memory)
    try:
        for start in range(0, len(memory), PIECE_BYTES):
            populate([(address + start, min(PIECE_BYTES, len(memory) - start))])
    except KVCascadeError as error:  # pages are then mapped at first use
        _log.warning("%s", error)
