"""Reading a whole table of the index in batches.

An open transaction keeps all processes from reusing freed pages, until their commits find none. So
no transaction is open while a batch is processed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lmdb

BATCH_ENTRIES = 4096
"""Entries read in one transaction, which takes some milliseconds."""


def batches(env: lmdb.Environment, table: Any) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield every (key, value) of a table in the order of the keys, each batch as committed then.

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
