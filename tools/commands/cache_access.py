"""Find, choose and open the namespaces that a command works on."""

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
    """A namespace that is open for reading."""

    description: Description
    index: IndexReader
    segments: SegmentReader
    state: StateReader
    owners: list[int]
    """Processes that own the namespace now; empty if it is closed."""

    @property
    def slots(self) -> int:
        """Return the number of slots, up to the end of the last existing segment."""
        numbers = self.segments.found
        return (max(numbers) + 1) * self.description.slots_per_segment if numbers else 0


def locations(path: Path, also: Sequence[Path] | None = None) -> list[Location]:
    """Return the namespaces under the paths. Raises `TierIOError` if there is none."""
    paths = [path, *(also or ())]
    found = locate(paths)
    if not found:
        shown = ", ".join(map(str, paths))
        raise TierIOError(errno.ENOENT, f"no namespace in {shown}; give the path of an NVMe tier")
    return found


def choose(found: Sequence[Location], name: str | None) -> Location:
    """Return the namespace whose name, label or fingerprint contains `name`.

    Without a name, return the only namespace. Raises `ConfigError` if none or several match.
    """
    matches = list(found) if name is None else _fitting(found, name)
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(each.name for each in (matches or found)[:MAX_MATCHES_SHOWN])
    if not matches:
        raise ConfigError(f"--namespace: there is no {name!r}; there are {names}")
    raise ConfigError(f"--namespace: {len(matches)} namespaces match; give one of {names}")


def _fitting(found: Sequence[Location], name: str) -> list[Location]:
    """Return the namespaces with exactly this text; if there are none, those that contain it."""
    words = [(each, _words_of(each)) for each in found]
    for wanted in (name, name.rstrip("/").rpartition("/")[2]):  # the text may be a path or a label
        for fits in (str.__eq__, str.__contains__):
            matches = [each for each, given in words if any(fits(word, wanted) for word in given)]
            if matches:
                return matches
    return []


def _words_of(location: Location) -> list[str]:
    """Return name, fingerprint and label; the latter two only if they can be read."""
    try:
        description = read_description(location)
    except KVCascadeError:
        return [location.name, location.name[-SHORT_FINGERPRINT_DIGITS:]]
    return [location.name, description.fingerprint, description.label]


def choose_for_good(found: Sequence[Location], name: str) -> Location:
    """Return the namespace for an action that cannot be undone.

    The name must be complete, or have at least 12 digits of the fingerprint. Raises `ConfigError`.
    """
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
        f"--namespace: {name!r} does not identify the namespace to remove; give its whole name, or "
        f"at least {SHORT_FINGERPRINT_DIGITS} digits of its fingerprint; there are {names}"
    )


def chosen_of(found: Sequence[Location], name: str | None) -> Sequence[Location]:
    """Return the namespace with this name, or all of them without a name. Raises `ConfigError`."""
    return found if name is None else [choose(found, name)]


def count_segments(location: Location) -> int:
    """Return the number of segment files, even if the namespace cannot be read."""
    files = (path.name for folder in location.folders for path in folder.glob("segments/*"))
    return sum(segment_number(name) is not None for name in files)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fingerprint fields that differ: name to both values, None if a side lacks the
    field."""
    names = [*one, *(name for name in other if name not in one)]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@contextmanager
def opened(location: Location, *, is_trusted: bool = False) -> Iterator[OpenedCache]:
    """Open a namespace for reading. Raises a `KVCascadeError`.

    Unless the index `is_trusted`, or an engine has it open, a child process walks it first.
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
    """Open the index of a namespace for reading. Raises a `KVCascadeError`."""
    return IndexReader(description.home / "index")


def parse_hash(text: str) -> bytes:
    """Return a block hash, or its beginning, from hexadecimal digits. Raises `ConfigError`."""
    digits = text.removeprefix("0x")
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a block hash; give an even number of hexadecimal digits"
        ) from None


def check_index_can_be_walked(home: Path) -> None:
    """Read the whole index of a namespace directory in a child process.

    LMDB may end its process on a damaged page. The child imports nothing but LMDB, so it starts
    fast. Errors that it reports are ignored: this process meets them again with a better message.
    Raises `CorruptionError` if LMDB ends the child.
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
