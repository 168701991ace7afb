"""Opening the presence file after a clean close, a kill, a loss of power, and damage."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest
from support.children import children
from support.memory_block_table import MemoryBlockDisk, MemoryBlockTable
from support.memory_file_system import MemoryFileSystem
from xxhash import xxh3_64_intdigest

from kvcascade.errors import FormatError, KVCascadeError, NoSpaceError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.block_table import (
    BlockTable,
    Changes,
    block_table_bytes,
)
from kvcascade.tiers.nvme.path.lmdb_block_table import open_block_table
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.nvme.path.presence_file import (
    PRESENCE,
    OpenPresence,
    PresenceOrigin,
    boot_id,
    is_of_this_boot,
    map_presence,
    open_presence,
    recorded_slots,
)
from kvcascade.tiers.nvme.path.presence_table import HEADER_BYTES, presence_bytes

SLOTS = 60
FOLDER = Path("/cache/namespace")
PATH = FOLDER / PRESENCE
BOOT, NEXT_BOOT = b"boot 1", b"boot 2"


class Rig:
    """A file system, a table and the presence file over both, all in memory."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.fs = MemoryFileSystem()
        self.disk = MemoryBlockDisk()
        self.boot = 1
        self.seen: set[bytes] = set()
        """Every key that was ever put."""
        self.open()

    def open(self, slots: int = SLOTS) -> PresenceOrigin:
        self.table = MemoryBlockTable(self.disk)
        self.presence = open_presence(self.fs, FOLDER, slots, self.table, b"boot %d" % self.boot)
        self.check()
        return self.presence.origin

    def commit(self, *, is_applied: bool = True) -> None:
        """A commit of some removals and puts, or now and then a reset."""
        if self.rng.random() < 0.1:
            applied = self.table.reset(self.table.epoch + 1)
        else:
            slots = self.rng.sample(range(SLOTS), self.rng.randint(1, 20))
            puts = [(self.rng.randbytes(36), slot, self.rng.getrandbits(64)) for slot in slots]
            self.seen.update(key for key, _, _ in puts)
            cleared = [*slots, *self.rng.sample(range(SLOTS), 5)]
            applied = self.table.apply(Changes(self.table.epoch, puts[::2], cleared=cleared))
        assert applied.outcome is Committed.OK and applied.journal is not None
        if is_applied:
            self.presence.table.apply(applied.journal)
            self.check()

    def check(self) -> None:
        check(self.presence, self.table, self.seen)

    def close(self) -> None:
        self.table.close()
        self.presence.close_clean()

    def lose_power(self) -> None:
        """Each page of the presence file is old or new, as each commit may be lost."""
        new = self.fs.read(PATH, 1 << 30)
        self.fs.lose_power(self.rng)
        old = self.fs.read(PATH, 1 << 30)
        for offset in range(0, len(new), 4096):
            page = self.rng.choice((old, new))[offset : offset + 4096]
            self.fs.damage(PATH, offset, page)
        self.disk.lose_power(self.rng)
        self.boot += 1


def check(presence: OpenPresence, table: BlockTable, seen: set[bytes]) -> None:
    """The presence table says what the block table says, of every key."""
    for key in seen:
        (entry,), slot = table.get_many([key]), presence.table.find(key)
        assert slot == (-1 if entry is None else entry.slot)
        if entry is not None:
            assert presence.table.is_same(key, slot)
            assert presence.table.checksum_of(slot) == entry.checksum
    assert int(presence.table.used_slots().sum()) == table.count()
    assert (presence.table.epoch, presence.table.applied) == (table.epoch, table.commit_number)


def test_a_new_namespace() -> None:
    rig = Rig()
    assert rig.presence.origin is PresenceOrigin.CREATED
    assert not rig.presence.used.any() and rig.presence.used.shape == (SLOTS,)
    assert rig.fs.list_dir(FOLDER) == [PRESENCE]


def test_after_a_clean_close_it_is_trusted_on_any_boot() -> None:
    rig = Rig()
    for boot in (1, 1, 2, 3):
        rig.commit()
        used = rig.presence.table.used_slots()
        rig.close()
        rig.fs.lose_power(rig.rng)
        rig.boot = boot
        assert rig.open() is PresenceOrigin.TRUSTED
        assert (rig.presence.used == used).all()


def test_a_mark_is_gone_once_the_file_is_open() -> None:
    """A loss of power after the next opening finds no mark, whatever pages it left."""
    for seed in range(20):
        rig = Rig(seed)
        rig.commit()
        rig.close()
        rig.open()
        rig.commit()
        rig.lose_power()
        assert rig.open() in (PresenceOrigin.REBUILT, PresenceOrigin.CREATED)


def test_after_a_kill_the_last_commit_is_replayed() -> None:
    for seed in range(40):
        rig = Rig(seed)
        for _ in range(rig.rng.randint(0, 4)):
            rig.commit()
        assert rig.open() is PresenceOrigin.TRUSTED
        rig.commit(is_applied=False)
        assert rig.open() is PresenceOrigin.REPLAYED
        assert rig.open() is PresenceOrigin.TRUSTED


def test_a_table_with_the_former_hash_of_keys_names_its_slots_and_is_rebuilt() -> None:
    rig = Rig()
    rig.commit()
    rig.close()
    head = b"KVCPRES1" + rig.fs.read(PATH, 1 << 20)[8:80]
    rig.fs.damage(PATH, 0, head + xxh3_64_intdigest(head).to_bytes(8, "little"))
    assert recorded_slots(rig.fs, FOLDER) == SLOTS
    assert rig.open() is PresenceOrigin.REBUILT
    assert rig.presence.used.any()


def test_more_than_one_missing_commit_is_no_kill() -> None:
    rig = Rig()
    rig.commit()
    rig.commit(is_applied=False)
    rig.table.apply(Changes(rig.table.epoch, [(b"k" * 36, 0, 5)]))
    assert rig.open() is PresenceOrigin.REBUILT


@pytest.mark.parametrize("boot", [b"", b"boot 2"])
def test_without_a_known_boot_it_is_rebuilt(boot: bytes) -> None:
    rig = Rig()
    rig.commit()
    found = open_presence(rig.fs, FOLDER, SLOTS, rig.table, boot)
    assert found.origin is PresenceOrigin.REBUILT
    check(found, rig.table, rig.seen)


@pytest.mark.parametrize("slots", [SLOTS - 1, 200])
def test_another_number_of_slots_makes_a_new_file(slots: int) -> None:
    rig = Rig()
    rig.table.apply(Changes(0, [(b"k" * 36, 3, 5)]))
    found = open_presence(rig.fs, FOLDER, slots, rig.table, BOOT)
    assert found.origin is PresenceOrigin.REBUILT
    assert found.table.find(b"k" * 36) == 3 and found.used.shape == (slots,)
    assert rig.fs.list_dir(FOLDER) == [PRESENCE]


def test_blocks_beyond_fewer_slots_are_absent() -> None:
    rig = Rig()
    rig.table.apply(Changes(0, [(b"k" * 36, 50, 5), (b"l" * 36, 3, 5)]))
    found = open_presence(rig.fs, FOLDER, 40, rig.table, BOOT)
    assert found.table.find(b"k" * 36) == -1 and found.table.find(b"l" * 36) == 3


@pytest.mark.parametrize("seed", range(25))
def test_any_life(seed: int) -> None:
    """Commits, kills before and after they are applied, clean closes, losses of power."""
    rig = Rig(seed)
    for _ in range(30):
        match rig.rng.randrange(6):
            case 0 | 1:
                rig.commit()
            case 2:
                rig.open()
            case 3:
                rig.commit(is_applied=False)
                rig.open()
            case 4:
                rig.close()
                rig.open()
            case _:
                rig.lose_power()
                rig.open()


@pytest.mark.parametrize("seed", range(150))
def test_damage_is_repaired_or_costs_blocks(seed: int) -> None:
    """Flipped bits anywhere in the file: opening does not fail, and no block is in a wrong slot."""
    rig = Rig(seed)
    for _ in range(3):
        rig.commit()
    if seed % 2:
        rig.close()
    size = presence_bytes(SLOTS)
    offset = rig.rng.randrange(160) if seed % 3 == 0 else rig.rng.randrange(size)
    byte = rig.fs.read(PATH, size)[offset] ^ (1 << rig.rng.randrange(8))
    rig.fs.damage(PATH, offset, bytes([byte]))
    table = MemoryBlockTable(rig.disk)
    found = open_presence(rig.fs, FOLDER, SLOTS, table, BOOT)
    for key in rig.seen:
        (entry,), slot = table.get_many([key]), found.table.find(key)
        if slot >= 0 and found.table.is_same(key, slot):
            assert entry is not None and slot == entry.slot
    if offset < HEADER_BYTES:
        check(found, table, rig.seen)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_lost_or_doubled_slot_is_found_by_the_count(change: int) -> None:
    """A cell that is gone, or names the slot of another, leaves fewer slots in use."""
    rig = Rig()
    blocks = [(bytes([slot]) * 36, slot, slot) for slot in range(SLOTS)]
    applied = rig.table.apply(Changes(0, blocks))
    assert applied.journal is not None
    rig.presence.table.apply(applied.journal)
    cells = np.frombuffer(rig.presence.table.memory, dtype=np.uint64)[HEADER_BYTES // 8 :]
    at = int(np.flatnonzero(cells)[7])
    slot = int(cells[at]) & 0xFFFF
    cells[at] = 0 if change < 0 else int(cells[at]) - slot + slot % SLOTS + 1
    rig.seen = {key for key, _, _ in blocks}
    assert rig.open() is PresenceOrigin.REBUILT


@pytest.mark.parametrize("operation", ["open", "preallocate", "map", "sync", "rename", "sync_dir"])
def test_a_failing_device_is_an_error_and_no_damage(operation: str) -> None:
    rig = Rig()
    rig.commit()
    for slots in (SLOTS, 200, SLOTS):
        rig.fs.fail(operation, errno.EIO)
        try:
            open_presence(rig.fs, FOLDER, slots, rig.table, NEXT_BOOT)
        except KVCascadeError as error:
            assert "presence table" in str(error)
        rig.fs.heal()
        check(open_presence(rig.fs, FOLDER, slots, rig.table, NEXT_BOOT), rig.table, rig.seen)


def test_a_full_disk_is_refused_and_leaves_nothing() -> None:
    rig = Rig()
    rig.fs.fail("preallocate", errno.ENOSPC)
    with pytest.raises(NoSpaceError, match="presence table"):
        open_presence(rig.fs, FOLDER, 200, rig.table, BOOT)
    assert rig.fs.list_dir(FOLDER) == [PRESENCE]


def test_a_reader_maps_what_the_writer_changes() -> None:
    rig = Rig()
    with pytest.raises(FormatError, match="no presence table of 7 slots"):
        map_presence(rig.fs, FOLDER, 7)
    with pytest.raises(FormatError):
        map_presence(rig.fs, FOLDER / "absent", SLOTS)
    reader = map_presence(rig.fs, FOLDER, SLOTS)
    for _ in range(5):
        rig.commit()
        for key in rig.seen:
            assert reader.find(key) == rig.presence.table.find(key)
        assert reader.epoch == rig.table.epoch
    with pytest.raises(TypeError):
        reader.memory[0] = 1
    assert not np.frombuffer(reader.memory, dtype=np.uint8).flags.writeable


def test_only_a_file_of_this_boot_says_so() -> None:
    rig = Rig()
    assert is_of_this_boot(rig.fs, FOLDER, BOOT)
    assert not is_of_this_boot(rig.fs, FOLDER, NEXT_BOOT)
    assert not is_of_this_boot(rig.fs, FOLDER, b"")
    assert not is_of_this_boot(rig.fs, FOLDER / "absent", BOOT)
    whole = rig.fs.read(PATH, 1 << 20)
    rig.fs.replace(PATH, whole[:-1])
    assert not is_of_this_boot(rig.fs, FOLDER, BOOT)
    rig.fs.replace(PATH, whole)
    assert is_of_this_boot(rig.fs, FOLDER, BOOT)
    rig.fs.damage(PATH, 20, b"x")
    assert not is_of_this_boot(rig.fs, FOLDER, BOOT)
    assert boot_id() == boot_id() != b""


WRITER = """
import random, sys
from pathlib import Path
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.block_table import *
from kvcascade.tiers.nvme.path.lmdb_block_table import *
from kvcascade.tiers.nvme.path.presence_file import *
folder, seed, slots = Path(sys.argv[1]), int(sys.argv[2]), 500
fs, rng = RealFileSystem(), random.Random(seed)
same = is_of_this_boot(fs, folder, boot_id())
table = open_block_table(
    folder / "blocks", block_table_bytes(slots), b"", is_durable=False, is_same_boot=same
)
presence = open_presence(fs, folder, slots, table, boot_id())
print(presence.origin.value, flush=True)
while True:
    some = rng.sample(range(slots), 40)
    puts = [(rng.randbytes(36), slot, slot * 3) for slot in some[:30]]
    applied = table.apply(Changes(table.epoch, puts, cleared=some))
    presence.table.apply(applied.journal)
"""


def test_a_killed_process_leaves_at_most_one_commit_to_replay(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    fs, rng = RealFileSystem(), random.Random(11)
    origins: list[PresenceOrigin] = []
    for seed in range(12):
        with children() as start:
            process = start(WRITER, tmp_path, seed)
            reads = fs.open(tmp_path / PRESENCE)
            table = map_presence(fs, tmp_path, 500)
            first, wanted = table.applied, rng.randint(1, 120)
            while table.applied < first + wanted:
                assert process.poll() is None
            process.kill()
            process.wait()
            reads.close()
        blocks = open_block_table(
            tmp_path / "blocks",
            block_table_bytes(500),
            b"",
            is_durable=False,
            is_same_boot=is_of_this_boot(fs, tmp_path, boot_id()),
        )
        found = open_presence(fs, tmp_path, 500, blocks, boot_id())
        origins.append(found.origin)
        keys = {key for key, _ in blocks.keys_after(b"", 1000)}
        assert len(keys) == blocks.count()
        check(found, blocks, keys)
        blocks.abandon()
    assert set(origins) <= {PresenceOrigin.TRUSTED, PresenceOrigin.REPLAYED}
