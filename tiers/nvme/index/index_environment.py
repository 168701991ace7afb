"""The LMDB environment: opening it, reading it in batches, and clearing dead readers.

LMDB identifies processes by pid (`lock.mdb`). A restarted container may give an engine the pid of
the engine that was killed. LMDB then treats the dead engine's read transactions as its own. Their
pages are never reused as long as another process keeps the table in use.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from ....logs import get_logger
from ..writer.owners import MAX_PROCESSES
from .index_file import LOCK_NAME
from .index_keys import MAX_TABLES

READERS_PER_PROCESS = 8
"""Entries of the reader table per process. An engine and its mover have three, as LMDB keeps
entries of transactions for reuse. Read-only commands take some, too."""
MAX_READERS = MAX_PROCESSES * READERS_PER_PROCESS
BATCH_ENTRIES = 4096
"""Entries read in one transaction, which takes some milliseconds."""
CHECK_LIMIT_S = 10.0
"""Longest time for the helper process that opens the environment and clears dead readers."""
_MAX_TABLE_BYTES = 1 << 20
_READER = struct.Struct("<8xi52x")
"""Layout of a reader entry: transaction, process, thread. The table's header is parsed the same
way."""
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
    """Open or create the environment in the directory `path`. Raises `lmdb.Error`."""
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


def batches(env: lmdb.Environment, table: Any) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield every (key, value) of a table in the order of the keys, each batch as committed then.

    An open transaction keeps all processes from reusing freed pages, until their commits find none.
    So no transaction is open while a batch is processed.

    Raises `lmdb.Error`.
    """
    after = b""
    while True:
        with env.begin(db=table) as txn:
            cursor = txn.cursor()
            batch = list(islice(cursor, BATCH_ENTRIES)) if cursor.set_range(after) else []
        if not batch:
            return
        yield batch
        after = batch[-1][0] + b"\0"


def forget_former_self(path: Path, map_bytes: int) -> None:
    """Remove reader entries left by a dead process that had this process's pid.

    This must run before this process opens the environment, when the pid would look alive. A child
    process with another pid does the work. It is only started if the table contains this pid.
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
    """Return True if the table contains this pid although this process has not opened it."""
    with suppress(OSError):
        if not table.is_file() or _has_open(table):
            return False
        with table.open("rb") as file:
            lines = file.read(_MAX_TABLE_BYTES)
        whole = len(lines) - len(lines) % _READER.size
        return any(found == pid for (found,) in _READER.iter_unpack(lines[:whole]))
    return False


def _has_open(file: Path) -> bool:
    """Return True if this process has the file open: closing it once more would drop LMDB's
    locks."""
    wanted = file.stat()
    for number in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed in the meantime
            if os.path.samestat(os.fstat(int(number)), wanted):
                return True
    return False
