"""Two managers behind one interface, driven with the calls of vLLM's scheduler.

Only the calls are timed, not the construction of their arguments. The clock is the thread's CPU
time, so other load on the machine is not counted.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import thread_time
from typing import cast

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from .....assembly.build import Cascade
from .....manager.below.port import NoTierBelow
from .....manager.cascading import CascadingOffloadingManager
from .....manager.core import ManagerOptions
from .....manager.first_tier import Tier
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.policies import create
from .....vllm.v0_26 import CascadeManager
from ....commands.bench.bench_tier import new_keys

Key = OffloadKey
"""Type of keys, for modules that do not import vLLM."""

BLOCK_BYTES = 4096
REQUEST_BLOCKS = 64
"""Blocks of one request: 1,024 tokens in blocks of 16."""
TOKENS_PER_BLOCK = 16
SAMPLE_BLOCKS = 50_000
"""Maximum number of blocks that are looked up, loaded and touched."""
EVICTED_BLOCKS_MIN, EVICTED_BLOCKS_MAX = 32 << 10, 128 << 10

_names = count()


@dataclass(slots=True)
class _Managed:
    """Parts of a cascade that `CascadeManager` needs if no bytes are moved."""

    manager: CascadingOffloadingManager
    recorder: None = None
    chains: None = None


def over(manager: CascadingOffloadingManager) -> CascadeManager:
    """Return our adapter over a manager without an arena."""
    return CascadeManager(cast(Cascade, _Managed(manager)))


def our_lru(blocks: int) -> OffloadingManager:
    """Return our manager with a CPU tier and no lower tier."""
    tier = Tier("cpu", CpuBackend(BLOCK_BYTES, blocks), create("lru", blocks))
    options = ManagerOptions(with_events=False)
    return over(CascadingOffloadingManager(tier, NoTierBelow(), options))


def vllm_lru(blocks: int) -> OffloadingManager:
    """Return vLLM's own manager."""
    return CPUOffloadingManager(blocks)


def random_keys(n: int) -> list[OffloadKey]:
    """Return keys like vLLM's: 32 bytes of hash, 4 of the group."""
    return [OffloadKey(key) for key in new_keys(n)]


def copied(keys: Sequence[bytes]) -> list[OffloadKey]:
    """Return equal keys as new objects, since every request of vLLM creates its own."""
    return [OffloadKey(bytes(bytearray(key))) for key in keys]


def new_request(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> ReqContext:
    """Return a request for these keys, announced as the scheduler does."""
    context = ReqContext(f"bench-{next(_names)}")
    note = getattr(context, "set_offload_key_position", None)  # since 0.31
    if note is not None:
        for number, key in enumerate(keys, 1):
            note(key, number * TOKENS_PER_BLOCK)
    manager.on_new_request(context)
    return context


def end_step(manager: OffloadingManager) -> None:
    """Tell the manager that the scheduler has ended its step."""
    manager.on_schedule_end(ScheduleEndContext((), ()))


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, as in an engine after its start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Stopwatch:
    """Seconds and numbers of blocks by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.blocks: defaultdict[str, int] = defaultdict(int)
        self.longest_s = 0.0

    def time(self, name: str, blocks: int, call: Callable[[], object]) -> None:
        """Time one call about `blocks` blocks."""
        began = thread_time()
        call()
        took = thread_time() - began
        self.seconds[name] += took
        self.blocks[name] += blocks
        self.longest_s = max(self.longest_s, took)

    def per_block_us(self) -> dict[str, float]:
        """Return microseconds per block by name."""
        return {name: self.seconds[name] / self.blocks[name] * 1e6 for name in self.seconds}


@dataclass(frozen=True, slots=True)
class Keys:
    """Blocks of one measurement."""

    first: list[OffloadKey]
    """Blocks that fill the tier."""
    more: list[OffloadKey]
    """Blocks that are stored when the tier is full."""
    absent: list[OffloadKey]
    sample: list[list[OffloadKey]]
    """Requests for blocks that are present at the end, in an order of their own."""

    @classmethod
    def for_capacity(cls, blocks: int) -> Keys:
        """Return keys for a tier of `blocks` blocks."""
        evicting = min(blocks, max(EVICTED_BLOCKS_MIN, min(blocks // 4, EVICTED_BLOCKS_MAX)))
        evicting -= evicting % REQUEST_BLOCKS
        first, more = random_keys(blocks), random_keys(evicting)
        sampled = min(SAMPLE_BLOCKS, blocks)
        live = (first[evicting:] + more)[-sampled:]
        requests = list(requests_of(live))
        random.Random(0).shuffle(requests)
        return cls(first, more, random_keys(sampled), [copied(keys) for keys in requests])


def requests_of(keys: Sequence[OffloadKey]) -> Iterator[list[OffloadKey]]:
    """Split a list of keys into requests."""
    for start in range(0, len(keys), REQUEST_BLOCKS):
        yield list(keys[start : start + REQUEST_BLOCKS])


def drive(make: Callable[[int], OffloadingManager], blocks: int, keys: Keys) -> dict[str, float]:
    """Drive a new manager with every call for many blocks; return microseconds per block by
    name."""
    manager, watch = make(blocks), Stopwatch()
    with frozen():
        _store(manager, keys.first, watch, "store, free slots")
        filling_s, watch.longest_s = watch.longest_s, 0.0
        _store(manager, keys.more, watch, "store, evicting")
        evicting_s = watch.longest_s
        for request in keys.sample:
            _look_up(manager, request, LookupResult.HIT, watch, "lookup, hit")
        for request in requests_of(keys.absent):
            _look_up(manager, request, LookupResult.MISS, watch, "lookup, miss")
        for request in keys.sample:
            _load(manager, request, watch)
        for request in keys.sample:
            _touch(manager, request, watch)
    figures = watch.per_block_us()
    figures["touch and finish"] = figures["touch"] + figures.pop("_finish touched")
    figures["longest call of all stores"] = max(filling_s, evicting_s) * 1e3
    return figures


def _store(manager: OffloadingManager, keys: list[OffloadKey], watch: Stopwatch, row: str) -> None:
    for request in requests_of(keys):
        context = new_request(manager, request)
        watch.time(row, len(request), partial(_one_store, manager, request, context))
        watch.time("request finish", len(request), partial(manager.on_request_finished, context))
        watch.time("end of a step", 1, partial(end_step, manager))


def _one_store(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    assert output is not None and len(output.keys_to_store) == len(keys)
    manager.complete_store(set(output.keys_to_store), context)


def _look_up(
    manager: OffloadingManager,
    keys: list[OffloadKey],
    expected: LookupResult,
    watch: Stopwatch,
    row: str,
) -> None:
    context = new_request(manager, keys)
    answers: list[LookupResult] = []
    lookup = manager.lookup
    watch.time(row, len(keys), lambda: answers.extend([lookup(key, context) for key in keys]))
    assert all(answer is expected for answer in answers), "a lookup answered something else"
    manager.on_request_finished(context)
    end_step(manager)


def _load(manager: OffloadingManager, keys: list[OffloadKey], watch: Stopwatch) -> None:
    context = new_request(manager, keys)

    def load() -> None:
        manager.prepare_load(keys, context)
        manager.complete_load(set(keys), context)

    watch.time("load", len(keys), load)
    watch.time("request finish", len(keys), lambda: manager.on_request_finished(context))
    end_step(manager)


def _touch(manager: OffloadingManager, keys: list[OffloadKey], watch: Stopwatch) -> None:
    context = new_request(manager, keys)
    watch.time("touch", len(keys), lambda: manager.touch(keys, context))
    watch.time("_finish touched", len(keys), lambda: manager.on_request_finished(context))
    end_step(manager)
