"""A tool's session with a path: a client of its writer, or the writer if there is none.

A tool has no options of its own. If it is the writer, the options that are recorded with the path
stay in force, and nothing is recorded. Its questions are those of `writer_questions`. They have the
same answers from a writer in this process and from another one. One thread uses a session.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ...errors import (
    ConfigError,
    ErrorKind,
    FormatError,
    InUseError,
    KVCascadeError,
    TierIOError,
    os_errors,
)
from ...handlers.node.child_start import allow_open_files
from ...handlers.node.path.path_service import WriterService
from ...tiers.nvme.disk.filesystem import FileLock, FileSystem
from ...tiers.nvme.namespace import DESCRIPTION
from ...tiers.nvme.path.frames import DECODE_ERRORS, FrameReader, frame
from ...tiers.nvme.path.path_lock import PathDoor, lock_path
from ...tiers.nvme.path.path_messages import (
    PROTOCOL,
    Ask,
    Retire,
    StillOpening,
    Told,
    from_writer,
)
from ...tiers.nvme.path.writer.path_options import (
    PATH_FILE,
    PATH_FOLDER,
    check_mounted,
    load_record,
)
from ...tiers.nvme.path.writer_note import WriterNote
from .path_files import is_stopped, load_note, named
from .path_folders import missing_folder, other_folders

TOOL_NAME = "kvcascade tool"
JOIN_LIMIT_S = 5.0
"""Longest search for a writer whose lock is held, but which does not answer the door."""
JOIN_PAUSE_S = 0.05
ANSWER_LIMIT_S = 10.0
"""Longest wait for an answer, unless a question has a limit of its own."""
MAX_WRITERS_ASKED = 3
"""Most writers that get one question. Each of them may be a tool that ends before it answers."""
STOP_LIMIT_S = 60.0
"""Longest wait until a writer of this process has closed."""


class AnswerError(KVCascadeError):
    """The writer cannot do what it was asked; it cannot open a namespace, for instance.

    Its kind says whether the disk has no room for that.
    """

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer["error"]))
        if answer.get("kind") == ErrorKind.NO_SPACE.value:
            self.kind = ErrorKind.NO_SPACE


class PathSession(AbstractContextManager["PathSession"]):
    """A connection to the writer of a path; `open_session` makes one."""

    def __init__(
        self,
        fs: FileSystem,
        root: Path,
        link: socket.socket,
        service: WriterService | None,
        also: Sequence[Path] | None = None,
    ) -> None:
        """`service` is the writer if it is in this process; the session stops it.

        With `also` (see `open_session`) the next writer is asked once this one has closed.
        """
        self.root = root
        self._fs = fs
        self._also = also
        self._link = link
        self._service = service
        self._reader = FrameReader()
        self._request = 0

    @property
    def is_writer(self) -> bool:
        """True if this process is the writer of the path."""
        return self._service is not None

    def ask(
        self,
        what: str,
        limit_s: float = ANSWER_LIMIT_S,
        *,
        may_repeat: bool = True,
        **body: object,
    ) -> dict[str, Any]:
        """Ask the writer, and return its answer.

        If the writer closes before it answers, the next one is asked. Without `may_repeat` it is
        not, because the question has another effect at the second time.

        Raises `AnswerError` with the sentence of an answer that names an error, or `InUseError`
        with the name of a writer that does not answer.
        """
        told = None
        for _ in range(MAX_WRITERS_ASKED if may_repeat else 1):
            if self._also is not None and _has_ended(self._link):
                self._join_next(self._also)
            told = self._ask_once(what, limit_s, body)
            if told is not None:
                break
        if told is None:
            raise InUseError(f"the writer of {self.root} closed the connection; try again")
        answer: dict[str, Any] = json.loads(told.body)
        if "error" in answer:
            raise AnswerError(answer)
        return answer

    def _ask_once(self, what: str, limit_s: float, body: Mapping[str, object]) -> Told | None:
        """Return the answer of this writer; None if it closed the connection."""
        self._request += 1
        try:
            self._link.settimeout(limit_s)
            self._link.sendall(frame(Ask(self._request, what, json.dumps(body).encode())))
            return self._told(limit_s)
        except TimeoutError:
            raise InUseError(_silent(self._fs, self.root)) from None
        except (OSError, *DECODE_ERRORS):
            self._link.close()
            return None

    def close(self) -> None:
        """Close the connection; a writer of this process closes the path cleanly."""
        self._link.close()
        if self._service is not None:
            self._service.stop(STOP_LIMIT_S)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_next(self, also: Sequence[Path]) -> None:
        """Ask the next writer from now on, which may be this process. Raises as `open_session`."""
        self.close()
        following = open_session(self._fs, self.root, also)
        self._link, self._service = following._link, following._service
        self._reader = FrameReader()

    def _told(self, limit_s: float) -> Told | None:
        """Return the answer to the last question; None at the end of the connection.

        The time until the limit begins again while the writer opens the namespace; it says so, and
        has a limit of its own for that.
        """
        end_s = time.monotonic() + limit_s
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._link.settimeout(left_s)
            data = self._reader.receive(self._link)
            if not data:
                return None
            for body in self._reader.feed(data):
                message = from_writer.decode(body)
                if isinstance(message, StillOpening):
                    end_s = time.monotonic() + limit_s
                if isinstance(message, Told) and message.request == self._request:
                    return message


def open_session(
    fs: FileSystem,
    path: Path,
    also: Sequence[Path] = (),
    pause: Callable[[float], object] | None = None,
) -> PathSession:
    """Open a session with the tier whose first path is `path`; a namespace in it may be given.

    `also` names the other paths of the tier in order, if they are mounted elsewhere than for the
    engines. `pause` waits for some seconds between two attempts.

    Raises `TierIOError` if there is no tier that this user may read, if it belongs to another user,
    or if it has no writer and its disk is read-only. Raises `FormatError` for a writer of another
    version. Raises `InUseError` if the lock is held and nobody answers, or if a process that is
    stopped holds it.
    """
    allow_open_files()  # as the writer it keeps some open for each namespace and folder
    root = path.parent if fs.exists(path / DESCRIPTION) else path
    if not _is_there(fs, root):
        raise TierIOError(errno.ENOENT, f"{root} does not exist; check the path")
    if not _is_there(fs, root / PATH_FOLDER / PATH_FILE):
        raise TierIOError(
            errno.ENOENT,
            f"{root} is not the first path of a tier: it records no options; check the path",
        )
    wait = threading.Event().wait if pause is None else pause
    for _ in range(round(JOIN_LIMIT_S / JOIN_PAUSE_S)):
        session = _lead_or_follow(fs, root, also)
        if session is not None:
            return session
        wait(JOIN_PAUSE_S)
    raise InUseError(_silent(fs, root))


def follow_session(fs: FileSystem, path: Path) -> PathSession | None:
    """Open a session with a writer of another process; None if nobody answers.

    Raises `FormatError` for a writer of another version, `InUseError` for one that is stopped, or
    `TierIOError`.
    """
    root = path.parent if fs.exists(path / DESCRIPTION) else path
    return _follow(fs, root) if fs.exists(root / PATH_FOLDER) else None


def hand_over(fs: FileSystem, root: Path, limit_s: float) -> None:
    """Ask a writer of another process, of this version or an older one, to close the path.

    Raises `InUseError` for a writer that is stopped or of a newer version, or `TierIOError`.
    """
    found = _connect(fs, root)
    if found is None:
        return
    link, note = found
    if note is None or note.protocol == PROTOCOL:
        with PathSession(fs, root, link, None) as session, suppress(InUseError):  # it is closing
            session.ask("hand_over", limit_s)
        return
    with link, suppress(OSError):
        if note.protocol > PROTOCOL:
            raise InUseError(
                f"the writer of {root}, {named(note)}, is of a newer version; update this "
                "kvcascade, or stop that process"
            )
        link.sendall(frame(Retire(PROTOCOL)))


def _is_there(fs: FileSystem, path: Path) -> bool:
    """Return whether a name exists. Raises `TierIOError` if this user may not look."""
    if fs.exists(path):
        return True
    with os_errors(f"looking for {path}"), suppress(FileNotFoundError, NotADirectoryError):
        fs.modified_at(path)
    return False


def _lead_or_follow(fs: FileSystem, root: Path, also: Sequence[Path]) -> PathSession | None:
    """Open a session as the writer, or with another one; None if that one does not answer."""
    try:
        lock = lock_path(fs, root)
    except TierIOError as error:
        # No writer can begin on a read-only disk. One that began before serves on.
        session = _follow(fs, root, also) if error.errno == errno.EROFS else None
        if session is None:
            raise
        return session
    return _follow(fs, root, also) if lock is None else _lead(fs, root, also, lock)


def _lead(fs: FileSystem, root: Path, also: Sequence[Path], lock: FileLock) -> PathSession:
    try:
        roots = tier_roots(fs, root, also)
        check_disks(fs, roots)
    except BaseException:
        lock.release()
        raise
    service = WriterService(fs, roots, None, lock, name=TOOL_NAME)
    try:
        link = service.connect()
    except BaseException:
        service.stop(STOP_LIMIT_S)
        raise
    return PathSession(fs, root, link, service, also)


def _follow(fs: FileSystem, root: Path, also: Sequence[Path] | None = None) -> PathSession | None:
    found = _connect(fs, root)
    if found is None:
        return None
    link, note = found
    if note is not None and note.protocol != PROTOCOL:
        link.close()
        raise FormatError(
            f"the writer of {root}, {named(note)}, speaks protocol {note.protocol}, "
            f"not {PROTOCOL}; use the tools of its version"
        )
    return PathSession(fs, root, link, None, also)


def _connect(fs: FileSystem, root: Path) -> tuple[socket.socket, WriterNote | None] | None:
    """Return a connection to the writer, and its note; None if nobody answers."""
    door = PathDoor(root)
    try:
        link = door.connect()
    finally:
        door.close()
    if link is None:
        return None
    note = load_note(fs, root)
    if note is not None and is_stopped(note):
        link.close()
        raise InUseError(_silent(fs, root))
    return link, note


def _has_ended(link: socket.socket) -> bool:
    """Return True if the other end has closed a connection, and nothing is left to read."""
    try:
        link.setblocking(False)
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def tier_roots(fs: FileSystem, root: Path, also: Sequence[Path]) -> list[Path]:
    """Return all paths of the tier as this process reaches them.

    Raises `TierIOError` if one of them is missing, or another `KVCascadeError`.
    """
    record = load_record(fs, root) if also else None
    names = () if record is None else record.paths
    if also and len(names) != 1 + len(also):
        raise ConfigError(
            f"this tier has the paths {', '.join(names)}; give the others with --also in that order"
        )
    others = list(also or other_folders(fs, root))
    for other in others:
        if not _is_there(fs, other):
            raise missing_folder(other)
    return [root, *others]


def check_disks(fs: FileSystem, roots: Sequence[Path]) -> None:
    """Raise `TierIOError` if the disk of one of several paths is not mounted."""
    try:
        check_mounted(fs, roots)
    except ConfigError as error:  # for a command it is no wrong call
        raise TierIOError(errno.ENOENT, str(error)) from None


def _silent(fs: FileSystem, root: Path) -> str:
    note = load_note(fs, root)
    who = "it is not known which process that is" if note is None else f"it is {named(note)}"
    return f"the writer of {root} does not answer; {who}; continue or end that process"
