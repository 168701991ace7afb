"""`kvcascade remote ls`: namespaces and generations of a remote tier, by a list of its objects."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from ....tiers.remote.base import RemoteEntry
from ....tiers.remote.objects import parts_of
from ..progress import Advance
from .examine_object import parse_name
from .open_remote import RemoteServer


class GenerationState(StrEnum):
    """Whether engines find the blocks of a generation."""

    CURRENT = "current"
    OLD = "old"
    """There was a reset since; no engine finds these blocks."""
    UNKNOWN = "unknown"
    """The server has lost the counter of generations, and the next engine begins a new one."""


@dataclass(slots=True)
class GenerationReport:
    """Blocks of one generation of a namespace."""

    namespace: str
    generation: int
    state: GenerationState
    was_reset: bool = False
    """True for the blocks of engines that were reset since their start."""
    blocks: int = 0
    size_bytes: int = 0
    """Bytes of headers and payloads."""
    oldest_age_s: float | None = None
    """Seconds since the last write, or the last use on a Valkey or Redis server; None: unknown."""
    newest_age_s: float | None = None

    def add(self, entry: RemoteEntry, now_s: float) -> None:
        """Count a block."""
        self.blocks += 1
        self.size_bytes += entry.size_bytes
        if entry.touched_s is None:
            return
        age_s = max(0.0, now_s - entry.touched_s)
        self.oldest_age_s = max(age_s, self.oldest_age_s or 0.0)
        self.newest_age_s = min(
            age_s, self.newest_age_s if self.newest_age_s is not None else age_s
        )


@dataclass(slots=True)
class RemoteContents:
    """Objects of a remote tier."""

    url: str
    generations: list[GenerationReport] = field(default_factory=list)
    other_objects: int = 0
    """Objects that are not blocks, such as those that hold the generations in a bucket."""


class Generations:
    """Current generations of each namespace, asked for once. One thread."""

    def __init__(self, tier: RemoteServer) -> None:
        self._tier = tier
        self._current: dict[str, int | None] = {}

    def state(self, namespace: str, generation: int) -> GenerationState:
        """Return the state of a generation. Raises `CommandError`."""
        if namespace not in self._current:
            self._current[namespace] = self._tier.counter(namespace)
        current = self._current[namespace]
        if current is None:
            return GenerationState.UNKNOWN
        # Counters only grow, so that what is old stays old.
        counter, _ = parts_of(generation)
        return GenerationState.OLD if counter < current else GenerationState.CURRENT


def contents_of(tier: RemoteServer, namespace: str, advance: Advance) -> RemoteContents:
    """List all objects of namespaces that begin with these digits. Raises `CommandError`."""
    generations, now_s = Generations(tier), time.time()
    found: dict[tuple[str, int], GenerationReport] = {}
    contents = RemoteContents(tier.options.url)
    for entry in tier.entries(namespace):
        advance(1)
        name = parse_name(entry.name)
        if name is None:
            contents.other_objects += 1
            continue
        place = name.namespace, name.generation
        if place not in found:
            _, was_reset = parts_of(name.generation)
            found[place] = GenerationReport(*place, generations.state(*place), was_reset)
        found[place].add(entry, now_s)
    contents.generations = [found[place] for place in sorted(found)]
    return contents
