"""Choosing and opening what a command works on."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, CorruptionError, KVCascadeError, TierIOError
from ...tiers.nvme.index.index_file import DATA_NAME, damaged
from ...tiers.nvme.namespace import SHORT_FINGERPRINT_DIGITS
from ...tiers.nvme.offline.presence import owners
from ...tiers.nvme.offline.reader import (
    Description,
    IndexReader,
    Location,
    SegmentReader,
    index_options,
    locate,
    read_description,
)
from ...tiers.nvme.offline.state_reader import StateReader
from ...tiers.nvme.segments.format import segment_number

MAX_MATCHES_SHOWN = 8
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


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """One namespace, open for reading."""

    description: Description
    index: IndexReader
    segments: SegmentReader
    state: StateReader
    owners: list[int]
    """Processes that own it now; empty: it is closed."""

    @property
    def slots(self) -> int:
        """Slots up to the last segment that is there."""
        numbers = self.segments.found
        return (max(numbers) + 1) * self.description.slots_per_segment if numbers else 0


def locations(path: Path, also: Sequence[Path] | None = None) -> list[Location]:
    """Namespaces in the paths, at least one. Raises `TierIOError`."""
    paths = [path, *(also or ())]
    found = locate(paths)
    if not found:
        shown = ", ".join(map(str, paths))
        raise TierIOError(errno.ENOENT, f"no namespace in {shown}; give the path of an NVMe tier")
    return found


def choose(found: Sequence[Location], name: str | None) -> Location:
    """The one that is meant: by any part of its name, label or fingerprint that fits no other; all
    there is without a name. Raises `ConfigError` if that is none or several.
    """
    matches = list(found) if name is None else _fitting(found, name)
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(each.name for each in (matches or found)[:MAX_MATCHES_SHOWN])
    if not matches:
        raise ConfigError(f"--namespace: there is no {name!r}; there are {names}")
    raise ConfigError(f"--namespace: {len(matches)} namespaces could be meant; give one of {names}")


def _fitting(found: Sequence[Location], name: str) -> list[Location]:
    """Those that a text names exactly; if there are none, those that it is a part of."""
    words = [(each, _words_of(each)) for each in found]
    for wanted in (name, name.rstrip("/").rpartition("/")[2]):  # it may be a path, or a label
        for fits in (str.__eq__, str.__contains__):
            matches = [each for each, given in words if any(fits(word, wanted) for word in given)]
            if matches:
                return matches
    return []


def _words_of(location: Location) -> list[str]:
    """Name, fingerprint and label; the latter two as far as they can be read."""
    try:
        description = read_description(location)
    except KVCascadeError:
        return [location.name, location.name[-SHORT_FINGERPRINT_DIGITS:]]
    return [location.name, description.fingerprint, description.label]


def choose_for_good(found: Sequence[Location], name: str) -> Location:
    """The one that is meant by what cannot be undone: its whole name, or at least 12 digits of its
    fingerprint. Raises `ConfigError` if that is none or several."""
    wanted = name.rstrip("/").rpartition("/")[2]
    matches = [each for each in found if each.name == wanted] or [
        each
        for each in found
        if len(wanted) >= SHORT_FINGERPRINT_DIGITS and wanted in _words_of(each)[1]
    ]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(each.name for each in (matches or found)[:MAX_MATCHES_SHOWN])
    raise ConfigError(
        f"--namespace: {name!r} does not name one to be removed; give its whole name, or at least "
        f"{SHORT_FINGERPRINT_DIGITS} digits of its fingerprint; there are {names}"
    )


def chosen_of(found: Sequence[Location], name: str | None) -> Sequence[Location]:
    """The one with a name; all without. Raises `ConfigError`."""
    return found if name is None else [choose(found, name)]


def count_segments(location: Location) -> int:
    """Segment files of a namespace that perhaps cannot be read."""
    files = (path.name for folder in location.folders for path in folder.glob("segments/*"))
    return sum(segment_number(name) is not None for name in files)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of fingerprints that differ: name to both values, None where there is none."""
    names = [*one, *(name for name in other if name not in one)]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@contextmanager
def opened(location: Location, *, is_trusted: bool = False) -> Iterator[OpenedCache]:
    """Open one for reading. Raises one of our errors.

    An index that no engine has open is walked elsewhere first, unless it `is_trusted`.
    """
    description = read_description(location)
    held = owners(description.folders.values())
    if not held and not is_trusted:
        check_index_can_be_walked(description.home)
    with open_index(description) as index:
        segments = SegmentReader(description)
        try:
            yield OpenedCache(
                description,
                index,
                segments,
                StateReader(description.home),
                held,
            )
        finally:
            segments.close()


def open_index(description: Description) -> IndexReader:
    """The index of a namespace, for reading. Raises one of our errors."""
    return IndexReader(description.home / "index")


def parse_hash(text: str) -> bytes:
    """A block hash, or the start of one, from hexadecimal digits. Raises `ConfigError`."""
    digits = text.removeprefix("0x")
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no block hash; give an even number of hexadecimal digits"
        ) from None


def check_index_can_be_walked(home: Path) -> None:
    """Read the whole index of a namespace directory in a child process.

    LMDB may end its process on a damaged page. The child imports nothing but LMDB, so it starts
    fast. Errors that it reports are ignored: this process meets them again with a better message.
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
