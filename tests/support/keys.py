"""Block hashes by number, as every test names its blocks."""

from __future__ import annotations

from kvcascade.tiers.base import BlockHash


def key(i: int) -> BlockHash:
    """A block hash as vLLM makes them: 32 bytes and a group number."""
    return BlockHash(i.to_bytes(4, "big") * 8 + b"\0\0\0\0")


def keys(*bounds: int) -> list[BlockHash]:
    """Those of the numbers in `range(*bounds)`."""
    return [key(i) for i in range(*bounds)]
