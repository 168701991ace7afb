"""Caches of a path with one writer, for the command line's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcascade.tiers.nvme.path.path_messages import PathOptions

from .path_engine import PathEngine

BLOCK, PER_SEGMENT = 4096, 8
HEADER = 4096
OPTIONS = PathOptions(64 << 20, segment_bytes=PER_SEGMENT * BLOCK)


def engine_on(roots: Path | Sequence[Path], *, is_thread: bool = True) -> PathEngine:
    """An engine that has joined a path."""
    given = [roots] if isinstance(roots, Path) else list(roots)
    for root in given:
        root.mkdir(parents=True, exist_ok=True)
    return PathEngine(given, OPTIONS, is_thread=is_thread, name="the engine", capacity=64).open()


def fill_path(roots: Path | Sequence[Path], blocks: int = 20) -> Path:
    """A closed cache with blocks `key(0)` to `key(blocks - 1)`; returns its first directory."""
    engine = engine_on(roots)
    engine.put(range(blocks))
    engine.close()
    return folder_in(roots if isinstance(roots, Path) else roots[0])


def folder_in(root: Path) -> Path:
    """The only namespace of a path."""
    (found,) = (each for each in root.iterdir() if (each / "namespace.json").exists())
    return found


def held_in(root: Path, numbers: Sequence[int]) -> list[int]:
    """The blocks that an engine reads, each of them right."""
    engine = engine_on(root)
    try:
        outcomes = engine.get(numbers)
        pairs = zip(numbers, outcomes, strict=True)
        return [number for number, outcome in pairs if outcome.value == "ok"]
    finally:
        engine.close()
