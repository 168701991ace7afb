"""`kvcascade store`: the writer of a path, without an arena and without blocks of its own."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from ....assembly.path_parts import OPTIONS_OF_PATH, PathParts, path_parts
from ....config.environment import PREFIX, naming_variables, with_environment
from ....config.sizes import human
from ....errors import ConfigError, InUseError, is_folder
from ....handlers.node.path.path_service import WriterService
from ....handlers.node.path.writer_search import RETIRED_PAUSE_S
from ....logs import get_logger
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem, RealFileSystem
from ....tiers.nvme.path.path_lock import lock_path
from ....tiers.nvme.path.writer.path_options import check_paths, load_record
from ..path_files import load_note, named
from ..path_folders import check_may_write, missing_folder
from ..path_session import check_disks, hand_over

CHECK_INTERVAL_S = 0.5
"""Time between two checks that the writer lives, and between two attempts to become it."""
HURRY_INTERVAL_S = 0.005
"""Time between two attempts to take over. Other nodes want to lead, too, once the writer ends."""
ASK_INTERVAL_S = 0.1
"""Time between two requests to hand the path over; another node may lead by then."""
TAKE_OVER_LIMIT_S = 60.0
HAND_OVER_ANSWER_S = 1.0
"""Longest wait for the answer of a writer that is asked to end."""
STOP_LIMIT_S = 60.0
"""Longest wait until the writer has closed the path."""

Clock = Callable[[], float]
Pause = Callable[[float], object]
_log = get_logger(__name__)


class Rival(Enum):
    """Treatment of another process that is the writer."""

    REFUSED = "refused"
    """Raise an error that names it."""
    AWAITED = "awaited"
    """Wait until it ends."""
    ASKED = "asked"
    """Ask it to close the path, and take over."""


class StoreEnd(Enum):
    """Reason why a service ended."""

    STOPPED = "stopped"
    """The service was asked to end, and closed the path cleanly."""
    RETIRED = "retired"
    """Another process asked for the path."""
    FAILED = "failed"
    """The folder was replaced or unmounted, or the writer failed; the log says which."""


def parts_of(
    paths: Sequence[Path], given: Mapping[str, object], environment: Mapping[str, str]
) -> PathParts:
    """Return a path with its options: those given, those of the environment, those recorded.

    Raises a `KVCascadeError`.
    """
    check_may_write(paths)
    found: Any = with_environment({"tiers": [{"type": "nvme"}]}, environment)[0]
    tier = found["tiers"][0]
    options = {name: value for name, value in tier.items() if name in OPTIONS_OF_PATH}
    unset = options.keys() - given.keys()
    with naming_variables({f"store.{name}": f"{PREFIX}NVME_{name.upper()}" for name in unset}):
        parts = path_parts(RealFileSystem(), list(paths), {**options, **given}, "store")
    for root in parts.roots:
        if not is_folder(root):
            if parts.record is not None:
                raise missing_folder(root)
            raise ConfigError(f"path {str(root)!r} does not exist; create it")
    check_disks(RealFileSystem(), parts.roots)
    return parts


def serve(
    parts: PathParts, *, rival: Rival, pause: Pause = time.sleep, clock: Clock = time.monotonic
) -> StoreEnd:
    """Write a path until SIGINT, or SIGTERM turned into it, ends the pause.

    A rival that is awaited may also ask for the path later; the service then waits for its end.

    Raises `InUseError` if another process remains the writer, or another `KVCascadeError`. Main
    thread.
    """
    root = parts.roots[0]
    try:
        while True:
            end = _serve_once(parts, _lock(parts, rival, pause, clock), pause)
            if end is not StoreEnd.RETIRED or rival is not Rival.AWAITED:
                return end
            pause(RETIRED_PAUSE_S)
    except KeyboardInterrupt:
        _log.info("stopped; this process does not write %s", root)
        return StoreEnd.STOPPED


def _serve_once(parts: PathParts, lock: FileLock, pause: Pause) -> StoreEnd:
    root = parts.roots[0]
    service = _start(RealFileSystem(), parts, lock)
    was_asked = False
    try:
        while service.is_alive:
            pause(CHECK_INTERVAL_S)
    except KeyboardInterrupt:
        was_asked = True
    if service.was_retired and not was_asked:
        _log.warning(
            "%s is handed over: a newer version asked for it, or `kvcascade store --take-over`",
            root,
        )
        return StoreEnd.RETIRED
    if not service.is_alive and not service.was_retired:
        return StoreEnd.FAILED
    if not service.stop(STOP_LIMIT_S):
        _log.error("the writer of %s did not close within %g s", root, STOP_LIMIT_S)
        return StoreEnd.FAILED
    _log.info("stopped; %s is closed", root)
    return StoreEnd.STOPPED


def _lock(parts: PathParts, rival: Rival, pause: Pause, clock: Clock) -> FileLock:
    """Return the lock of the writer. Raises `InUseError` if another process keeps it."""
    fs, root = RealFileSystem(), parts.roots[0]
    lock = lock_path(fs, root)
    if lock is not None:
        return lock
    who = _writer_of(fs, root)
    if rival is Rival.REFUSED:
        raise InUseError(
            f"{root} has a writer already: {who}; stop it, or take over now with --take-over, or "
            "later with --wait"
        )
    _log.info("%s has a writer already: %s; waiting for its end", root, who)
    if rival is Rival.ASKED:
        return _taken_over(fs, parts, pause, clock)
    while lock is None:
        pause(CHECK_INTERVAL_S)
        lock = lock_path(fs, root)
    return lock


def _taken_over(fs: FileSystem, parts: PathParts, pause: Pause, clock: Clock) -> FileLock:
    """Ask each writer to end until this process has the lock. Raises a `KVCascadeError`."""
    root = parts.roots[0]
    record = load_record(fs, root)
    if record is not None:
        check_paths(record.paths, list(map(str, parts.roots)))  # while the writer still writes
    asked_s, end_s = -math.inf, clock() + TAKE_OVER_LIMIT_S
    while clock() < end_s:
        if clock() >= asked_s + ASK_INTERVAL_S:
            hand_over(fs, root, HAND_OVER_ANSWER_S)
            asked_s = clock()
        lock = lock_path(fs, root)
        if lock is not None:
            return lock
        pause(HURRY_INTERVAL_S)
    raise InUseError(
        f"{root} was not handed over within {TAKE_OVER_LIMIT_S:g} s by {_writer_of(fs, root)}; "
        "stop that process"
    )


def _writer_of(fs: FileSystem, root: Path) -> str:
    note = load_note(fs, root)
    return "another process" if note is None else named(note)


def _start(fs: FileSystem, parts: PathParts, lock: FileLock) -> WriterService:
    options = parts.options
    name = f"kvcascade store on {socket.gethostname()}, process {os.getpid()}"
    service = WriterService(fs, parts.roots, options, lock, name=name)
    _log.info(
        "process %d writes %s: capacity %s, policy %s, durability %s",
        os.getpid(),
        " and ".join(map(str, parts.roots)),
        human(options.capacity_bytes),
        options.policy,
        options.durability,
    )
    return service
