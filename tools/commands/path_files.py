"""Files of a path that only commands read: the note of its writer, and presence tables.

No function needs a writer, and none changes a file.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from ...errors import FormatError, os_errors, other_kind
from ...tiers.nvme.disk.filesystem import FileSystem, RealFile
from ...tiers.nvme.path.frames import DECODE_ERRORS
from ...tiers.nvme.path.presence_file import PRESENCE, has_clean_mark, read_head
from ...tiers.nvme.path.presence_table import PresenceTable, presence_bytes
from ...tiers.nvme.path.writer.path_options import PATH_FOLDER
from ...tiers.nvme.path.writer_note import PROC, WRITER_FILE, WriterNote, pid_namespace

MAX_NOTE_BYTES = 64 << 10
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def load_note(fs: FileSystem, root: Path) -> WriterNote | None:
    """Return what the last writer recorded; None if it cannot be read."""
    with suppress(OSError, OverflowError, *DECODE_ERRORS):
        data = fs.read(root / PATH_FOLDER / WRITER_FILE, MAX_NOTE_BYTES)
        note = msgspec.json.decode(data, type=WriterNote)
        time.localtime(note.since_s)  # raises for a damaged time
        return note
    return None


def named(note: WriterNote) -> str:
    """Name the process in a sentence, and say so if it is stopped."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.since_s))
    text = f"process {note.pid} ({note.name}) on {note.host}, since {since}"
    return f"{text}, which is stopped" if is_stopped(note) else text


def is_stopped(note: WriterNote) -> bool:
    """Return True if the process can be seen from here and is stopped (SIGSTOP)."""
    if note.host != socket.gethostname() or note.pid_namespace != pid_namespace():
        return False
    try:
        text = (PROC / str(note.pid) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] == ["T"]


def map_last_presence(fs: FileSystem, folder: Path) -> PresenceTable | None:
    """Map the presence table of the last writer, whatever its number of slots, to read it.

    A writer with another number of slots makes a new file, and older mappings do not change any
    more. Return None if the file is damaged, or if a writer is building it. Raises a
    `KVCascadeError` of the file system.
    """
    path = folder / PRESENCE
    with os_errors(f"reading the presence table {path}"):
        slots, _ = read_head(fs, path)
        if not slots:
            return None
        with closing(fs.open(path)) as file:
            if file.size() != presence_bytes(slots):
                return None
            memory = file.map(presence_bytes(slots), writable=False)
    return PresenceTable(memory, slots)


def read_presence(fs: FileSystem, folder: Path) -> tuple[PresenceTable, bool]:
    """Map the presence table in the directory of a namespace, whatever its number of slots.

    The second value is True if the table was closed cleanly and not opened since. Raises
    `FormatError` if the file is damaged, or a `KVCascadeError` of the file system.
    """
    table = map_last_presence(fs, folder)
    if table is None:
        raise FormatError(f"{folder / PRESENCE} is damaged; the next writer builds it anew")
    return table, has_clean_mark(table.memory)


def is_on_read_only_disk(path: Path) -> bool:
    """Return True if the disk of an existing file takes no changes, whatever this user may do."""
    try:
        os.close(os.open(path, os.O_RDWR | _OPEN_FLAGS))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def open_read_only(path: Path) -> RealFile:
    """Open a regular file for reading; no symbolic links. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise other_kind(path)
    except BaseException:
        os.close(descriptor)
        raise
    return RealFile(descriptor)
