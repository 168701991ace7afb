"""Walking an index in a process of its own: LMDB may die of a damaged page, and we shall not.

The child knows nothing but LMDB, so that it starts fast. What it reports as an error the parent
will meet again, with a better message; only its death says something new.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...errors import CorruptionError
from ...tiers.nvme.index.index_file import DATA_NAME, damaged
from ...tiers.nvme.offline.reader import index_options

PROBE_TIMEOUT_S = 600
_CODE = """
import sys, lmdb
path, size, lock = sys.argv[1:]
env = lmdb.open(path, map_size=int(size), readonly=True, create=False, max_dbs=4,
                readahead=False, lock=lock == "1")
with env.begin() as txn:
    for name in (b"meta", b"blocks"):
        for pair in txn.cursor(env.open_db(name, txn=txn, create=False)):
            pass
"""


def check_index_can_be_walked(home: Path) -> None:
    """Read the whole index of a namespace directory elsewhere.

    Raises `CorruptionError` if that process dies of it.
    """
    index = home / "index"
    if not (index / DATA_NAME).is_file():
        return
    map_bytes, is_locking = index_options(index)
    arguments = [str(index), str(map_bytes), str(int(is_locking))]
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CODE, *arguments],
        capture_output=True,
        timeout=PROBE_TIMEOUT_S,
    )
    if done.returncode < 0:
        raise CorruptionError(damaged(index, f"reading it ends in signal {-done.returncode}"))
