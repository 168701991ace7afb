"""`.kvcascade/writer.json` in the first path: which process writes the path, for people and tools.

The writer leaves the file behind, however it ends. It says something only while the lock of the
path is held.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ..disk.filesystem import FileSystem
from .frames import DECODE_ERRORS
from .path_messages import PROTOCOL
from .writer.path_options import PATH_FOLDER

WRITER_FILE = "writer.json"
MAX_NOTE_BYTES = 64 << 10
_PROC = Path("/proc")


class WriterNote(msgspec.Struct, frozen=True):
    """The process that writes a path."""

    name: str
    """Name of the node, as in logs."""
    host: str
    pid: int
    """Process number in the process's own PID namespace."""
    pid_namespace: str
    """Identity of that namespace; empty if the kernel does not say."""
    protocol: int
    since_s: float
    """Wall-clock time from which it writes, in seconds since 1970."""

    @property
    def shown(self) -> str:
        """Name the process in a sentence, and say so if it is stopped."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        text = f"process {self.pid} ({self.name}) on {self.host}, since {since}"
        return f"{text}, which is stopped" if self.is_stopped else text

    @property
    def is_stopped(self) -> bool:
        """True if the process can be seen from here and is stopped (SIGSTOP)."""
        if self.host != socket.gethostname() or self.pid_namespace != _pid_namespace():
            return False
        try:
            text = (_PROC / str(self.pid) / "stat").read_text(errors="replace")
        except OSError:
            return False
        return text.rpartition(")")[2].split()[:1] == ["T"]


def note_of_this_process(name: str) -> WriterNote:
    """Return the note of this process as a writer."""
    host, pid = socket.gethostname(), os.getpid()
    return WriterNote(name, host, pid, _pid_namespace(), PROTOCOL, time.time())


def save_note(fs: FileSystem, root: Path, note: WriterNote) -> None:
    """Record the writer; the caller holds the lock of the path.

    If the disk does not take the note, as when it is full, no process is named.
    """
    folder = root / PATH_FOLDER
    with suppress(OSError):
        fs.replace(folder / WRITER_FILE, msgspec.json.encode(note))
        return
    with suppress(OSError):
        fs.unlink(folder / WRITER_FILE)


def load_note(fs: FileSystem, root: Path) -> WriterNote | None:
    """Return what the last writer recorded; None if it cannot be read."""
    with suppress(OSError, *DECODE_ERRORS):
        data = fs.read(root / PATH_FOLDER / WRITER_FILE, MAX_NOTE_BYTES)
        return msgspec.json.decode(data, type=WriterNote)
    return None


def _pid_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""
