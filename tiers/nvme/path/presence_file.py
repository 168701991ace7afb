"""The file `presence` of a namespace: a presence table that outlives the process that writes it.

The header is one page; `presence_table` describes the rest. All numbers are little endian:

| offset | size | contents |
| --- | --- | --- |
| 0 | 8 | magic `KVCPRES2` |
| 8 | 8 | number of slots |
| 16 | 64 | boot id of the machine, padded with zeros |
| 80 | 8 | check: xxh3_64 over the first 80 bytes |
| 128 | 8 | epoch |
| 136 | 8 | number of the last commit that was applied completely |
| 144 | 8 | clean mark: xxh3_64 over all other bytes of the file after a clean close, else 0 |

A process that is killed leaves its changes in the page cache. So the next writer of the same boot
trusts the file, and replays the last commit, of which any part may be missing. After another boot
only a file that was closed cleanly is trusted. It was synced before its mark was set, and the mark
is cleared and synced before the next change. A mark that does not fit shows damage. In every other
case the table is built from a scan of the block table. As a last check, the number of used slots
must be that of the block table.

The file has all of its blocks on the disk before it is mapped for writing. So no write to the
mapping can find the disk full.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import xxhash

from ....errors import FormatError, os_errors
from ..disk.filesystem import File, FileSystem
from .block_table import BlockTable
from .presence_table import (
    HEADER_BYTES,
    Mask,
    PresenceTable,
    WritablePresence,
    presence_bytes,
)

PRESENCE = "presence"
"""Name of the file in the directory of a namespace."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TEMPORARY_SUFFIX = ".new"
_MAGIC = b"KVCPRES2"
_FORMER_MAGIC = b"KVCPRES1"
"""Of tables with another hash of keys: only their number of slots counts."""
_HEAD = struct.Struct("<8sQ64s")
_CHECK = struct.Struct("<Q")
_CLEAN_WORD = 18


class PresenceOrigin(Enum):
    """Origin of a presence table's contents at opening."""

    CREATED = "created"
    """There was no file, and the namespace is empty."""
    TRUSTED = "trusted"
    """Every commit was in the file."""
    REPLAYED = "replayed"
    """The last commit was applied again."""
    REBUILT = "rebuilt"
    """The block table was scanned."""


@dataclass(frozen=True, slots=True)
class OpenPresence:
    """An open presence table of the writer."""

    table: WritablePresence
    origin: PresenceOrigin
    used: Mask
    """True for every slot that holds a block: shape `(slots,)`."""
    file: File

    def close_clean(self) -> None:
        """Sync the table and mark it as clean. The block table must be closed cleanly before.

        No method of the table may be called afterwards. Raises a `KVCascadeError`.
        """
        with os_errors("closing the presence table"):
            self.file.sync()
            _words(self.table.memory)[_CLEAN_WORD] = _clean_mark(self.table.memory)
            self.file.sync()
            self.file.close()


def boot_id() -> bytes:
    """Return an id that changes at every boot; empty if the kernel does not provide it."""
    try:
        return BOOT_ID.read_bytes().strip()[:64]
    except OSError:
        return b""


def is_of_this_boot(fs: FileSystem, folder: Path, boot: bytes) -> bool:
    """Return True if a writer of this boot has opened the presence table in this folder.

    That writer checked the block table before, and nothing but its own commits changed it since.
    """
    with suppress(OSError):
        return read_head(fs, folder / PRESENCE)[1] == boot != b""
    return False


def open_presence(
    fs: FileSystem, folder: Path, slots: int, table: BlockTable, boot: bytes
) -> OpenPresence:
    """Open, repair or create the presence table in the directory of a namespace.

    `slots` is the final number of slots. `boot` is `boot_id()`. The caller holds the lock of the
    path and has opened the block table. Raises a `KVCascadeError`, such as `NoSpaceError`.
    """
    path = folder / PRESENCE
    with os_errors(f"opening the presence table {path}"):
        file = _open_if_whole(fs, path, slots)
        is_new = file is None
        temporary = path.with_name(PRESENCE + _TEMPORARY_SUFFIX)
        if file is None:
            file = _create(fs, temporary, slots)
        else:
            file.preallocate(presence_bytes(slots))  # a sparse copy has holes
        presence = WritablePresence(file.map(presence_bytes(slots), writable=True), slots)
        origin = PresenceOrigin.REBUILT if is_new else _trust(presence, table, boot)
        _start(presence, file, boot, is_valid=origin is not PresenceOrigin.REBUILT)
        used = presence.used_slots()
        if origin is PresenceOrigin.REBUILT or int(used.sum()) != table.count():
            origin = PresenceOrigin.REBUILT if table.count() else PresenceOrigin.CREATED
            _rebuild(presence, table)
            _start(presence, file, boot, is_valid=True)
            used = presence.used_slots()
        if is_new:
            fs.rename(temporary, path)
            fs.sync_dir(folder)
    return OpenPresence(presence, origin, used, file)


def map_presence(fs: FileSystem, folder: Path, slots: int) -> PresenceTable:
    """Map the presence table in the directory of a namespace, to read it.

    Raises `FormatError` if the file is none of this number of slots, or a `KVCascadeError` of the
    file system.
    """
    path = folder / PRESENCE
    with os_errors(f"mapping the presence table {path}"):
        file = _open_if_whole(fs, path, slots)
        if file is None:
            raise FormatError(f"{path} is no presence table of {slots} slots; open it again")
        memory = file.map(presence_bytes(slots), writable=False)
        file.close()
    return PresenceTable(memory, slots)


def recorded_slots(fs: FileSystem, folder: Path) -> int:
    """Return the number of slots of the presence table in the directory of a namespace.

    0 if the file is missing or damaged.
    """
    with suppress(OSError):
        return read_head(fs, folder / PRESENCE, (_MAGIC, _FORMER_MAGIC))[0]
    return 0


def read_head(
    fs: FileSystem, path: Path, magics: Container[bytes] = (_MAGIC,)
) -> tuple[int, bytes]:
    """Return the slots and the boot id in a file; 0 and nothing if it is damaged.

    Raises an `OSError`.
    """
    with closing(fs.open(path)) as file:
        data = bytearray(HEADER_BYTES)
        file.preadv([memoryview(data)], 0)
        slots, boot = _head_in(memoryview(data), magics) or (0, b"")
        return (slots, boot) if file.size() == presence_bytes(slots) else (0, b"")


def _open_if_whole(fs: FileSystem, path: Path, slots: int) -> File | None:
    """Open the file if it has the size of this number of slots; None if there is none."""
    if not fs.exists(path):
        return None
    file = fs.open(path)
    if file.size() == presence_bytes(slots):
        return file
    file.close()
    return None


def _create(fs: FileSystem, path: Path, slots: int) -> File:
    if fs.exists(path):
        fs.unlink(path)
    file = fs.open(path, create=True)
    try:
        file.preallocate(presence_bytes(slots))
    except OSError:
        file.close()
        fs.unlink(path)
        raise
    return file


def _trust(presence: WritablePresence, table: BlockTable, boot: bytes) -> PresenceOrigin:
    """Bring a table up to the last commit, if what it says can be trusted."""
    head = _head_in(presence.memory)
    is_open = _words(presence.memory)[_CLEAN_WORD] == 0
    is_same_boot = is_open and head is not None and head[1] == boot != b""
    if head is None or not (is_same_boot or has_clean_mark(presence.memory)):
        return PresenceOrigin.REBUILT
    missing = table.commit_number - presence.applied
    if missing == 0 and presence.epoch == table.epoch:
        return PresenceOrigin.TRUSTED
    journal = table.last_changes() if missing == 1 else None
    if journal is None or journal.epoch != table.epoch:
        return PresenceOrigin.REBUILT
    if not journal.is_reset and presence.epoch != table.epoch:
        return PresenceOrigin.REBUILT
    presence.replay(journal)
    return PresenceOrigin.REPLAYED


def _start(presence: WritablePresence, file: File, boot: bytes, *, is_valid: bool) -> None:
    """Clear the clean mark durably, and record this boot. Invalid tables belong to no boot."""
    memory = presence.memory
    _words(memory)[_CLEAN_WORD] = 0
    head = _HEAD.pack(_MAGIC, presence.slots, boot if is_valid else b"")
    check = xxhash.xxh3_64_intdigest(head) if is_valid else 0
    memory[: _HEAD.size + _CHECK.size] = head + _CHECK.pack(check)
    file.sync()


def _rebuild(presence: WritablePresence, table: BlockTable) -> None:
    """Fill the table from a scan of the block table."""
    parts = list(table.scan())
    none = np.empty(0, dtype=np.uint64)
    hashes = np.concatenate([part.hashes for part in parts]) if parts else none
    slots = np.concatenate([part.slots for part in parts]) if parts else none.astype(np.int32)
    checksums = np.concatenate([part.checksums for part in parts]) if parts else none
    del parts
    fits = (slots >= 0) & (slots < presence.slots)
    if not fits.all():
        hashes, slots, checksums = hashes[fits], slots[fits], checksums[fits]
    presence.begin(table.epoch, table.commit_number)
    presence.load(hashes, slots, checksums)


def _head_in(memory: memoryview, magics: Container[bytes] = (_MAGIC,)) -> tuple[int, bytes] | None:
    """Return the slots and the boot id in a header; None if the header is damaged."""
    head = bytes(memory[: _HEAD.size])
    (check,) = _CHECK.unpack_from(memory, _HEAD.size)
    magic, slots, boot = _HEAD.unpack(head)
    if magic not in magics or check != xxhash.xxh3_64_intdigest(head):
        return None
    return slots, boot.rstrip(b"\0")


def has_clean_mark(memory: memoryview) -> bool:
    """Return True if a table was closed cleanly, and not opened to be changed since."""
    mark = _words(memory)[_CLEAN_WORD]
    return mark != 0 and mark == _clean_mark(memory)


def _words(memory: memoryview) -> memoryview[int]:
    """Return the header as numbers of 64 bits."""
    return memory[:HEADER_BYTES].cast("B").cast("Q")


def _clean_mark(memory: memoryview) -> int:
    """Return the mark of a table that is closed cleanly as it is now."""
    at = _CLEAN_WORD * _CHECK.size
    digest = xxhash.xxh3_64(memory[:at])
    digest.update(memory[at + _CHECK.size :])
    return digest.intdigest()
