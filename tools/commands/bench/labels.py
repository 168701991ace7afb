"""What cases of the transfers are called: `transfers` writes it, `kvcascade replay` reads it."""

from __future__ import annotations

import re

from ...dev.bench.scale import KIB, MIB

TRANSFERS = "transfers"
DOWN, UP = "down", "up"
_UNITS = {"KiB": KIB, "MiB": MIB}
_CASE = re.compile(r"([0-9]+) (KiB|MiB) blocks")


def size_label(size: int) -> str:
    """Bytes of a block, for people."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def transfer_case(block_bytes: int, paths: int = 1) -> str:
    """What the case of a block size is called."""
    more = ", two paths" if paths > 1 else ""
    return f"{size_label(block_bytes)} blocks{more}"


def transfer_block_bytes(case: str) -> int | None:
    """Size of a block in a case of one path; None for any other: two disks are faster than one."""
    found = _CASE.fullmatch(case)
    return int(found[1]) * _UNITS[found[2]] if found else None
