"""`kvcascade store`: the writer of a path, without an arena and without blocks of its own."""

from __future__ import annotations

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
from ....errors import ConfigError, InUseError
from ....handlers.node.path_service import WriterService
from ....logs import get_logger
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem, RealFileSystem
from ....tiers.nvme.path.path_lock import try_lead
from ....tiers.nvme.path.writer_note import load_note

CHECK_INTERVAL_S = 0.5
"""Time between two checks that the writer lives, and between two attempts to become it."""
STOP_LIMIT_S = 60.0
"""Longest wait until the writer has closed the path."""

Pause = Callable[[float], object]
_log = get_logger(__name__)


class StoreEnd(Enum):
    """Reason why a service ended."""

    STOPPED = "stopped"
    """The service was asked to end, and closed the path cleanly."""
    RETIRED = "retired"
    """A newer version asked for the path."""
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


def serve(parts: PathParts, *, may_wait: bool, pause: Pause = time.sleep) -> StoreEnd:
    """Write a path until SIGINT, or SIGTERM turned into it, ends the pause.

    With `may_wait` it waits while another process is the writer. Raises `InUseError` without it, or
    another `KVCascadeError`. Main thread.
    """
    fs, root = RealFileSystem(), parts.roots[0]
    service: WriterService | None = None
    try:
        lock = _lock(fs, root, may_wait, pause)
        service = _start(fs, parts, lock)
        while service.is_alive:
            pause(CHECK_INTERVAL_S)
    except KeyboardInterrupt:
        if service is None:
            _log.info("stopped before it was the writer of %s", root)
            return StoreEnd.STOPPED
    if service.was_retired:
        _log.warning("a newer version asked for %s; start the service with that version", root)
        return StoreEnd.RETIRED
    if not service.is_alive:
        return StoreEnd.FAILED
    if not service.stop(STOP_LIMIT_S):
        _log.error("the writer of %s did not close within %g s", root, STOP_LIMIT_S)
        return StoreEnd.FAILED
    _log.info("stopped; %s is closed", root)
    return StoreEnd.STOPPED


def _lock(fs: FileSystem, root: Path, may_wait: bool, pause: Pause) -> FileLock:
    """Return the lock of the writer. Raises `InUseError` if another process has it."""
    has_said = False
    while True:
        lock = try_lead(fs, root)
        if lock is not None:
            return lock
        note = load_note(fs, root)
        who = "another process" if note is None else note.shown
        if not may_wait:
            raise InUseError(
                f"{root} has a writer already: {who}; stop it, or take over later with --wait"
            )
        if not has_said:
            _log.info("%s has a writer already: %s; waiting for its end", root, who)
            has_said = True
        pause(CHECK_INTERVAL_S)


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
