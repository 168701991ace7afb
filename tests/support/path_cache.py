"""Caches of a path with one writer, for the command line's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.nvme.path.path_messages import PathOptions

from .path_engine import PathEngine

BLOCK, PER_SEGMENT = 4096, 8
HEADER = 4096
REFUSAL_LIMIT_S = 2.0
"""Time after which a path that does not let an engine join counts as refused."""
OPTIONS = PathOptions(64 << 20, segment_bytes=PER_SEGMENT * BLOCK)


def engine_on(roots: Path | Sequence[Path], *, is_thread: bool = True) -> PathEngine:
    """An engine that has joined a path."""
    given = [roots] if isinstance(roots, Path) else list(roots)
    for root in given:
        root.mkdir(parents=True, exist_ok=True)
    return PathEngine(given, OPTIONS, is_thread=is_thread, name="the engine", capacity=64).open()


def try_engine_on(root: Path) -> PathEngine | None:
    """An engine that has joined a path; None if the path refuses it, or cannot be opened."""
    engine = PathEngine([root], OPTIONS, is_thread=True, capacity=64)
    engine.mover.start()
    ends_s = monotonic() + REFUSAL_LIMIT_S

    def is_known() -> bool:
        is_late = monotonic() > ends_s
        return engine.tier.takes_puts or engine.state is NodeState.OFF or is_late

    engine.until(is_known)
    if engine.tier.takes_puts:
        return engine
    engine.close()
    return None


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
