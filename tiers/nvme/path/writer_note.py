"""`.kvcascade/writer.json` in the first path: which process writes the path, for people and tools.

The writer leaves the file behind, however it ends. It says something only while the lock of the
path is held. `tools/commands/path_files.py` reads it.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ..disk.filesystem import FileSystem
from .path_messages import PROTOCOL
from .writer.path_options import PATH_FOLDER

WRITER_FILE = "writer.json"
PROC = Path("/proc")


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


def note_of_this_process(name: str) -> WriterNote:
    """Return the note of this process as a writer."""
    host, pid = socket.gethostname(), os.getpid()
    return WriterNote(name, host, pid, pid_namespace(), PROTOCOL, time.time())


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


def pid_namespace() -> str:
    """Return the identity of this process's PID namespace; empty if the kernel does not say."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""
