"""The presence table against a dict: collisions, crashes at every write, damage, other readers."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.children import children

from kvcascade.tiers.nvme.path.presence_table import (
    MAX_PROBES,
    Journal,
    PresenceTable,
    WritablePresence,
    hashes_of,
    presence_bytes,
)

SLOTS = 24
POSITIONS = 64
"""Of a table of 24 slots."""

# Hashes with few positions and tags, so that runs are long and positions and tags collide.
hashes = st.builds(
    lambda tag, home: tag << 32 | home,
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 5, 60, 61, 62, 63, POSITIONS + 2, 2 * POSITIONS + 63, (1 << 32) - 1]),
)
steps = st.lists(st.tuples(hashes, st.integers(0, SLOTS - 1)), max_size=60)


def new(slots: int = SLOTS) -> WritablePresence:
    return WritablePresence(memoryview(bytearray(presence_bytes(slots))), slots)


class Model:
    """A dict of hash to (slot, checksum), and journals that turn it into the next."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        self.number = 0

    def journal(self, changes: list[tuple[int, int]]) -> Journal:
        """Each change stores a hash in a slot, and removes whatever either had before."""
        before, after = dict(self.blocks), dict(self.blocks)
        for hashed, slot in changes:
            for other, (taken, _) in list(after.items()):
                if taken == slot or other == hashed:
                    del after[other]
            if len(after) % 3 or hashed not in before:
                self.number += 1
                after[hashed] = (slot, self.number)
        removed = tuple((h, s) for h, (s, c) in before.items() if after.get(h) != (s, c))
        stored = tuple((h, s, c) for h, (s, c) in after.items() if before.get(h) != (s, c))
        self.blocks = after
        return Journal(self.number, 0, removed, stored)

    def check(self, table: PresenceTable) -> None:
        wanted = sorted(self.blocks)
        found = table.find_hashes(np.array(wanted, dtype=np.uint64)).tolist()
        assert found == [self.blocks[hashed][0] for hashed in wanted]
        for slot, checksum in self.blocks.values():
            assert table.checksum_of(slot) == checksum
        used = {slot for slot, _ in self.blocks.values()}
        assert set(np.flatnonzero(table.used_slots()).tolist()) == used
        gone = [tag << 32 | home for tag in range(5) for home in range(80)]
        absent = np.array([each for each in gone if each not in self.blocks], dtype=np.uint64)
        # Equal tags in one run are told apart by the home only.
        tags = {hashed >> 32 for hashed in wanted}
        foreign = absent[~np.isin(absent >> np.uint64(32), list(tags))]
        assert (table.find_hashes(foreign) == -1).all()


def distinct_tags(changes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same changes, with a tag of its own for each hash."""
    order = {hashed: at for at, hashed in enumerate(dict.fromkeys(h for h, _ in changes), 7)}
    return [(order[hashed] << 32 | hashed & 0xFFFFFFFF, slot) for hashed, slot in changes]


@given(st.lists(steps, max_size=6))
def test_it_equals_a_dict(commits: list[list[tuple[int, int]]]) -> None:
    model, table = Model(), new()
    every = distinct_tags([change for commit in commits for change in commit])
    for commit in commits:
        part, every = every[: len(commit)], every[len(commit) :]
        table.apply(model.journal(part))
        model.check(table)


@given(st.lists(steps, min_size=1, max_size=3))
@settings(max_examples=60)
def test_a_crash_at_any_write_is_repaired(commits: list[list[tuple[int, int]]]) -> None:
    """The last commit is cut after each of its writes, and replayed."""
    model, table = Model(), new()
    every = distinct_tags([change for commit in commits for change in commit])
    for commit in commits[:-1]:
        part, every = every[: len(commit)], every[len(commit) :]
        table.apply(model.journal(part))
    journal = model.journal(every)
    before = bytes(table.memory)
    writes = 0
    while True:
        torn = new()
        torn.memory[:] = before
        is_whole = apply_until(torn, journal, writes)
        reopened = WritablePresence(torn.memory, SLOTS)
        reopened.replay(journal)
        model.check(reopened)
        assert reopened.applied == journal.number
        if is_whole:
            return
        writes += 1


class Torn(Exception):
    """The writer is gone."""


class Counted:
    """Numbers in memory that take some more writes, then none."""

    def __init__(self, numbers: memoryview, left: list[int]) -> None:
        self._numbers = numbers
        self._left = left

    def __getitem__(self, at: Any) -> Any:
        return self._numbers[at]

    def __len__(self) -> int:
        return len(self._numbers)

    def __setitem__(self, at: int, number: int) -> None:
        if not self._left[0]:
            raise Torn
        self._left[0] -= 1
        self._numbers[at] = number


def apply_until(table: WritablePresence, journal: Journal, writes: int) -> bool:
    """Apply a journal until so many numbers were written; True if that was all."""
    left = [writes]
    inside: Any = table
    for name in ("_cells", "_homes", "_checksums", "_header"):
        setattr(inside, name, Counted(getattr(inside, name), left))
    try:
        table.apply(journal)
    except Torn:
        return False
    return True


def test_a_search_is_bounded() -> None:
    """Blocks of one position beyond the limit are not found, and nothing else suffers."""
    table = new(2 * MAX_PROBES)
    blocks = tuple(((at + 1) << 32 | 9, at, at) for at in range(MAX_PROBES + 3))
    table.apply(Journal(1, 0, stored=blocks))
    found = table.find_hashes(np.array([hashed for hashed, _, _ in blocks], dtype=np.uint64))
    assert found.tolist() == [*range(MAX_PROBES), -1, -1, -1]
    loaded = new(2 * MAX_PROBES)
    loaded.load(
        np.array([hashed for hashed, _, _ in blocks], dtype=np.uint64),
        np.arange(len(blocks), dtype=np.int32),
        np.arange(len(blocks), dtype=np.uint64),
    )
    assert int(loaded.used_slots().sum()) == MAX_PROBES


def keys_of(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(36) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_loaded_at_once_or_one_by_one(count: int) -> None:
    keys = keys_of(count)
    slots = random.Random(2).sample(range(3000), count)
    one, many = new(3000), new(3000)
    for key, slot in zip(keys, slots, strict=True):
        assert one.insert(key, slot, slot * 7)
    many.load(
        hashes_of(keys), np.array(slots, dtype=np.int32), np.array(slots, dtype=np.uint64) * 7
    )
    for table in (one, many):
        assert table.find_many(keys).tolist() == slots == [table.find(key) for key in keys]
        assert all(table.is_same(key, slot) for key, slot in zip(keys, slots, strict=True))
        assert all(table.checksum_of(slot) == slot * 7 for slot in slots)
        assert set(np.flatnonzero(table.used_slots()).tolist()) == set(slots)
        assert (table.find_many(keys_of(500, seed=3)) == -1).all()
    left = zip(keys[: count // 2], slots[: count // 2], strict=True)
    assert all(one.remove(key, slot) for key, slot in left)
    assert one.find_many(keys).tolist() == [-1] * (count // 2) + slots[count // 2 :]
    assert not any(
        one.remove(key, slot) for key, slot in zip(keys[: count // 2], slots, strict=False)
    )


def test_the_last_of_two_in_one_slot_stays() -> None:
    table = new()
    keys = keys_of(2)
    table.load(hashes_of(keys), np.array([4, 4], dtype=np.int32), np.array([1, 2], dtype=np.uint64))
    assert table.find_many(keys).tolist() == [-1, 4] and table.checksum_of(4) == 2


def test_a_slot_with_another_block_is_not_the_same() -> None:
    table = new()
    first, second = keys_of(2)
    table.insert(first, 3, 1)
    assert table.is_same(first, 3) and not table.is_same(second, 3)
    table.remove(first, 3)
    assert not table.is_same(first, 3)  # its home is still there, its cell is not
    table.insert(second, 3, 2)
    assert table.is_same(second, 3) and not table.is_same(first, 3)
    assert not table.is_same(first, -1) and not table.is_same(first, SLOTS)
    assert table.checksum_of(-1) == table.checksum_of(SLOTS) == 0


def test_a_reset_shows_its_epoch() -> None:
    table = new()
    key = keys_of(1)[0]
    table.insert(key, 3, 1)
    table.apply(Journal(9, 4, is_reset=True))
    assert (table.find(key), table.epoch, table.applied) == (-1, 4, 9)
    assert not table.used_slots().any()


@given(st.binary(min_size=8, max_size=64), st.integers(0), st.integers(0, 1 << 32))
@settings(max_examples=300)
def test_damage_never_raises(data: bytes, at: int, seed: int) -> None:
    """Whatever lies in the table: a search ends, and what `is_same` confirms is in that slot."""
    table = new()
    keys = keys_of(SLOTS - 4, seed=5)
    for slot, key in enumerate(keys):
        table.insert(key, slot, slot)
    offset = 4096 + at % (len(table.memory) - 4096 - len(data))
    table.memory[offset : offset + len(data)] = data
    for key in [*keys, *keys_of(20, seed=6)]:
        slot = table.find(key)
        table.checksum_of(slot)
        if table.is_same(key, slot) and offset + len(data) <= 4096 + 8 * POSITIONS:
            assert key in keys and slot == keys.index(key)
    table.find_many([*keys] * 4)
    table.used_slots()
    for slot, key in enumerate(keys):
        table.remove(key, slot)
        table.insert(key, slot, slot)


def test_a_table_without_an_empty_cell_ends_each_search() -> None:
    table = new()
    table.memory[4096:] = b"\x07" * (len(table.memory) - 4096)
    assert table.find(b"key") == -1
    assert table.find_many([b"key"] * 100).tolist() == [-1] * 100
    table.remove(b"key", 3)
    assert not table.insert(b"key", 3, 3)


READER = """
import sys
from pathlib import Path
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.presence_table import PresenceTable, presence_bytes
slots, path, stable = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
file = RealFileSystem().open(path)
table = PresenceTable(file.map(presence_bytes(slots), writable=False), slots)
stable = [bytes.fromhex(key) for key in stable]
print("ready", flush=True)
looks = misses = wrong = 0
while table.epoch == 0 or looks == 0:
    for slot, key in enumerate(stable):
        found = table.find(key)
        looks += 1
        misses += found < 0
        wrong += found >= 0 and found != slot
    wrong += sum(f >= 0 and f != s for s, f in enumerate(table.find_many(stable).tolist()))
print(looks, misses, wrong, flush=True)
"""


def test_a_reader_in_another_process_finds_no_wrong_slot(tmp_path: Path) -> None:
    """Blocks that stay are found in their slots, or missed while others move them."""
    slots, staying = 2000, 100
    path = tmp_path / "presence"
    path.write_bytes(bytes(presence_bytes(slots)))
    path.chmod(0o600)
    with path.open("r+b") as file:
        table = WritablePresence(memoryview(mmap.mmap(file.fileno(), 0)), slots)
    keys = keys_of(slots - 10)
    for slot, key in enumerate(keys):
        table.insert(key, slot, slot)
    with children() as start:
        process = start(READER, slots, path, ",".join(key.hex() for key in keys[:staying]))
        rng = random.Random(7)
        for _ in range(40_000):
            slot = rng.randrange(staying, len(keys))
            table.remove(keys[slot], slot)
            keys[slot] = rng.randbytes(36)
            table.insert(keys[slot], slot, slot)
        table.begin(1, 0)
        assert process.stdout is not None
        looks, misses, wrong = map(int, process.stdout.readline().split())
    assert looks and not wrong and misses < looks
    assert table.find_many(keys).tolist() == list(range(len(keys)))
