"""Lookups of blocks on disk, with the calls of vLLM's scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .....manager.lookup import MAX_LOOKS_PER_STEP
from ....commands.bench.bench_results import BenchError
from ..measurement import Figures
from ..peers.vllm_calls import (
    BLOCK_BYTES,
    copied,
    end_step,
    frozen,
    new_request,
    random_keys,
    requests_of,
    vllm_lru,
)
from ..peers.vllm_engines import offloading_config
from .nvme_lookups import AGAIN, AGAIN_AS_HIT, COLD_HIT, COLD_MISS, HIT, MISS, STEPS

PROBE_WAIT_S = 0.05
ROUNDS_MAX = 100
SPARE_CHUNKS = 64


Request = tuple[ReqContext, list[OffloadKey]]


def ask_ours(
    manager: OffloadingManager,
    keys: Sequence[OffloadKey],
    warm_up: Callable[[], object],
    promotions: list[int],
) -> Figures:
    """Look up present and absent blocks, before and after `warm_up`; return the rows.

    `promotions` are the jobs that have begun. If a request waits, its first block gives RETRY; the
    scheduler stops there, and the other blocks are misses for now.
    """
    pending, missing, half = {LookupResult.HIT_PENDING}, {LookupResult.MISS}, len(keys) // 2
    with frozen():
        cold_us = ask(manager, announced(manager, keys[:half]), pending)
        end_step(manager)
        steps = 0
        while not promotions and steps < ROUNDS_MAX:
            end_step(manager)
            steps += 1
        cold_miss_us = ask(manager, announced(manager, random_keys(half)), missing)
        end_step(manager)
        warm_up()
        more = announced(manager, keys[half:])
        warm_us = ask(manager, more, pending)
        end_step(manager)
        miss_us = ask(manager, announced(manager, random_keys(half)), missing)
        again_us = ask(manager, more, {LookupResult.RETRY, LookupResult.MISS})
    return {
        COLD_HIT: cold_us,
        COLD_MISS: cold_miss_us,
        HIT: warm_us,
        MISS: miss_us,
        AGAIN: again_us,
        AGAIN_AS_HIT: again_us,
        STEPS: steps,
    }


def announced(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> list[Request]:
    """Return announced requests over these keys."""
    return [(new_request(manager, part), part) for part in requests_of(keys)]


def ask(
    manager: OffloadingManager, requests: Sequence[Request], expected: set[LookupResult]
) -> float:
    """Look up every block once; return microseconds per block."""
    took_us, answers = ask_any(manager, requests)
    if not answers <= expected:
        raise BenchError(f"lookups answered {answers}, not {expected}")
    return took_us


def ask_any(
    manager: OffloadingManager, requests: Sequence[Request]
) -> tuple[float, set[LookupResult]]:
    """Look up like `ask`, and accept and return any results.

    The step ends, outside the measured time, before it would reach its limit of lookups.
    """
    lookup: Callable[[OffloadKey, ReqContext], LookupResult] = manager.lookup
    asked, took, in_step = 0, 0.0, 0
    seen: set[LookupResult] = set()
    for context, keys in requests:
        in_step += len(keys)
        if in_step > MAX_LOOKS_PER_STEP:
            end_step(manager)
            in_step = len(keys)
        began = perf_counter()
        answers = [lookup(key, context) for key in keys]
        took += perf_counter() - began
        asked += len(keys)
        seen.update(answers)
    return took / asked * 1e6, seen


def plain_hit(blocks: int) -> float:
    """Return the cost of a lookup of a block in vLLM's CPU tier."""
    manager, keys = vllm_lru(blocks), random_keys(blocks)
    for context, part in announced(manager, keys):
        manager.prepare_store(part, context)
        manager.complete_store(set(part), context)
    with frozen():
        return ask(manager, announced(manager, copied(keys)), {LookupResult.HIT})


def ask_vllm(folder: Path, blocks: int) -> tuple[float, float, float, float]:
    """Measure vLLM's tiering: hit, miss, repeated lookup (µs per block), steps before a promotion
    begins."""
    extra = {
        "cpu_bytes_to_use": (blocks + SPARE_CHUNKS) * BLOCK_BYTES,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    manager = TieringOffloadingSpec(offloading_config(BLOCK_BYTES, extra)).get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        keys = random_keys(blocks)
        (tier,) = manager.secondary_tiers
        assert isinstance(tier, FileSystemTierManager)
        for key in keys:
            path = Path(tier.file_mapper.get_file_name(key))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        with frozen():
            absent = announced(manager, random_keys(blocks))
            miss_us, _ = ask_until(manager, absent, LookupResult.MISS)
            requests = announced(manager, copied(keys))
            hit_us, steps = ask_until(manager, requests, LookupResult.HIT_PENDING)
            again_us = ask(manager, requests, {LookupResult.HIT_PENDING})
    finally:
        manager.shutdown()  # before the next step: the files are empty and must not be read
    return hit_us, miss_us, again_us, float(steps)


def ask_until(
    manager: OffloadingManager, requests: Sequence[Request], answer: LookupResult
) -> tuple[float, int]:
    """Look up in repeated steps until all blocks give this result; return microseconds per block,
    and steps."""
    total_us = 0.0
    for steps in range(ROUNDS_MAX):
        took_us, answers = ask_any(manager, requests)
        total_us += took_us
        if answers == {answer}:
            return total_us, steps
        end_step(manager)
        time.sleep(PROBE_WAIT_S)
    raise BenchError("vLLM's fs tier does not answer")
