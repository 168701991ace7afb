"""Namespaces and blocks of a path with one writer, as commands see them beside running engines.

The writer says which blocks there are; the command reads the payload itself. If no process is the
writer, the command is, until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...assembly.path_parts import existing_names
from ...errors import ConfigError, KVCascadeError
from ...handlers.node.path_io import SEGMENTS
from ...handlers.node.path_session import PathSession, open_session, tier_roots
from ...tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from ...tiers.nvme.namespace import DESCRIPTION
from ...tiers.nvme.path.block_scan import NamedBlock, ScanSource
from ...tiers.nvme.path.payload_files import PayloadFiles
from ...tiers.nvme.path.presence_file import map_presence
from ...tiers.nvme.path.writer.block_questions import MAX_BLOCKS_PER_ANSWER
from ...tiers.nvme.path.writer.namespace_home import homes_under, read_description
from ...tiers.nvme.path.writer.path_options import PATH_FILE, PATH_FOLDER, load_record, was_reset
from ...tiers.nvme.segments.format import SegmentLayout

MAX_NAMES_SHOWN = 8


def has_one_writer(path: Path) -> bool:
    """Return True if a path, or that of a namespace directory, is one with a writer.

    A path in which all namespaces are of an older version is none.
    """
    fs = RealFileSystem()
    root = path.parent if fs.exists(path / DESCRIPTION) else path
    if not fs.exists(root / PATH_FOLDER / PATH_FILE):
        return False
    with suppress(KVCascadeError):
        return bool(homes_under(fs, root)) or not existing_names(fs, root)
    return True


@dataclass(frozen=True, slots=True)
class PathNamespace:
    """A namespace of an open path."""

    name: str
    folders: tuple[Path, ...]
    description: Mapping[str, Any]
    is_live: bool
    """True if an engine, or another node, has it open."""

    @property
    def layout(self) -> SegmentLayout:
        """Shape of a segment."""
        about = self.description
        return SegmentLayout(
            about["block_bytes"], about["slots_per_segment"], str(about["fingerprint"])
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.description["block_bytes"])


class OpenPath:
    """A path that is open for a command; one thread."""

    def __init__(self, fs: FileSystem, session: PathSession, roots: Sequence[Path]) -> None:
        self.session = session
        self.roots = tuple(roots)
        self._fs = fs
        self._clients = {
            str(one["name"]): int(one["clients"]) for one in session.ask("list")["namespaces"]
        }

    @property
    def names(self) -> list[str]:
        """Names of all namespaces."""
        return sorted(self._clients)

    def namespace(self, name: str) -> PathNamespace:
        """Return a namespace by its whole name. Raises a `KVCascadeError` if it is unreadable."""
        folders = tuple(root / name for root in self.roots)
        description = read_description(self._fs, folders[0])
        return PathNamespace(name, folders, description, self._clients.get(name, 0) > 0)

    def chosen(self, text: str | None, path: Path) -> list[str]:
        """Return the namespaces that fit a text, or the one that `path` is; all without a text.

        Raises `ConfigError` if the text fits none, or several.
        """
        if text is None and path.name in self._clients and path.parent == self.roots[0]:
            return [path.name]
        if text is None:
            return self.names
        words = {name: self._words(name) for name in self.names}
        for fits in (str.__eq__, str.__contains__):
            found = [name for name in words if any(fits(word, text) for word in words[name])]
            if len(found) == 1:
                return found
            if found:
                break
        shown = ", ".join((found or self.names)[:MAX_NAMES_SHOWN])
        if found:
            raise ConfigError(f"--namespace: {len(found)} namespaces match; give one of {shown}")
        raise ConfigError(f"--namespace: there is no {text!r}; there are {shown}")

    def only(self, text: str | None, path: Path) -> str:
        """Return the only namespace that fits. Raises `ConfigError` if several do."""
        found = self.chosen(text, path)
        if len(found) != 1:
            shown = ", ".join(found[:MAX_NAMES_SHOWN])
            raise ConfigError(f"--namespace: {len(found)} namespaces match; give one of {shown}")
        return found[0]

    def facts(self, name: str) -> dict[str, Any]:
        """Return numbers of blocks, slots and resets of a namespace, and its totals."""
        return self.session.ask("namespace", name=name)

    def was_reset(self, name: str) -> bool:
        """Return True if engines were reset since the first of them started."""
        record = load_record(self._fs, self.roots[0])
        return was_reset(record, name, int(self.facts(name)["epoch"]))

    def blocks(self, name: str) -> Iterator[NamedBlock]:
        """Yield every block that the index of a namespace names, in the order of the hashes."""
        after: str | None = ""
        while after is not None:
            answer = self.session.ask("blocks", name=name, after=after)
            for key, slot, checksum, used_s in answer["blocks"]:
                yield NamedBlock(bytes.fromhex(key), slot, checksum, used_s)
            after = answer["next"]

    def drop(self, name: str, blocks: Sequence[NamedBlock]) -> int:
        """Remove those of the blocks that are still as they were named; return their number."""
        dropped = 0
        for start in range(0, len(blocks), MAX_BLOCKS_PER_ANSWER):
            some = blocks[start : start + MAX_BLOCKS_PER_ANSWER]
            rows = [[each.key.hex(), each.slot, each.checksum] for each in some]
            dropped += int(self.session.ask("drop", name=name, blocks=rows)["dropped"])
        return dropped

    @contextmanager
    def source(self, namespace: PathNamespace) -> Iterator[ScanSource]:
        """Open the files of a namespace for reading."""
        table = map_presence(self._fs, namespace.folders[0], self.facts(namespace.name)["slots"])
        folders = [folder / SEGMENTS for folder in namespace.folders]
        files = PayloadFiles(self._fs, folders, namespace.layout)
        try:
            yield ScanSource(files, table)
        finally:
            files.close()

    def _words(self, name: str) -> list[str]:
        with suppress(KVCascadeError):
            description = self.namespace(name).description
            return [name, str(description["fingerprint"]), str(description.get("label", ""))]
        return [name]


@contextmanager
def open_path(path: Path, also: Sequence[Path] | None = None) -> Iterator[OpenPath]:
    """Open the tier in a path, or that of a namespace directory. Raises a `KVCascadeError`."""
    fs = RealFileSystem()
    with open_session(fs, path, also or ()) as session:
        yield OpenPath(fs, session, tier_roots(fs, session.root, also or ()))
