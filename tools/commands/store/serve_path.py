"""`kvcascade store`: the writer of a path, without an arena and without blocks of its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from ....assembly.path_parts import OPTIONS_OF_PATH, PathParts, path_parts
from ....config.environment import PREFIX, naming_variables, with_environment
from ....config.sizes import human
from ....errors import ConfigError, InUseError
from ....handlers.node.path_service import WriterService
from ....handlers.node.path_session import follow_session
from ....logs import get_logger
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem, RealFileSystem
from ....tiers.nvme.path.path_lock import try_lead
from ....tiers.nvme.path.writer_note import load_note

CHECK_INTERVAL_S = 0.5
"""Time between two checks that the writer lives, and between two attempts to become it."""
HURRY_INTERVAL_S = 0.05
"""Time between two attempts to take over. Other nodes want to lead, too, once the writer ends."""
TAKE_OVER_LIMIT_S = 60.0
HAND_OVER_ANSWER_S = 1.0
"""Longest wait for the answer of a writer that is asked to end."""
STOP_LIMIT_S = 60.0
"""Longest wait until the writer has closed the path."""

Pause = Callable[[float], object]
_log = get_logger(__name__)


class Rival(Enum):
    """What to do about another process that is the writer."""

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
    found: Any = with_environment({"tiers": [{"type": "nvme"}]}, environment)[0]
    tier = found["tiers"][0]
    options = {name: value for name, value in tier.items() if name in OPTIONS_OF_PATH}
    unset = options.keys() - given.keys()
    with naming_variables({f"store.{name}": f"{PREFIX}NVME_{name.upper()}" for name in unset}):
        parts = path_parts(RealFileSystem(), list(paths), {**options, **given}, "store")
    for root in parts.roots:
        if not root.is_dir():
            raise ConfigError(f"path {str(root)!r} does not exist; create it")
    return parts


def serve(parts: PathParts, *, rival: Rival, pause: Pause = time.sleep) -> StoreEnd:
    """Write a path until SIGINT, or SIGTERM turned into it, ends the pause.

    Raises `InUseError` if another process remains the writer, or another `KVCascadeError`. Main
    thread.
    """
    fs, root = RealFileSystem(), parts.roots[0]
    service: WriterService | None = None
    try:
        lock = _lock(fs, root, rival, pause)
        service = _start(fs, parts, lock)
        while service.is_alive:
            pause(CHECK_INTERVAL_S)
    except KeyboardInterrupt:
        if service is None:
            _log.info("stopped before it was the writer of %s", root)
            return StoreEnd.STOPPED
    if service.was_retired:
        _log.warning(
            "%s is handed over: a newer version asked for it, or `kvcascade store --take-over`",
            root,
        )
        return StoreEnd.RETIRED
    if not service.is_alive:
        return StoreEnd.FAILED
    if not service.stop(STOP_LIMIT_S):
        _log.error("the writer of %s did not close within %g s", root, STOP_LIMIT_S)
        return StoreEnd.FAILED
    _log.info("stopped; %s is closed", root)
    return StoreEnd.STOPPED


def _lock(fs: FileSystem, root: Path, rival: Rival, pause: Pause) -> FileLock:
    """Return the lock of the writer. Raises `InUseError` if another process keeps it."""
    lock = try_lead(fs, root)
    if lock is not None:
        return lock
    who = _writer_of(fs, root)
    if rival is Rival.REFUSED:
        raise InUseError(
            f"{root} has a writer already: {who}; stop it, or take over now with --take-over, or "
            "later with --wait"
        )
    _log.info("%s has a writer already: %s; waiting for its end", root, who)
    is_asked = rival is Rival.ASKED
    tries = range(round(TAKE_OVER_LIMIT_S / HURRY_INTERVAL_S)) if is_asked else count()
    for _ in tries:
        if is_asked:
            _ask_to_end(fs, root)
        pause(HURRY_INTERVAL_S if is_asked else CHECK_INTERVAL_S)
        lock = try_lead(fs, root)
        if lock is not None:
            return lock
    raise InUseError(
        f"{root} was not handed over within {TAKE_OVER_LIMIT_S:g} s by {_writer_of(fs, root)}; "
        "stop that process"
    )


def _ask_to_end(fs: FileSystem, root: Path) -> None:
    """Ask the writer to close the path. Raises `InUseError` for a writer that is stopped."""
    session = follow_session(fs, root)
    if session is not None:
        with session, suppress(InUseError):  # it is closing already
            session.ask("hand_over", HAND_OVER_ANSWER_S)


def _writer_of(fs: FileSystem, root: Path) -> str:
    note = load_note(fs, root)
    return "another process" if note is None else note.shown


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
