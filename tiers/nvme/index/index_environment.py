"""LMDB's environment as every process opens it, and its table of readers where that needs help.

LMDB tells processes apart by their number (`lock.mdb`). A container that starts again gives an
engine the number that the killed one had: LMDB then takes what that one held for its own, and the
pages of it are never used again while anybody else has kept the table alive.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import lmdb

from ....logs import get_logger
from ..writer.owners import MAX_PROCESSES
from .index_file import LOCK_NAME
from .index_keys import MAX_TABLES

READERS_PER_PROCESS = 8
"""Lines of the table. An engine and its mover have three, as LMDB keeps those of transactions that
wait for their next use; what only looks takes some, too."""
MAX_READERS = MAX_PROCESSES * READERS_PER_PROCESS
CHECK_LIMIT_S = 10.0
"""For a process that opens the environment and looks who is dead."""
_MAX_TABLE_BYTES = 1 << 20
_READER = struct.Struct("<8xi52x")
"""A line of the table: transaction, process, thread. The head before them is read as such, too."""
_OPEN_FILES = Path("/proc/self/fd")
_CODE = """
import sys
sys.path.append(sys.argv[1])
import lmdb
env = lmdb.open(sys.argv[2], map_size=int(sys.argv[3]), readonly=True, create=False)
env.reader_check()
"""

_log = get_logger(__name__)


def open_environment(path: Path, map_bytes: int, is_durable: bool) -> lmdb.Environment:
    """Open or create it in the directory `path`. Raises `lmdb.Error`."""
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        mode=0o600,
        max_dbs=MAX_TABLES,
        max_readers=MAX_READERS,
        max_spare_txns=4,
        sync=is_durable,
        metasync=is_durable,
        readahead=False,
    )


def forget_former_self(path: Path, map_bytes: int) -> None:
    """Clear what a dead process of this one's number left in the table of readers.

    Before this process opens the environment: afterwards it looks alive. A process of another
    number does it, and is only started if the table names this one's.
    """
    if not _is_named(path / LOCK_NAME, os.getpid()):
        return
    code = [sys.executable, "-I", "-S", "-c", _CODE, str(Path(lmdb.__file__).parent.parent)]
    try:
        subprocess.run(
            [*code, str(path), str(map_bytes)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("dead readers of the index in %s may keep pages: %s", path, error)


def _is_named(table: Path, pid: int) -> bool:
    """True if a line of the table names a process that this one is not yet."""
    with suppress(OSError):
        if not table.is_file() or _has_open(table):
            return False
        with table.open("rb") as file:
            lines = file.read(_MAX_TABLE_BYTES)
        whole = len(lines) - len(lines) % _READER.size
        return any(found == pid for (found,) in _READER.iter_unpack(lines[:whole]))
    return False


def _has_open(file: Path) -> bool:
    """True if this process has the file open: to close it once more would drop LMDB's locks."""
    wanted = file.stat()
    for number in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.fstat(int(number)), wanted):
                return True
    return False
