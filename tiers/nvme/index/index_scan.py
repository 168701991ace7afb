"""Looking through all of an index, a lot at a time.

A transaction that stays open keeps all processes from using freed pages again, and their commits
find none after a while: so none is open while what was found is being worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lmdb

LOT_ENTRIES = 4096
"""Read at a time, in some milliseconds."""


def lots(env: lmdb.Environment, table: Any) -> Iterator[list[tuple[bytes, bytes]]]:
    """Every (key, value) of a table in the order of the keys, each lot as committed then.

    Raises `lmdb.Error`.
    """
    after = b""
    while True:
        with env.begin(db=table) as txn:
            cursor = txn.cursor()
            lot = list(islice(cursor, LOT_ENTRIES)) if cursor.set_range(after) else []
        if not lot:
            return
        yield lot
        after = lot[-1][0] + b"\0"
