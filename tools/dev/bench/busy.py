"""Transfers beside a scheduler's thread that never idles, and their effect on its lookups."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING

from ...commands.bench.bench_results import (
    DOWN,
    OURS,
    UP,
    VLLM,
    Goal,
    Quantity,
    quantile,
    transfer_case,
)
from ...commands.bench.raw_disk import drop_page_cache
from .measurement import Case, Figures, Measurement, MeasurementSetup
from .transfer_bench import SEED, TransferBench

if TYPE_CHECKING:
    import torch

    from .peers.vllm_calls import Key
    from .peers.vllm_engines import Engine

KEPT = Goal(0.7, is_least=True)
CALM = Goal(1.5)
RESIDENT_BLOCKS = 250
"""Number of blocks that each burst looks up."""
SPIN = 20_000
"""Iterations of an empty Python loop between two bursts of lookups: about half a millisecond."""
QUIET, LOADED = "p99 of the lookup, no transfers", "p99 of the lookup, with transfers"
BUSY_DOWN, BUSY_UP = f"{DOWN}, busy", f"{UP}, busy"


class BusyScheduler:
    """Work of a busy scheduler between two steps: lookups of resident blocks, and a Python loop."""

    def __init__(self, engine: Engine, keys: list[Key], burst: int) -> None:
        """Prepare bursts of lookups; `keys` are pinned blocks of the CPU tier, `burst` is the
        number per burst."""
        from .peers.vllm_calls import copied, new_request

        self._lookup = engine.manager.lookup
        self._keys = list(islice(cycle(copied(keys)), burst))
        self._context = new_request(engine.manager, keys)
        self.bursts_s: list[float] = []

    def __call__(self) -> None:
        lookup, context = self._lookup, self._context
        began = perf_counter()
        for key in self._keys:
            lookup(key, context)
        self.bursts_s.append(perf_counter() - began)
        for _ in range(SPIN):
            pass

    def take(self) -> list[float]:
        """Return the seconds of every burst since the last call."""
        taken, self.bursts_s = self.bursts_s, []
        return taken


def run(
    bench: TransferBench, opened: Callable[[torch.Tensor], Engine], setup: MeasurementSetup
) -> Figures:
    """Measure one contender: idle and busy, in both directions."""
    from .peers.vllm_calls import random_keys
    from .peers.vllm_steps import check_pattern

    idle = bench.round_trip(opened)
    with bench.fresh():
        device = bench.device(RESIDENT_BLOCKS)
        keys = random_keys(bench.blocks)
        down_s, quiet, loaded = _half(bench, opened, device, keys, setup, is_down=True)
        drop_page_cache(bench.folders)
        device[: bench.blocks].zero_()
        up_s, more_quiet, more_loaded = _half(bench, opened, device, keys, setup, is_down=False)
        check_pattern(device[: bench.blocks], SEED)
    down, up = bench.rate(down_s), bench.rate(up_s)
    before = quantile(quiet + more_quiet, 0.99) * 1e3
    after = quantile(loaded + more_loaded, 0.99) * 1e3
    return {
        DOWN: idle[DOWN],
        BUSY_DOWN: down,
        "  of the idle rate, down": down / idle[DOWN],
        UP: idle[UP],
        BUSY_UP: up,
        "  of the idle rate, up": up / idle[UP],
        QUIET: before,
        LOADED: after,
        "  with / without": after / before,
    }


def _half(
    bench: TransferBench,
    opened: Callable[[torch.Tensor], Engine],
    device: torch.Tensor,
    keys: list[Key],
    setup: MeasurementSetup,
    is_down: bool,
) -> tuple[float, list[float], list[float]]:
    """Measure one direction; return its seconds, and those of the bursts before and during it."""
    from .peers.vllm_calls import end_step, frozen, random_keys
    from .peers.vllm_steps import put, read_up, settle, write_down

    scale = setup.scale
    with closing(opened(device)) as engine, frozen():
        resident = random_keys(RESIDENT_BLOCKS)
        numbered = range(bench.blocks, bench.blocks + len(resident))
        context = put(engine, [*keys, *resident], numbered)
        engine.manager.complete_store(set(resident), context)
        engine.manager.prepare_load(resident, context)  # pins them
        settle(engine, len(resident))
        busy = BusyScheduler(engine, resident, scale.burst_blocks)
        for _ in range(scale.quiet_bursts):
            busy()
            end_step(engine.manager)
        quiet = busy.take()
        move = write_down if is_down else read_up
        took_s = move(engine, keys, busy)
        loaded = busy.take()
        engine.manager.complete_load(set(resident), context)
        engine.manager.on_request_finished(context)
    return took_s, quiet, loaded


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the only case."""
    scale = setup.scale
    bench = TransferBench(setup, scale.busy_block_size, scale.busy_bytes, pinned=RESIDENT_BLOCKS)
    yield Case(
        transfer_case(scale.busy_block_size),
        {
            OURS: partial(run, bench, bench.ours, setup),
            VLLM: partial(run, bench, bench.vllm, setup),
        },
    )


MEASUREMENT = Measurement(
    "busy",
    "Busy scheduler: the same transfers while its thread never rests",
    "As transfers, but between two steps the scheduler's thread makes 1,000 lookups of 250 "
    "blocks of the CPU tier (one burst) and runs plain Python, without a pause.",
    (
        Quantity(DOWN, "GB/s", is_more_better=True),
        Quantity(BUSY_DOWN, "GB/s", is_more_better=True),
        Quantity("  of the idle rate, down", "×", (KEPT,), is_more_better=True),
        Quantity(UP, "GB/s", is_more_better=True),
        Quantity(BUSY_UP, "GB/s", is_more_better=True),
        Quantity("  of the idle rate, up", "×", (KEPT,), is_more_better=True),
        Quantity(QUIET, "ms"),
        Quantity(LOADED, "ms"),
        Quantity("  with / without", "×", (CALM,)),
    ),
    cases,
)
