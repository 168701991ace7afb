"""Our NVMe tier as vLLM's tiering manager calls it: what it makes of the order of a request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.cache_rig import call
from support.cascade import key
from support.inside import coldest_in
from support.kv_bytes import Shape, offloading_config
from support.waiting import wait_until
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvcascade.errors import ConfigError
from kvcascade.handlers.node.path_wire import ResetJob
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_lock import try_lead
from kvcascade.vllm.generation import chunk_rows
from kvcascade.vllm_tier import KVCascadeTier

ROW_BYTES, ROWS = 4096, 32


class Rig:
    """The tiering manager's part."""

    def __init__(self, path: Path, shape: Shape | None = None, **given: str) -> None:
        """`given`: options of the tier."""
        self.path = path
        self.memory = np.zeros((ROWS, ROW_BYTES), np.uint8)
        spec = SimpleNamespace(
            config=offloading_config(shape or Shape(), {}, "engine", 0),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        )
        options = {"path": str(path), "capacity": "16MiB", "min_free": 0, "weights_id": "test"}
        self.tier = KVCascadeTier(spec, self.memory.data, "KVCascadeTier", **options, **given)
        self._jobs = 0

    def request(self, name: str, numbers: Sequence[int]) -> ReqContext:
        """A request whose blocks have these numbers, in this order."""
        context = ReqContext(name)
        for end, number in enumerate(numbers):
            if hasattr(context, "set_offload_key_position"):  # from 0.31 on
                context.set_offload_key_position(okey(number), (end + 1) * 16)
        self.tier.on_new_request(context)
        return context

    def store(self, context: ReqContext, numbers: Sequence[int]) -> None:
        """Store blocks as one job, in the order of a set."""
        hashes = sorted((okey(n) for n in numbers), reverse=True)
        self._end(self.tier.submit_store, context, hashes)

    def load(self, context: ReqContext, numbers: Sequence[int]) -> None:
        for number in numbers:
            assert self.tier.lookup(okey(number), context) is LookupResult.HIT
        self._end(self.tier.submit_load, context, [okey(n) for n in numbers])

    def finish(self, context: ReqContext, all_numbers: Sequence[int]) -> None:
        self.tier.touch([okey(n) for n in all_numbers], context)  # by versions up to 0.30
        self.tier.on_request_finished(context)
        self.tier.on_schedule_end(ScheduleEndContext((), ()))

    def coldest(self) -> list[BlockHash]:
        """The blocks in order of eviction; the last call of a test."""
        self.tier.shutdown()
        return [BlockHash(key) for key in coldest_in(self.path)]

    def _end(self, submit: object, context: ReqContext, keys: list[OffloadKey]) -> None:
        assert callable(submit)
        self._jobs += 1
        rows = np.arange(len(keys))
        job = SimpleNamespace(
            job_id=self._jobs, keys=keys, chunk_ids=rows, block_ids=rows, req_context=context
        )
        submit(job)
        results: list[JobResult] = []

        def has_ended() -> bool:
            results.extend(self.tier.get_finished_jobs())
            return bool(results)

        wait_until(has_ended)  # not `drain_jobs`: it is a reset
        assert [result.success for result in results] == [True]


def okey(number: int) -> OffloadKey:
    return OffloadKey(key(number))


def test_chunks_of_a_window_are_refused(tmp_path: Path) -> None:
    """A chunk with gaps would be written as it lies in the row."""
    about: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    window = SlidingWindowSpec(**about, sliding_window=32)
    groups = [KVCacheGroupSpec(["layer.0.0", "layer.0.1"], window)]
    kv_cache_config = KVCacheConfig(8, [], groups)  # found on the stack, as in the connector
    Rig(tmp_path).tier.shutdown()
    with pytest.raises(ConfigError, match="blocks_per_chunk: 2 does not work with this model"):
        Rig(tmp_path, Shape(chunk=2))
    assert kv_cache_config.num_blocks == 8


def test_versions_whose_base_class_keeps_the_view_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 0.28: how long a row is can be seen from the view."""

    def keep(self: SecondaryTierManager, _: object, view: memoryview, tier_type: str) -> None:
        self._primary_kv_view, self.tier_type = view, tier_type

    monkeypatch.setattr(SecondaryTierManager, "__init__", keep)
    rig = Rig(tmp_path)
    context = rig.request("a", [1])
    rig.store(context, [1])
    rig.load(context, [1])
    rig.tier.shutdown()


def test_two_tiers_share_a_path_and_tools_work_beside_them(tmp_path: Path) -> None:
    one, two = Rig(tmp_path), Rig(tmp_path)
    one.memory[:] = 7
    one.store(one.request("a", [1, 2]), [1, 2])
    context = two.request("b", [1, 2])
    is_there = partial(two.tier.lookup, okey(2), context)
    wait_until(lambda: is_there() is LookupResult.HIT)
    two.load(context, [1, 2])
    assert (two.memory[:2] == 7).all()
    found = call("inspect", tmp_path, "--json").one
    assert (found["state"], found["blocks"], len(found["engines"])) == ("live", 2, 2)
    assert call("verify", tmp_path, "--json").one["ok"] == 2
    for rig in (one, two):
        rig.tier.shutdown()


def test_a_tier_that_is_left_open_closes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "_register_atexit", calls.append)
    rig = Rig(tmp_path)
    rig.store(rig.request("a", [1]), [1])
    for call_back in reversed(calls):
        call_back()
    lock = try_lead(RealFileSystem(), tmp_path)
    assert lock is not None, "its writer has closed"
    lock.release()
    rig.tier.shutdown()  # as vLLM does afterwards


@pytest.fixture(params=["lru", "prefix"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, policy=request.param)
    yield rig
    rig.tier.shutdown()


def test_tails_leave_before_heads(rig: Rig) -> None:
    """A store is a set; the order of the request is known when it ends."""
    prompt = [5, 3, 8, 1]
    context = rig.request("a", prompt)
    rig.store(context, prompt)
    rig.finish(context, prompt)
    assert rig.coldest() == [key(n) for n in reversed(prompt)]


def test_what_the_cpu_tier_served_is_used_here_too(rig: Rig) -> None:
    """Its copy below would be the coldest otherwise, and is all that is left when it leaves."""
    for name, prompt in (("a", [1, 2]), ("b", [11, 12]), ("c", [1, 2, 3])):
        context = rig.request(name, prompt)
        rig.store(context, [n for n in prompt if name != "c" or n == 3])
        rig.finish(context, prompt)
    assert set(rig.coldest()[:2]) == {key(11), key(12)}


def test_what_is_loaded_is_used_once(rig: Rig) -> None:
    prompt = [1, 2, 3]
    context = rig.request("a", prompt)
    rig.store(context, prompt)
    rig.finish(context, prompt)
    other = rig.request("b", [9])
    rig.store(other, [9])
    rig.finish(other, [9])
    context = rig.request("c", prompt)
    rig.load(context, prompt)
    rig.finish(context, prompt)
    coldest = rig.coldest()
    assert coldest[0] == key(9) and coldest[-1] == key(1)


def test_each_tier_of_an_engine_counts_what_a_request_used(tmp_path: Path) -> None:
    """A request has one context, which all tiers of its engine share."""
    rigs = [Rig(tmp_path / name) for name in ("one", "two")]
    for name, prompt in (("a", [1, 2]), ("b", [11, 12])):
        for rig in rigs:
            context = rig.request(name, prompt)
            rig.store(context, prompt)
            rig.finish(context, prompt)
    shared = rigs[0].request("c", [1, 2])
    for rig in rigs:
        assert all(rig.tier.lookup(okey(n), shared) is LookupResult.HIT for n in (1, 2))
    for rig in rigs:
        rig.tier.on_request_finished(shared)
    assert [set(rig.coldest()[:2]) for rig in rigs] == [{key(11), key(12)}] * 2


def test_an_idle_engine_hears_its_node(rig: Rig) -> None:
    """Otherwise the node keeps what it has to tell, and ends once that is too much."""
    heard: list[Any] = []
    with rig.tier._lock:
        rig.tier._jobs.below._client.submit(lambda ticket: ResetJob(ticket, 0, False), heard.append)
    wait_until(lambda: bool(heard))


def test_transfers_end_under_the_lock_at_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their transfers end meanwhile."""
    was_held: list[bool] = []

    def close(deadline_s: float) -> bool:
        was_held.append(rig.tier._lock.locked())
        return True

    with monkeypatch.context() as patch:
        patch.setattr(rig.tier._jobs, "close", close)
        patch.setattr(rig.tier._resources, "close", lambda: None)
        rig.tier.shutdown()
    assert was_held == [True]


STEPS_UNTIL_FLUSHED = 4
"""Steps after a reset in which workers may still write, without pipeline stages."""


def their_manager(rig: Rig) -> TieringOffloadingManager:
    region = SimpleNamespace(create_kv_memoryview=lambda: rig.memory.data, cleanup=lambda: None)
    primary = CPUPrimaryTierOffloadingManager(ROWS, cast(Any, region))
    return TieringOffloadingManager(primary, [rig.tier])


@pytest.mark.parametrize(
    ("on_reset", "found"), [("invalidate", LookupResult.MISS), ("keep", LookupResult.RETRY)]
)
def test_a_reset_of_their_manager_reaches_the_tier(
    tmp_path: Path, on_reset: str, found: LookupResult
) -> None:
    """It resets no tier but its own: after an update of the weights ours would serve the old."""
    rig = Rig(tmp_path, on_reset=on_reset)
    theirs = their_manager(rig)
    old = rig.request("old", [1])
    theirs.on_new_request(old)
    rig.memory[:] = 7
    theirs.prepare_store([okey(1)], old)
    theirs.complete_store({okey(1)}, old)
    theirs.on_request_finished(old)
    theirs.on_schedule_end(ScheduleEndContext((), ()))
    theirs.reset_cache()
    new = rig.request("new", [1])
    assert rig.tier.lookup(okey(1), new) is found
    rig.store(new, [1])
    for _ in range(STEPS_UNTIL_FLUSHED):
        assert rig.tier.lookup(okey(1), new) is LookupResult.RETRY
        theirs.on_schedule_end(ScheduleEndContext((), ()))
    rig.load(new, [1])
    rig.tier.shutdown()


def test_a_worker_that_still_writes_after_a_reset_damages_no_block(tmp_path: Path) -> None:
    """vLLM's primary tier takes the row for free, and the worker's copy is only queued."""
    rig = Rig(tmp_path, on_reset="keep")
    context = rig.request("first", [1])
    rig.memory[:] = 7
    rig.store(context, [1])
    rig.finish(context, [1])
    rig.memory[:] = 0
    theirs, end = their_manager(rig), ScheduleEndContext((), ())
    running = rig.request("running", [2])
    theirs.on_new_request(running)
    prepared = theirs.prepare_store([okey(2)], running)
    assert prepared is not None
    (row,) = chunk_rows(prepared.store_spec)
    theirs.on_schedule_end(end)
    theirs.reset_cache()
    new = rig.request("new", [1])
    theirs.on_new_request(new)
    assert theirs.lookup(okey(1), new) is not LookupResult.MISS
    theirs.on_schedule_end(end)
    wait_until(lambda: not rig.tier.has_pending_work() or rig.memory[row][0] == 7)
    rig.memory[row] = 99  # what the worker had queued for block 2; the disk was faster

    def is_there() -> bool:
        found = theirs.lookup(okey(1), new)
        theirs.on_schedule_end(end)
        return found is LookupResult.HIT

    wait_until(is_there)
    (row,) = chunk_rows(theirs.prepare_load([okey(1)], new))
    assert (rig.memory[row] == 7).all()
    rig.tier.shutdown()
