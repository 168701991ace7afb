"""Caches of a path, for the command line's tests."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import numpy as np
from support.keys import key

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import spec_of
from kvcascade.tiers.nvme.segments.arrays import HEADER_BYTES
from kvcascade.tools.commands.path_blocks import open_path

from .path_engine import PathEngine

BLOCK, PER_SEGMENT = 4096, 8
HEADER = 4096
PATIENCE_S = 0.2
"""Time after which a failed attempt to join counts as a refusal."""
REFUSAL_LIMIT_S = 60.0
"""Time after which a namespace that is still being opened counts as refused."""
NOT_OPEN = f"it is not open after {REFUSAL_LIMIT_S:g} s"
OPTIONS = PathOptions(64 << 20, segment_bytes=PER_SEGMENT * BLOCK)


def engine_on(
    roots: Path | Sequence[Path], *, is_thread: bool = True, namespace: NamespaceKey | None = None
) -> PathEngine:
    """An engine that has joined a path."""
    given = [roots] if isinstance(roots, Path) else list(roots)
    for root in given:
        root.mkdir(parents=True, exist_ok=True)
    spec = None if namespace is None else spec_of(namespace, BLOCK)
    return PathEngine(
        given, OPTIONS, is_thread=is_thread, name="the engine", capacity=64, spec=spec
    ).open()


@contextmanager
def running_engine(root: Path, blocks: int = 0) -> Iterator[PathEngine]:
    """An engine with a process of its own and some blocks; it closes even if it was stopped."""
    engine = engine_on(root, is_thread=False)
    try:
        engine.store(range(blocks))
        yield engine
    finally:
        engine.signal(signal.SIGCONT)
        engine.close()


def try_engine_on(root: Path) -> PathEngine | str:
    """An engine that has joined a path; else the reason why the path refuses it."""
    engine = PathEngine([root], OPTIONS, is_thread=True, capacity=64, patience_s=PATIENCE_S)
    engine.keeper.start()
    end_s = monotonic() + REFUSAL_LIMIT_S
    engine.until(lambda: engine.tier.takes_puts or bool(engine.refusals) or monotonic() > end_s)
    if engine.tier.takes_puts:
        return engine
    engine.close()
    return engine.refusals[-1] if engine.refusals else NOT_OPEN


def fill_path(
    roots: Path | Sequence[Path], blocks: int = 20, namespace: NamespaceKey | None = None
) -> Path:
    """A closed cache with blocks `key(0)` to `key(blocks - 1)`; returns its first directory."""
    root = roots if isinstance(roots, Path) else roots[0]
    before = namespaces_in(root)
    engine = engine_on(roots, namespace=namespace)
    engine.store(range(blocks))
    engine.close()
    (made,) = namespaces_in(root) - before or before
    return made


def fill_two(root: Path, *fields: dict[str, object]) -> tuple[Path, Path]:
    """Two caches in one path, labelled "one" and "two"."""
    one, two = (
        NamespaceKey(label, each) for label, each in zip(("one", "two"), fields, strict=True)
    )
    return fill_path(root, namespace=one), fill_path(root, namespace=two)


def of_version_2(root: Path, label: str = "old") -> Path:
    """A namespace as an older version leaves it, of three files."""
    folder = root / NamespaceKey(label, {"old": label}).directory_name
    (folder / "index").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "index" / "data.mdb").write_bytes(bytes(8192))
    document = {
        "format": "kvcascade-namespace", "format_version": 2, "label": label,
        "fingerprint": NamespaceKey(label, {"old": label}).fingerprint, "fields": {"old": label},
        "block_bytes": BLOCK, "slots_per_segment": 8, "index_bytes": 1 << 20, "part": 0, "parts": 1,
    }  # fmt: skip
    (folder / "namespace.json").write_text(json.dumps(document))
    return folder


def namespaces_in(root: Path) -> set[Path]:
    """All namespaces of a path."""
    if not root.exists():
        return set()
    return {each for each in root.iterdir() if (each / "namespace.json").exists()}


def folder_in(root: Path) -> Path:
    """The only namespace of a path."""
    (found,) = namespaces_in(root)
    return found


def segment(folder: Path, number: int = 0) -> Path:
    """A segment file."""
    return folder / "segments" / f"{number:06d}.safetensors"


def slots_of(folder: Path, numbers: Sequence[int]) -> list[int]:
    """The slots of blocks."""
    with open_path(folder.parent) as path:
        found = {each.key: each.slot for each in path.blocks(folder.name)}
    return [found[key(number)] for number in numbers]


def note_use(
    folder: Path, numbers: Sequence[int], *, at_s: float, times: int = 0, is_write: bool = False
) -> None:
    """Set the time of the last use of blocks, how often they were used, and when written."""
    slots = slots_of(folder, numbers)
    names = [("use_last", "<u4", int(at_s)), ("use_times", "<u2", times)]
    for name, kind, value in [*names, *([("use_written", "<u4", int(at_s))] if is_write else [])]:
        np.memmap(folder / "state" / f"{name}.arr", kind, "r+", HEADER_BYTES)[slots] = value


def held_in(root: Path, numbers: Sequence[int]) -> list[int]:
    """The blocks that an engine reads, each of them right."""
    engine = engine_on(root)
    try:
        outcomes = engine.get(numbers)
        pairs = zip(numbers, outcomes, strict=True)
        return [number for number, outcome in pairs if outcome.value == "ok"]
    finally:
        engine.close()
