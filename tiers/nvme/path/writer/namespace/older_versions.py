"""Namespaces of older versions in a path, which an engine of such a version may have open.

They are not read. They count in the capacity with their size and with their possible growth. One
that no process has open can be removed.
"""

from __future__ import annotations

import json
from pathlib import Path

from ....disk.filesystem import FileSystem
from ....namespace import DESCRIPTION
from ....segments.format import MAX_DESCRIPTION_BYTES
from ..path_plan import SMALL_FILES_BYTES

BUDGET_LOCK = ".kvcascade.lock"
"""Lock file in each path that older versions hold while they make a file."""
BUDGET_WAIT_S = 30.0
"""Longest wait for an engine of an older version that makes a file."""
UNKNOWN_INDEX_BYTES = 512 << 10
"""Smallest index of an older version, for a namespace that is not described yet."""
_INDEX = Path("index", "data.mdb")


def growth_bytes(fs: FileSystem, folder: Path) -> int:
    """Return the bytes by which the directory of an open namespace may grow without asking.

    The index of an older version may grow to the size of its map.
    """
    try:
        document = json.loads(fs.read(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES))
        part, most = int(document["part"]), int(document["index_bytes"])
        index = folder / _INDEX
        now = fs.used_bytes(index) if fs.exists(index) else 0
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return SMALL_FILES_BYTES + UNKNOWN_INDEX_BYTES
    return SMALL_FILES_BYTES + (max(0, most - now) if part == 0 else 0)
