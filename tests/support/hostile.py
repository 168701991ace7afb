"""Damages an LMDB file by seed, opens the tier over it, and uses it. Run in a process of its own:

    python -m support.hostile FOLDER SEED ROUNDS

FOLDER holds a namespace. Prints how many rounds opened and how many were refused; it must not die
of a signal, and may not take more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from kvcascade.tiers.base import BlockOutcome

from .path_cache import try_engine_on

BLOCKS = 64
MEMORY_BYTES = 4 << 30
PAGE = 4096
META_PAGES = 2

Mutation = Callable[[bytearray, random.Random], None]


def _pages(data: bytearray) -> int:
    return len(data) // PAGE


def flip_bits(data: bytearray, rng: random.Random) -> None:
    """Single bits, anywhere."""
    for _ in range(rng.choice((1, 4, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def noise_page(data: bytearray, rng: random.Random) -> None:
    """A page of noise."""
    start = rng.randrange(META_PAGES, _pages(data)) * PAGE
    data[start : start + PAGE] = rng.randbytes(PAGE)


def zero_page(data: bytearray, rng: random.Random) -> None:
    """A page that was never written."""
    start = rng.randrange(META_PAGES, _pages(data)) * PAGE
    data[start : start + PAGE] = bytes(PAGE)


def swap_pages(data: bytearray, rng: random.Random) -> None:
    """Two pages in each other's place."""
    a, b = (rng.randrange(META_PAGES, _pages(data)) * PAGE for _ in range(2))
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]


def huge_counts(data: bytearray, rng: random.Random) -> None:
    """Page header or node header: numbers as large as they go."""
    start = rng.randrange(META_PAGES, _pages(data)) * PAGE
    offset = start + rng.choice((0, 8, 10, 12, 14, 16, 18, 20, rng.randrange(16, PAGE - 8)))
    value = rng.choice((0, 1, 0x7FFF, 0xFFF0, 0xFFFF))
    struct.pack_into("<H", data, offset, value)


def meta_fields(data: bytearray, rng: random.Random) -> None:
    """Depth, root and counts in the meta pages."""
    offset = rng.choice((40, 44, 46, 48, 56, 64, 72, 80, 88, 92, 96, 104, 112, 120, 128))
    value = rng.choice((0, 1, 2, 3, 1 << 16, 1 << 31, (1 << 64) - 2, rng.randrange(1 << 20)))
    for page in range(META_PAGES):
        struct.pack_into("<Q", data, page * PAGE + offset, value)


MUTATIONS: dict[str, Mutation] = {
    m.__name__: m for m in (flip_bits, noise_page, zero_page, swap_pages, huge_counts, meta_fields)
}


def attempt(root: Path) -> list[BlockOutcome] | None:
    """Open the tier, read, write and close it; what was read. None if the tier was refused."""
    engine = try_engine_on(root)
    if isinstance(engine, str):
        return None
    found = engine.get(range(BLOCKS))
    engine.put(range(1000, 1008))
    engine.close()
    return list(found)


def main() -> None:
    """All rounds, announced before they begin so that a crash names its own."""
    root, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    assert attempt(root) == [BlockOutcome.OK] * BLOCKS, "an index without damage"
    data = next(root.glob("*/blocks/data.mdb"))
    good = data.read_bytes()
    opened = 0
    for number in range(rounds):
        rng = random.Random(f"{seed}:{number}")
        name = rng.choice(sorted(MUTATIONS))
        print("round", number, name, flush=True)
        damaged = bytearray(good)
        MUTATIONS[name](damaged, rng)
        data.write_bytes(damaged)
        opened += attempt(root) is not None
    assert opened > 0, "every damaged index was refused"
    print("survived", opened, "opened", rounds - opened, "refused", flush=True)


if __name__ == "__main__":
    main()
