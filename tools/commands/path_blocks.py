"""Namespaces and blocks of a path, as commands see them beside running engines.

The writer says which blocks there are; the command reads the payload itself. If no process is the
writer, the command is, until it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import ConfigError, FormatError, InUseError, KVCascadeError
from ...tiers.base import GROUP_BYTES
from ...tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from ...tiers.nvme.path.payload_files import PayloadFiles
from ...tiers.nvme.path.writer.messages.writer_questions import MAX_BLOCKS_PER_ANSWER
from ...tiers.nvme.path.writer.namespace.namespace_home import SEGMENTS, STATE, read_descriptions
from ...tiers.nvme.path.writer.path_options import load_record, was_reset
from .block_scan import NamedBlock, ScanSource
from .path_files import load_note, map_last_presence, named
from .path_folders import (
    MAX_NAMES_SHOWN,
    NamespaceFolder,
    chosen_of,
    folders_in,
    parse_hash,
)
from .path_session import PathSession, open_session, tier_roots
from .saved_state import SavedState

SEGMENTS_PER_QUESTION = 16
"""Segments that are deleted between two answers, so that Ctrl-C ends the command soon."""
DELETE_LIMIT_S = 600.0
"""Longest wait for the deletion of files."""


class OpenPath:
    """A path that is open for a command; one thread."""

    def __init__(self, fs: FileSystem, session: PathSession, roots: Sequence[Path]) -> None:
        self.session = session
        self.roots = tuple(roots)
        self._fs = fs
        listed = session.ask("list")["namespaces"]
        self._clients = {str(one["name"]): int(one["clients"]) for one in listed}
        self._open = {str(one["name"]) for one in listed if one["is_open"]}

    @property
    def names(self) -> list[str]:
        """Names of all namespaces."""
        return sorted(self._clients)

    def folders(self, path: Path) -> list[NamespaceFolder]:
        """Return all namespaces in the path, those of other versions too, or the one that `path`
        is. Raises `TierIOError`."""
        return folders_in(self._fs, path, self.roots[1:])

    def namespace(self, name: str) -> NamespaceFolder:
        """Return a namespace by its whole name, with all its parts.

        Raises a `KVCascadeError` if it is unreadable.
        """
        folders = tuple(root / name for root in self.roots)
        return NamespaceFolder(name, folders, read_descriptions(self._fs, folders), True, "")

    def was_open(self, name: str) -> bool:
        """Return True if the writer had the namespace open before this command asked about it."""
        return name in self._open

    def is_live(self, name: str) -> bool:
        """Return True if an engine, or another node, has the namespace open."""
        return self._clients.get(name, 0) > 0

    def only(self, text: str | None, path: Path) -> str:
        """Return the only namespace that fits a text, or the one that `path` is.

        Without a text, return the only namespace of this version. Raises `ConfigError` if none or
        several fit, or `FormatError` if this one cannot be read.
        """
        found = chosen_of(self.folders(path), text)
        fit = [each for each in found if each.problem or self._knows(each)]
        if len(fit) > 1:
            shown = ", ".join(each.name for each in fit[:MAX_NAMES_SHOWN])
            raise ConfigError(f"--namespace: {len(fit)} namespaces match; give one of {shown}")
        one = (fit or found)[0]
        if one.problem or not one.is_readable:
            raise FormatError(one.reason)
        return one.name  # the writer says why it cannot use one that fits no more

    def _knows(self, one: NamespaceFolder) -> bool:
        return one.is_readable and one.name in self._clients

    def facts(self, name: str) -> dict[str, Any]:
        """Return numbers of blocks, slots and resets of a namespace, and its totals."""
        return self.session.ask("namespace", name=name)

    def facts_or_problem(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return what `facts` does; None and the reason if the writer cannot open the namespace.

        Raises `InUseError` if the writer does not answer.
        """
        try:
            return self.facts(name), None
        except InUseError:
            raise
        except KVCascadeError as error:
            return None, str(error)

    def about(self) -> dict[str, Any]:
        """Return the options in force, the bytes that are taken, and the writer of the path."""
        stat = self.session.ask("stat")
        note = None if self.session.is_writer else load_note(self._fs, self.roots[0])
        return {
            "paths": [str(root) for root in self.roots],
            "writer": None if note is None else named(note),
            "used_bytes": stat["bytes"],
            "budget_left_bytes": stat["budget_left_bytes"],
            **stat["options"],
        }

    def was_reset(self, name: str) -> bool:
        """Return True if engines were reset since the first of them started."""
        record = load_record(self._fs, self.roots[0])
        return was_reset(record, name, int(self.facts(name)["epoch"]))

    def blocks(self, name: str, start: bytes = b"") -> Iterator[NamedBlock]:
        """Yield the blocks whose hash begins with `start`, in the order of the hashes."""
        after: str | None = ""
        while after is not None:
            answer = self.session.ask("blocks", name=name, after=after, start=start.hex())
            for key, slot, checksum, used_s in answer["blocks"]:
                yield NamedBlock(bytes.fromhex(key), slot, checksum, used_s)
            after = answer["next"]

    def has_block(self, name: str, text: str) -> bool:
        """Return True if a block's hash begins with the hexadecimal digits `text`."""
        return next(self.blocks(name, parse_hash(text)), None) is not None

    def only_block(self, name: str, text: str, option: str) -> NamedBlock:
        """Return the only block whose hash begins with the hexadecimal digits `text`, or is `text`.

        Raises `ConfigError` if there is none, or if several hashes only begin with it.
        """
        start = parse_hash(text)
        found = list(islice(self.blocks(name, start), MAX_NAMES_SHOWN + 1))
        if not found:
            raise ConfigError(f"{option}: there is no block {text} in {name}")
        if len(found) > 1 and found[0].key != start:  # the whole hash comes first
            shown = ", ".join(each.key.hex() for each in found[:MAX_NAMES_SHOWN])
            raise ConfigError(f"{option}: {text} is the start of several blocks: {shown}")
        return found[0]

    def groups(self, name: str) -> dict[int, int]:
        """Return the number of blocks by KV group."""
        numbers = (each.key[-GROUP_BYTES:] for each in self.blocks(name))
        return dict(Counter(int.from_bytes(number, "big") for number in numbers))

    def state(self, name: str) -> SavedState:
        """Return the saved arrays of a namespace."""
        return SavedState(self.roots[0] / name / STATE)

    def take_in_parts(
        self,
        name: str,
        segments: Sequence[int],
        *,
        is_if_empty: bool = False,
        is_if_unused: bool = False,
    ) -> Iterator[tuple[list[int], int]]:
        """Delete segments with their blocks; with `is_if_empty` only those without any.

        With `is_if_unused` the rest stays as soon as a node has the namespace open. Yield after
        every few segments the numbers of those that were deleted, and how many blocks they had. So
        the caller knows what was done if an error ends it.
        """
        for start in range(0, len(segments), SEGMENTS_PER_QUESTION):
            answer = self.session.ask(
                "take",
                DELETE_LIMIT_S,
                may_repeat=is_if_empty,  # a segment that was taken may have new blocks
                name=name,
                segments=list(segments[start : start + SEGMENTS_PER_QUESTION]),
                if_empty=is_if_empty,
                if_unused=is_if_unused,
            )
            yield answer["taken"], int(answer["blocks"])

    def remove(self, name: str) -> bool:
        """Delete a namespace that no engine has open. Return False if its files could not be
        deleted."""
        # A writer that is asked again would not know the namespace.
        answer = self.session.ask("remove", DELETE_LIMIT_S, may_repeat=False, name=name)
        return bool(answer["is_removed"])

    def drop(self, name: str, blocks: Sequence[NamedBlock]) -> int:
        """Remove those of the blocks that are still as they were named; return their number."""
        return sum(self.drop_in_parts(name, blocks))

    def drop_in_parts(self, name: str, blocks: Sequence[NamedBlock]) -> Iterator[int]:
        """Remove those of the blocks that are still as they were named.

        Yield the number of those that were removed after every `MAX_BLOCKS_PER_ANSWER` blocks.
        """
        for start in range(0, len(blocks), MAX_BLOCKS_PER_ANSWER):
            some = blocks[start : start + MAX_BLOCKS_PER_ANSWER]
            rows = [[each.key.hex(), each.slot, each.checksum] for each in some]
            yield int(self.session.ask("drop", name=name, blocks=rows)["dropped"])

    @contextmanager
    def source(self, namespace: NamespaceFolder) -> Iterator[ScanSource]:
        """Open the files of a namespace for reading."""
        first = namespace.folders[0]
        folders = [folder / SEGMENTS for folder in namespace.folders]
        files = PayloadFiles(self._fs, folders, namespace.layout)
        try:
            yield ScanSource(files, lambda: map_last_presence(self._fs, first))
        finally:
            files.close()


@contextmanager
def open_path(path: Path, also: Sequence[Path] | None = None) -> Iterator[OpenPath]:
    """Open the tier in a path, or that of a namespace directory. Raises a `KVCascadeError`."""
    fs = RealFileSystem()
    with open_session(fs, path, also or ()) as session:
        yield OpenPath(fs, session, tier_roots(fs, session.root, also or ()))
