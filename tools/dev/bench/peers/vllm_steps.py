"""The scheduler's loop around an engine: stores to disk, and requests that load.

A step does the same as vLLM's: it looks up every waiting request from its first block, loads
requests with all their blocks, and ends the step. Between two steps an idle engine sleeps for a
millisecond; `between` may replace the sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter, sleep

import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from ....commands.bench.bench_results import BenchError
from ..measurement import until
from ..transfer_bench import REQUEST_BYTES, WINDOW
from .vllm_calls import end_step, new_request
from .vllm_engines import Engine

IDLE_SLEEP_S = 0.001
"""Sleep of vLLM's engine core without work."""
LIMIT_S = 60.0
"""Longest time until an engine has answered for all blocks."""
PAGE_WORDS = 512
"""Words per page; every page of a block carries the block's number."""

Between = Callable[[], None]


def idle() -> None:
    """Sleep between two steps, like an engine without work."""
    sleep(IDLE_SLEEP_S)


@dataclass(slots=True)
class Asking:
    """A request that is waiting or loading: blocks of the device and their keys."""

    blocks: range
    keys: list[OffloadKey]
    context: ReqContext
    load: int | None = None
    """Number of the copy to the device; None before it has begun."""


def request_ranges(blocks: int, block_bytes: int) -> list[range]:
    """Split blocks into requests."""
    size = max(1, REQUEST_BYTES // block_bytes)
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]


def put(engine: Engine, keys: Sequence[OffloadKey], blocks: range) -> ReqContext:
    """Offer blocks and copy them to the CPU tier, without completing the store."""
    wanted = [keys[i] for i in blocks]
    context = new_request(engine.manager, wanted)
    output = engine.manager.prepare_store(wanted, context)
    if output is None or len(output.keys_to_store) != len(wanted):
        raise BenchError("the CPU tier did not take all blocks; is there enough memory?")
    engine.store(blocks, output.store_spec)
    return context


def write_down(engine: Engine, keys: Sequence[OffloadKey], between: Between) -> float:
    """Store all blocks; return the seconds from the CPU tier to the disk."""
    ranges = request_ranges(len(keys), engine.device.shape[1])
    target = engine.on_disk() + len(keys)
    contexts = [put(engine, keys, blocks) for blocks in ranges]
    began = perf_counter()
    for context, blocks in zip(contexts, ranges, strict=True):
        engine.manager.complete_store({keys[i] for i in blocks}, context)
        engine.manager.on_request_finished(context)
    end_step(engine.manager)
    settle(engine, target, between)
    return perf_counter() - began


def settle(engine: Engine, blocks: int, between: Between = idle) -> None:
    """Step until `blocks` blocks have reached the disk."""
    for _ in until(lambda: engine.on_disk() >= blocks, "writes to the disk"):
        between()
        end_step(engine.manager)


def read_up(engine: Engine, keys: Sequence[OffloadKey], between: Between) -> float:
    """Load all blocks to the device; return the seconds since the first lookup."""
    waiting = request_ranges(len(keys), engine.device.shape[1])[::-1]
    active: list[Asking] = []
    began = perf_counter()
    for _ in until(lambda: not (waiting or active), "reads from the disk"):
        while waiting and len(active) < WINDOW:
            active.append(_begin(engine, keys, waiting.pop()))
        for asking in active:
            _ask(engine, asking)
        ended = set(engine.loaded())
        for asking in [a for a in active if a.load in ended]:
            engine.manager.complete_load(set(asking.keys), asking.context)
            engine.manager.on_request_finished(asking.context)
            active.remove(asking)
        end_step(engine.manager)
        if not ended:
            between()
    return perf_counter() - began


def _begin(engine: Engine, keys: Sequence[OffloadKey], blocks: range) -> Asking:
    wanted = [keys[i] for i in blocks]
    return Asking(blocks, wanted, new_request(engine.manager, wanted))


def _ask(engine: Engine, asking: Asking) -> None:
    """Look up a request's blocks up to the first miss, as vLLM does; start to load if all are
    hits."""
    if asking.load is not None:
        return
    lookup, context = engine.manager.lookup, asking.context
    answers: set[LookupResult] = set()
    for key in asking.keys:
        answers.add(lookup(key, context))
        if LookupResult.MISS in answers:
            break
    if answers == {LookupResult.MISS}:
        raise BenchError("a block that was stored is not there any more")
    if answers == {LookupResult.HIT}:
        spec = engine.manager.prepare_load(asking.keys, context)
        asking.load = engine.load(asking.blocks, spec)


class EngineCache:
    """Cache of an engine that is driven by the calls of vLLM's scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store all blocks of the device, and wait until they are on disk."""
        write_down(self._engine, keys, idle)

    def offer(self, keys: Sequence[OffloadKey]) -> None:
        """Offer all blocks once more, and wait until those that it takes are on disk."""
        engine, manager = self._engine, self._engine.manager
        context = new_request(manager, list(keys))
        output = manager.prepare_store(list(keys), context)
        if output is not None and output.keys_to_store:
            wanted = list(output.keys_to_store)
            number = {key: n for n, key in enumerate(keys)}
            engine.store([number[key] for key in wanted], output.store_spec)
            manager.complete_store(set(wanted), context)
        manager.on_request_finished(context)
        deadline_s = monotonic() + LIMIT_S
        while manager.has_pending_work() and monotonic() < deadline_s:
            end_step(manager)
            idle()

    def ask(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Ask for each block by itself; return the numbers of those loaded to the device."""
        engine, manager = self._engine, self._engine.manager
        waiting = {n: new_request(manager, [key]) for n, key in enumerate(keys)}
        loading: dict[int, int] = {}
        came: list[int] = []
        for _ in until(lambda: not (waiting or loading), "answers for all blocks", LIMIT_S):
            for number, context in list(waiting.items()):
                answer = manager.lookup(keys[number], context)
                if answer is LookupResult.MISS:
                    manager.on_request_finished(waiting.pop(number))
                elif answer is LookupResult.HIT and number not in loading.values():
                    source = manager.prepare_load([keys[number]], context)
                    loading[engine.load([number], source)] = number
            for load in engine.loaded():
                number = loading.pop(load)
                context = waiting.pop(number)
                manager.complete_load({keys[number]}, context)
                manager.on_request_finished(context)
                came.append(number)
            end_step(manager)
            idle()
        return came

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.close()


def fill_pattern(device: torch.Tensor, seed: int) -> None:
    """Fill with random bytes, and the block's number in every page."""
    words = device.view(torch.int64)
    generator = torch.Generator().manual_seed(seed)
    words[:] = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator)
    words[:, ::PAGE_WORDS] = torch.arange(words.shape[0]).unsqueeze(1)


def check_pattern(device: torch.Tensor, seed: int) -> None:
    """Raise unless every byte is as `fill_pattern` wrote it."""
    words = device.view(torch.int64)
    expected = torch.empty_like(words[:1])
    fill_pattern(expected.view(torch.int8), seed)
    for number in range(len(words)):
        expected[0, ::PAGE_WORDS] = number
        if not torch.equal(words[number], expected[0]):
            raise BenchError(f"block {number} came back with other bytes than it left with")
