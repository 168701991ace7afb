"""Open the tiers below the first, whatever their types, and join them to one port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from time import monotonic
from typing import Any, Protocol

from ..config.schema import BelowOptions
from ..manager.admission import AdmissionFunction
from ..manager.below.chain import BelowChain, ChainedTier
from ..manager.below.port import Below, NoTierBelow
from ..tiers.cpu.slot_table import NO_EPOCH
from .node_parts import EngineFacts


class OpenBelow(Protocol):
    """An open tier below the first."""

    @property
    def port(self) -> Below:
        """The tier, as the manager sees it."""
        ...

    @property
    def admission(self) -> AdmissionFunction | None:
        """Rule for the blocks that it is offered; None admits all."""
        ...

    @property
    def epoch(self) -> int | None:
        """Number of resets by any engine; None while it is unknown."""
        ...

    def start_facts(self) -> dict[str, object]:
        """Return facts for the log line of the start."""
        ...

    def close(self) -> None:
        """End its process or threads; idempotent."""
        ...


class Opener(Protocol):
    """The function that the options of a tier type name as their `opener`."""

    def __call__(self, name: str, options: Any, engine: EngineFacts) -> OpenBelow:
        """Open a tier. Raises one of our errors if the options cannot be used."""
        ...


def open_below(
    tiers: Sequence[BelowOptions], engine: EngineFacts, opened: list[OpenBelow], undo: ExitStack
) -> None:
    """Open the tiers, nearest first, and append them to `opened`; `undo` closes them.

    Raises one of our errors.
    """
    all_of_type, number_of_type = Counter(tier.type for tier in tiers), Counter[str]()
    for options in tiers:
        kind = options.type
        name = kind if all_of_type[kind] == 1 else f"{kind}{number_of_type[kind]}"
        number_of_type[kind] += 1
        opener: Opener = resolve_name(options.opener)
        opened.append(opener(name, options, engine))
        undo.callback(opened[-1].close)


def port_of(tiers: Sequence[OpenBelow], slots: int) -> Below:
    """Return one port for open tiers, nearest first. `slots`: those of the first tier."""
    if not tiers:
        return NoTierBelow()
    if len(tiers) == 1:
        return tiers[0].port
    chained = [ChainedTier(tier.port, tier.admission) for tier in tiers]
    return BelowChain(chained, slots, monotonic)


def epoch_below(tiers: Sequence[OpenBelow]) -> int:
    """Return the number of resets of all tiers, by any engine; `NO_EPOCH` while one is unknown."""
    epochs = [tier.epoch for tier in tiers]
    known = [epoch for epoch in epochs if epoch is not None]
    return sum(known) if len(known) == len(epochs) else NO_EPOCH
