"""Effects that a user of the engine sees: time to the first token, and bytes written to the
disk."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from ....commands.bench.bench_results import NONE, OURS, VLLM, Goal, Quantity
from ...server import BLOCK_TOKENS, is_on_cpu
from ..measurement import Case, Measurement, MeasurementSetup
from ..scale import EngineScale

if TYPE_CHECKING:
    from .engine_runs import EngineRuns

NOT_SLOWER = (Goal(1.0, VLLM),)
NO_COST = (Goal(1.03, NONE),)
CACHED = Quantity("after a restart: cached tokens", "tokens", is_more_better=True)

UNLIKE = Quantity("tokens unlike those of the engine asked first", "", (Goal(0),))


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield three cases: prompts without repetition, repeated prefixes, half of the blocks used
    once."""
    scale = setup.scale.engine
    runs = make_runs(setup, scale)
    with runs.side_by_side((OURS, VLLM, NONE)) as engines:
        yield Case(
            f"prompts of {scale.prefix_blocks * BLOCK_TOKENS:,} tokens that never come again",
            engines,
            repeats=scale.fresh_rounds,
        )
    yield prefixes_case(runs, scale, setup.scale.engine_repeats)
    yield Case(
        "half of the blocks used once; ours with second_touch",
        {name: partial(runs.half_once, name) for name in (OURS, VLLM)},
        (
            Quantity("written to disk", "MiB", (Goal(0.5, VLLM),)),
            CACHED,
        ),
        repeats=1,
    )


def make_runs(setup: MeasurementSetup, scale: EngineScale) -> EngineRuns:
    """Return servers of every contender over a model of this scale, which is created."""
    from .engine_runs import EngineRuns, Servers, make_model

    servers = Servers(setup.folder, is_on_cpu(), setup.say)
    return EngineRuns(servers, make_model(setup.folder, scale), scale)


def prefixes_case(runs: EngineRuns, scale: EngineScale, repeats: int) -> Case:
    """Return the case with two passes over all prefixes, and a third one after a restart."""
    return Case(
        f"{scale.prefixes} prefixes of {scale.prefix_blocks * BLOCK_TOKENS:,} tokens",
        {name: partial(runs.prefixes, name) for name in (NONE, OURS, VLLM)},
        quantities(),
        repeats=repeats,
    )


def quantities() -> tuple[Quantity, ...]:
    """Return the rows."""
    found: list[Quantity] = []
    for name, goals in (
        ("no reuse", NO_COST),
        ("first pass", ()),
        ("second pass", ()),
        ("after a restart", NOT_SLOWER),
    ):
        found += [
            Quantity(f"{name}: TTFT p50", "ms", goals),
            Quantity(f"{name}: TTFT p95", "ms", goals),
            Quantity(f"{name}: total", "s", goals),
        ]
    found += [CACHED, UNLIKE]
    found.append(Quantity("written to disk", "MiB", (Goal(1.0, VLLM),)))
    return tuple(found)


MEASUREMENT = Measurement(
    "engine",
    "In the engine: time to the first token, bytes written",
    "vLLM with a small Llama of random weights in processes of its own, one request at a time, "
    "without offloading, with vLLM's TieringOffloadingSpec and its fs tier, and with ours. Device "
    "and CPU tier hold a part of what a pass uses. No reuse: prompts that never come again, a few "
    "at a time in turns, of engines that run side by side. After a restart: SIGTERM after 8 s of "
    "rest, with vLLM's default flags, and a new server. Starts and warm-up are not timed, their "
    "bytes count. A p95 here is the slowest "
    f"request: there are {EngineScale().fresh} in a round without reuse, and "
    f"{2 * EngineScale().prefixes} in a pass.",
    quantities(),
    cases,
)
