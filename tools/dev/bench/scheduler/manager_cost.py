"""Cost of one block in the CPU tier, for the scheduler's thread."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from ....commands.bench.bench_results import OURS, VLLM, Goal, Quantity, Row
from ..measurement import Case, Measurement, MeasurementSetup

HALF = (Goal(0.5, VLLM),)
FLAT = Goal(1.3)
PER_BLOCK = (
    "lookup, miss",
    "lookup, hit",
    "store, free slots",
    "store, evicting",
    "load",
    "touch",
    "request finish",
)
"""Quantities that are compared with vLLM's, and with those of a larger tier."""


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case per capacity."""
    from ..peers.vllm_calls import Keys, drive, our_lru, vllm_lru

    for blocks in setup.scale.manager_blocks:
        keys = Keys.for_capacity(blocks)
        yield Case(
            label_of(blocks),
            {
                OURS: partial(drive, our_lru, blocks, keys),
                VLLM: partial(drive, vllm_lru, blocks, keys),
            },
        )


def label_of(blocks: int) -> str:
    """Return a capacity as text."""
    return f"{blocks:,} blocks"


def flatness(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the cost in the largest tier relative to the smallest."""
    cases = list(dict.fromkeys(row.case for row in rows))
    if len(cases) < 2:
        return []
    found: list[Row] = []
    for name in PER_BLOCK:
        small, large = (
            next(r for r in rows if (r.case, r.quantity.name) == (case, name))
            for case in (cases[0], cases[-1])
        )
        samples = {
            contender: [_ratio(large, small, contender)]
            for contender in (OURS, VLLM)
            if small.median(contender)
        }
        label = f"{cases[-1]} / {cases[0]}"
        found.append(Row(label, Quantity(name, "×", (FLAT,)), samples))
    return found


def _ratio(large: Row, small: Row, contender: str) -> float:
    above, below = large.median(contender), small.median(contender)
    assert above is not None and below
    return above / below


MEASUREMENT = Measurement(
    "manager",
    "Manager: one block on the scheduler's thread, CPU tier",
    "CascadeManager and vLLM's CPUOffloadingManager (LRU) through the same calls, requests of 64 "
    "blocks, keys of 36 bytes; prepare and complete together. Ours takes note of a touch and "
    "applies it when the request ends, so the row with both is the whole cost.",
    (
        *(Quantity(name, "µs/block", HALF) for name in PER_BLOCK),
        Quantity("touch and finish", "µs/block"),
        Quantity("end of a step", "µs/step"),
        Quantity("longest call of all stores", "ms"),
    ),
    cases,
    flatness,
)
