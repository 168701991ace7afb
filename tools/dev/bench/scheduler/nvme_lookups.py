"""Cost of a lookup of a block on NVMe, for the scheduler's thread."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ....commands.bench.bench_results import OURS, VLLM, Goal, Quantity
from ....commands.bench.raw_disk import drop_page_cache
from ..measurement import Case, Figures, Measurement, MeasurementSetup
from .filled import filled, key_of, open_stalled

COLD_HIT, COLD_MISS = "hit, page cache dropped", "miss, page cache dropped"
HIT, MISS = "hit, index in page cache", "miss, index in page cache"
AGAIN, AGAIN_AS_HIT = "asked again while pending", "  beside vLLM's plain hit"
STEPS = "steps before it is on its way"
CPU_FACTOR = 5
"""Slots of the CPU tier per block of a lookup, so that every block gets room."""
VLLM_FILES = 4096
"""Blocks in vLLM's `fs` tier: one file and two folders each."""


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case per size of the index."""
    for blocks in setup.scale.index_blocks:
        folder = filled(setup, blocks)
        yield Case(
            f"{blocks:,} blocks",
            {
                OURS: partial(ours, folder, blocks, setup),
                VLLM: partial(vllm, setup),
            },
        )


def ours(folder: Path, blocks: int, setup: MeasurementSetup) -> Figures:
    """Reopen, and look up blocks that are present, absent, and being promoted."""
    from ..peers.vllm_calls import copied, over
    from .vllm_lookups import ask_ours

    asked = min(setup.scale.questions, blocks // 2)
    numbers = random.sample(range(blocks), 2 * asked)
    keys = copied([key_of(number) for number in numbers])
    drop_page_cache([folder])
    opened = open_stalled(folder, blocks, CPU_FACTOR * 2 * asked)
    warm_up = opened.presence.read_bytes  # into the page cache
    return ask_ours(over(opened.manager), keys, warm_up, opened.node.jobs)


def vllm(setup: MeasurementSetup) -> Figures:
    """Make the same lookups in vLLM's tiering with its `fs` tier."""
    from .vllm_lookups import ask_vllm, plain_hit

    with TemporaryDirectory(dir=setup.folder) as folder:
        hit, miss, again, steps = ask_vllm(Path(folder), min(VLLM_FILES, setup.scale.questions))
    plain = plain_hit(setup.scale.questions)
    return {HIT: hit, MISS: miss, AGAIN: again, AGAIN_AS_HIT: plain, STEPS: steps}


MEASUREMENT = Measurement(
    "lookups",
    "NVMe lookups: one block on the scheduler's thread, right after reopening",
    "Ours: an index filled in the order of arrival with random hashes, reopened with a dropped "
    "page cache (as after a reboot), then with the presence table read once; a hit includes "
    "queueing the promotion. vLLM's: its fs tier over 4,096 files; all calls until the answer is "
    "there (it has to be asked twice), a hit includes reserving the slot. The last row says how "
    "many more steps of the engine pass before the block is being read.",
    (
        Quantity(COLD_HIT, "µs/block"),
        Quantity(COLD_MISS, "µs/block"),
        Quantity(HIT, "µs/block"),
        Quantity(MISS, "µs/block"),
        Quantity(AGAIN, "µs/block"),
        Quantity(AGAIN_AS_HIT, "µs/block", (Goal(1.0, VLLM),)),
        Quantity(STEPS, "steps", (Goal(0.0),)),
    ),
    cases,
)
