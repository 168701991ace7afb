"""The spec without an engine: what is stored comes back byte for byte, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.clock import ManualClock
from support.inside import first_tier
from support.kv_bytes import Shape, damage, tiers
from support.open_tiers import nodes_of
from support.spec_driver import Driver
from support.waiting import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)

from kvcascade.tools.replay.traces import read_trace
from kvcascade.vllm import v0_26
from kvcascade.vllm.offload_metrics import STATS_AT_END_S, STATS_INTERVAL_S

SHAPES = {
    "one_block_chunks": Shape(),
    "two_workers": Shape(world=2),
    "chunks_of_2": Shape(pages=(512, 256, 768), groups=((0, 1, 2),), chunk=2),
    "chunks_of_4_two_workers": Shape(pages=(640, 128), groups=((0, 1),), chunk=4, world=2),
    "two_groups": Shape(pages=(1024, 512, 768), groups=((0, 1), (2,)), chunk=2),
    "overlay": Shape(pages=(2048, 2048), groups=((0, 1), (1, 0)), world=2),
}
LATE = pytest.mark.parametrize("is_late", [False, True], ids=["step_end_first", "step_end_last"])


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@LATE
def test_blocks_come_back_from_both_tiers(shape: Shape, is_late: bool, tmp_path: Path) -> None:
    with Driver(shape, tiers(shape, tmp_path, cpu=16, nvme=96), is_late) as driver:
        for turn in range(2):
            for text in range(6):
                chunks = 8 // len(shape.groups)
                assert driver.serve(f"text {text}", chunks) == turn * chunks
                driver.settle()
        assert driver.counters.loaded_blocks[1] > 0, "something came from NVMe"
        assert driver.counters.evicted_blocks[0] > 0
        assert driver.counters.dropped_dirty_blocks == 0
        assert driver.counters.links[0].promote_corrupt_blocks == 0


def test_first_and_last_blocks_need_not_be_aligned(shape: Shape, tmp_path: Path) -> None:
    with Driver(shape, tiers(shape, tmp_path, cpu=24, nvme=64)) as driver:
        writer = driver.request("text", 6)
        driver.store(writer)
        for skip in range(shape.chunk):
            for cut in range(shape.chunk):
                reader = driver.request("text", 6)
                assert driver.await_hits(reader, 1) == 5
                driver.load(reader, 5, start=1, skip=skip, cut=cut)
                reader = driver.request("text", 6)
                assert driver.await_hits(reader, 2, 3) == 1
                if skip + cut < shape.chunk:
                    driver.load(reader, 1, start=2, skip=skip, cut=cut)


@LATE
def test_a_restart_finds_everything(shape: Shape, is_late: bool, tmp_path: Path) -> None:
    options = tiers(shape, tmp_path, cpu=16, nvme=96)
    with Driver(shape, options, is_late) as driver:
        for text in range(4):
            driver.serve(f"text {text}", 6 // len(shape.groups))
    with Driver(shape, options, is_late) as driver:
        for text in range(4):
            assert driver.serve(f"text {text}", 6 // len(shape.groups)) == 6 // len(shape.groups)
        assert driver.counters.links[0].promoted_blocks > 0


def test_an_engine_that_is_left_open_is_written_when_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `LLM` in the process of its script. vLLM closes it when no pool takes work any more."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "_register_atexit", calls.append)
    options = tiers(Shape(), tmp_path, cpu=16, nvme=96)
    with Driver(Shape(), options) as driver:
        driver.serve("text", 6)
        for call in reversed(calls):
            call()
        with Driver(Shape(), options) as following:
            assert following.serve("text", 6) == 6


def test_damaged_blocks_are_misses_and_counted(shape: Shape, tmp_path: Path) -> None:
    options = tiers(shape, tmp_path, cpu=16, nvme=96)
    chunks = 6 // len(shape.groups)
    with Driver(shape, options) as driver:
        for text in range(4):
            driver.serve(f"text {text}", chunks)
    with Driver(shape, options) as driver:
        assert damage(tmp_path) > 0
        assert [driver.serve(f"text {text}", chunks) for text in range(4)] == [0] * 4
        assert driver.counters.links[0].promote_corrupt_blocks > 0
        hits: list[int] = []
        for _ in range(4):  # what was not read then is found out now
            hits = [driver.serve(f"text {text}", chunks) for text in range(4)]
        assert hits == [chunks] * 4, "all is whole again"
        name = "vllm:kvcascade_promote_corrupt_blocks['nvme']"
        driver.manager._metrics.due_s = 0.0
        driver.take_stats()
        assert driver.metrics[name] == driver.counters.links[0].promote_corrupt_blocks


@LATE
def test_reset_with_stores_and_loads_under_way(shape: Shape, is_late: bool, tmp_path: Path) -> None:
    chunks = 6 // len(shape.groups)
    with Driver(shape, tiers(shape, tmp_path, cpu=16, nvme=96), is_late) as driver:
        for text in range(4):
            driver.serve(f"text {text}", chunks)
            driver.settle()
        reader, writer = driver.request("text 3", chunks), driver.request("new", chunks)
        waiting = driver.request("text 0", chunks)
        assert driver.await_hits(reader) == chunks
        driver.begin_load(reader, chunks)
        assert driver.offer_until_taken(writer)
        driver.look_up(waiting)
        driver.reset()
        for text in range(4):  # before the workers have written the old slots
            assert driver.look_up(driver.request(f"text {text}", chunks)) == 0
        assert driver.look_up(writer) is None, "it was preempted, so it asks again in a later step"
        driver.offer(writer, 0, chunks)
        driver.step()  # the old store is written only now
        driver.settle()
        for _ in range(2):
            for text in range(6):
                driver.serve(f"later {text}", chunks)
        assert driver.await_hits(driver.request("text 3", chunks)) == 0
        driver.settle()
        top = first_tier(driver.cascade.manager)
        assert len(top.policy) + top.backend.get_num_free_blocks() == top.capacity, "none is lost"


def test_keep_on_reset(tmp_path: Path) -> None:
    shape = Shape()
    options = tiers(shape, tmp_path, cpu=16, nvme=96)
    with Driver(shape, options, on_reset="keep") as driver:
        driver.serve("text", 5)
        late = driver.request("late", 5)
        driver.offer(late, 0, 5)
        driver.reset()
        driver.step()
        assert driver.look_up(driver.request("text", 5)) == 5
        assert driver.look_up(driver.request("late", 5)) == 0


def test_no_promotion_into_slots_that_workers_still_write(tmp_path: Path) -> None:
    """The first step after a reset looks up, and promotes, before the workers write old slots."""
    shape = Shape()
    options = tiers(shape, tmp_path, cpu=8, nvme=64)
    with Driver(shape, options, on_reset="keep") as driver:
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        assert len(driver.offer_until_taken(driver.request("new", 8))) == 8, "all slots are taken"
        driver.reset()
        reader = driver.request("text 0", 4)
        driver.look_up(reader)
        driver.manager.on_schedule_end(ScheduleEndContext((), ()))
        driver.wait_for_transfers()
        driver.look_up(reader)
        driver.manager.on_schedule_end(ScheduleEndContext((), ()))
        driver.step()
        hits = driver.await_hits(reader)
        if hits:
            driver.load(reader, hits)
        for _ in range(10):  # by now the slots are in use again
            driver.step()
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        assert driver.serve("text 0", 4) == 4


@pytest.mark.parametrize("on_reset", ["keep", "invalidate"])
def test_a_load_that_a_reset_overtakes_still_reads_its_blocks(
    on_reset: str, tmp_path: Path
) -> None:
    """The engine resets only the cascade, and goes on with a load that its workers start later."""
    shape = Shape()
    options = tiers(shape, tmp_path, cpu=8, nvme=64)
    with Driver(shape, options, on_reset=on_reset, write_mode="through") as driver:
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        reader = driver.request("text 3", 4)
        plan = driver.plan_load(reader, driver.await_hits(reader))
        driver.step()
        driver.reset()
        for text in range(2):  # the next steps promote before the workers have read
            other = driver.request(f"text {text}", 4)
            driver.look_up(other)
            driver.manager.on_schedule_end(ScheduleEndContext((), ()))
            driver.wait_for_transfers()
            driver.cascade.manager.maintain()
            driver.finish(other)
        job = driver.send_load(plan)
        driver.finish_jobs([job])
        driver.settle()
        assert driver.serve("text 3", 4) == (4 if on_reset == "keep" else 0)


def test_preempted_request_is_stored_and_served_again(tmp_path: Path) -> None:
    shape = Shape(chunk=2)
    with Driver(shape, tiers(shape, tmp_path, cpu=16, nvme=64)) as driver:
        request = driver.request("text", 8)
        driver.offer(request, 0, 3)
        driver.step()
        driver.offer(request, 3, 5)
        driver.flush |= set(driver.jobs)  # preempted: its blocks are reused after this step
        driver.step()
        assert not driver.jobs, "flushed before the step ended"
        hits = driver.await_hits(request)
        assert hits == 5
        driver.load(request, hits)
        driver.store(request, hits)
        driver.finish(request)
        assert driver.await_hits(driver.request("text", 8)) == 8


def test_a_preempted_request_asks_again_one_step_later(tmp_path: Path) -> None:
    """vLLM fails if it loads in the step that schedules it again, as after a reset that failed."""
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=16, nvme=64)) as driver:
        request = driver.request("text", 4)
        assert driver.offer_until_taken(request)
        driver.settle()
        for _ in range(2):  # after a store, and after a load
            assert driver.look_up(request) is None
            driver.step()
            assert driver.look_up(request) == 4
            driver.load(request, 4)
            driver.step()


def test_hits_stay_until_they_are_loaded(tmp_path: Path) -> None:
    """Stores, promotions and other lookups of the same step evict nothing that was a hit."""
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=12, nvme=96)) as driver:
        for text in range(5):
            driver.serve(f"text {text}", 4)
            driver.settle()
        reader = driver.request("text 4", 4)
        other = driver.request("text 0", 4)
        assert driver.look_up(reader) == 4
        assert driver.look_up(other) is None
        driver.offer(driver.request("big", 12), 0, 12)
        job = driver.begin_load(reader, 4)
        driver.finish_jobs([job])
        driver.settle()


def test_load_filters(tmp_path: Path) -> None:
    shape = Shape()
    only = {m: TierFilter((TierMatcher(m),)) for m in (Medium.CPU, Medium.STORAGE)}
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        by_cpu = driver.request("text 0", 4, load_tier_filter=only[Medium.CPU])
        assert driver.await_hits(by_cpu) == 0, "it is on NVMe only"
        by_cpu = driver.request("text 3", 4, load_tier_filter=only[Medium.CPU])
        assert driver.await_hits(by_cpu) == 4
        by_disk = driver.request("text 0", 4, load_tier_filter=only[Medium.STORAGE])
        hits = driver.await_hits(by_disk)
        assert hits == 4
        driver.load(by_disk, hits)
        nothing = driver.request("text 0", 4, load_tier_filter=TierFilter(()))
        assert driver.await_hits(nothing) == 0


def test_load_source_tells_the_tier(tmp_path: Path) -> None:
    source = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        for name, want in [("text 3", source.HOST), ("text 0", source.DISK)]:
            reader = driver.request(name, 4)
            hits = driver.await_hits(reader)
            driver.load(reader, hits)
            found = {driver.manager.get_load_source(k, reader.context) for k in reader.keys[0]}
            assert found == {want}


def test_touch_of_a_running_request_is_recency(tmp_path: Path) -> None:
    """Up to 0.30 vLLM touches the blocks of running requests at every step."""
    shape = Shape()
    with Driver(shape, tiers(shape, None, cpu=8)) as driver:
        old, new = driver.request("old", 4), driver.request("new", 4)
        driver.store(old)
        driver.finish(old)
        driver.store(new)
        driver.finish(new)
        toucher = driver.request("old", 4)
        for _ in range(3):
            driver.manager.touch(toucher.span(0, 4), toucher.context)
            driver.step()
        driver.finish(toucher)
        driver.serve("more", 4)
        assert driver.await_hits(driver.request("old", 4)) == 4
        assert driver.await_hits(driver.request("new", 4)) == 0


def test_pending_work_ends(tmp_path: Path) -> None:
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        assert not driver.manager.has_pending_work()
        for text in range(4):
            driver.serve(f"text {text}", 4)
            driver.settle()
        assert not driver.manager.has_pending_work(), "dirty blocks alone need no steps"
        reader = driver.request("text 0", 4)
        assert driver.manager.lookup(reader.keys[0][0], reader.context) in (
            LookupResult.HIT_PENDING,
            LookupResult.RETRY,
        )
        driver.manager.on_schedule_end()
        assert driver.manager.has_pending_work(), "its read is on its way"
        driver.settle()
        assert not driver.manager.has_pending_work()
        driver.finish(reader)


def test_expedited_loads_and_unknown_ids(tmp_path: Path) -> None:
    shape = Shape()
    with Driver(shape, tiers(shape, None, cpu=8)) as driver:
        driver.serve("text", 4)
        reader = driver.request("text", 4)
        assert driver.look_up(reader) == 4
        job = driver.send_load(driver.plan_load(reader, 4), expedited=True)
        driver.workers[0].worker.wait({job.job_id, 12345})
        driver.collect()
        assert not driver.jobs
        driver.workers[0].worker.wait({job.job_id})


def test_a_request_that_never_ran(tmp_path: Path) -> None:
    shape = Shape()
    with Driver(shape, tiers(shape, None, cpu=8)) as driver:
        context = ReqContext("never")
        driver.manager.on_new_request(context)
        driver.manager.on_request_finished(context)
        driver.manager.on_request_finished(ReqContext("unseen"))
        assert not driver.manager.has_pending_work()


def test_a_store_between_two_steps_is_no_question(tmp_path: Path) -> None:
    """An engine that goes idle after it looks after its tiers all the same."""
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        request = driver.request("text", 4)
        assert driver.look_up(request) == 0
        driver.step()
        assert driver.manager.prepare_store(request.keys[0], request.context) is not None
        assert driver.cascade.manager.lookups.asking is None


@pytest.mark.parametrize("nvme", [None, 64])
def test_a_request_that_waits_for_the_device_misses_once(nvme: int | None, tmp_path: Path) -> None:
    shape = Shape()
    path = None if nvme is None else tmp_path
    with Driver(shape, tiers(shape, path, cpu=8, nvme=nvme or 0)) as driver:
        request = driver.request("text", 4)
        assert driver.look_up(request) == 0
        driver.step()
        once = driver.cascade.manager.counters.lookup_misses
        for _ in range(5):
            assert driver.look_up(request) == 0
            driver.step()
        assert driver.cascade.manager.counters.lookup_misses == once > 0


def test_ends_of_requests_do_not_have_metrics_read_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read walks every tier. An engine that goes idle has none left to say."""
    now = ManualClock()
    monkeypatch.setattr(v0_26, "time", SimpleNamespace(monotonic=now))
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        requests = [driver.request(f"text {number}", 1) for number in range(20)]
        driver.manager.get_stats()
        reads = 0
        for request in requests[:-1]:
            now.advance(STATS_AT_END_S / 4)
            driver.finish(request)
            reads += driver.manager.get_stats() is not None
        assert 3 <= reads <= 5
        driver.finish(requests[-1])
        assert driver.manager.get_stats() is not None
        now.advance(STATS_INTERVAL_S / 2)
        assert driver.manager.get_stats() is None, "nothing ended"


def test_served_tokens_are_those_of_the_prompt_with_several_groups() -> None:
    """A window of the second group is loaded, all of the first."""
    shape = Shape(groups=((0,), (1,)))
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{n}.{n}"], full) for n in range(2)]
    kv_cache_config = KVCacheConfig(64, [], groups)  # found on the stack, as in the connector
    with Driver(shape, tiers(shape, None, cpu=32)) as driver:
        assert kv_cache_config.num_blocks == 64
        driver.serve("text", 8)
        request = driver.request("text", 8)
        assert driver.look_up(request) == 8
        keys = [*request.keys[0], *request.keys[1][-2:]]
        driver.manager.prepare_load(keys, request.context)
        driver.manager.complete_load(set(keys), request.context)
        driver.finish(request)
        driver.take_stats()
        assert driver.metrics["vllm:kvcascade_loaded_blocks['cpu']"] == 8 + 2
        assert driver.metrics["vllm:kvcascade_served_tokens['cpu']"] == 8 * 16
        options = driver.cascade.manager.options
        assert (options.tokens_per_block, options.served_end) == (16, b"\0" * 4)


@pytest.mark.parametrize(("window", "n_lookups"), [(None, 64), (64, 5)])
def test_a_request_that_waits_is_looked_up_no_further_than_its_window(
    window: int | None, n_lookups: int
) -> None:
    """vLLM looks up each waiting request at every step. A search for a prefix ends at a miss."""
    about: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**about)
    spec = full if window is None else SlidingWindowSpec(**about, sliding_window=window)
    groups = [KVCacheGroupSpec(["layer.0.0", "layer.0.1"], spec)]
    kv_cache_config = KVCacheConfig(64, [], groups)  # found on the stack, as in the connector
    shape, n = Shape(), 0
    with Driver(shape, tiers(shape, None, cpu=8), on_reset="keep") as driver:
        assert kv_cache_config.num_blocks == 64
        driver.manager.reset_cache()  # requests are deferred in the step after it
        request = driver.request("text", 64)

        def lookup(*about: Any) -> Any:
            nonlocal n
            n += 1
            return driver.manager.lookup(*about)

        scheduler = cast(Any, SimpleNamespace(manager=SimpleNamespace(lookup=lookup)))
        search = OffloadingConnectorScheduler._sliding_window_lookup
        assert search(scheduler, request.keys[0], 4, request.context) is None
        assert n == n_lookups
        driver.manager.on_schedule_end()
        answers = [driver.manager.lookup(key, request.context) for key in request.keys[0][:2]]
        assert answers == [LookupResult.MISS] * 2


def test_a_prompt_whose_store_was_put_off_to_its_end_is_recorded_whole(tmp_path: Path) -> None:
    shape = Shape()
    with Driver(shape, tiers(shape, None, cpu=8), record=str(tmp_path)) as driver:
        busy, late = driver.request("busy", 8), driver.request("late", 6)
        assert driver.offer(busy, 0, 8)
        assert driver.look_up(late) == 0
        assert driver.offer(late, 0, 6) is None, "all slots are being written"
        driver.finish(late)
        driver.finish(busy)
        driver.settle()
        driver.serve("late", 6)
    recorded = sorted((list(each.ids) for each in read_trace(tmp_path).requests), key=len)
    assert [len(ids) for ids in recorded] == [6, 6, 8] and recorded[0] == recorded[1]


def reported_by_vllm() -> set[str]:
    """Metrics that vLLM's own CPU tier reports without a threshold for stores."""
    spec = pytest.importorskip("vllm.v1.kv_offload.cpu.spec").CPUOffloadingSpec
    return set(spec.build_metric_definitions({}))


def test_metrics_and_information_are_declared(tmp_path: Path) -> None:
    shape = Shape()
    with Driver(shape, tiers(shape, tmp_path, cpu=8, nvme=64)) as driver:
        for text in [*range(6), *range(6)]:
            driver.serve(f"text {text}", 4)
            driver.settle()
        feed = nodes_of(driver.cascade)[0].port.feed

        def has_figures() -> bool:
            driver.step()
            return feed.day_totals().written > 0

        wait_until(has_figures)  # they come once a second
        driver.manager._metrics.due_s = 0.0
        driver.take_stats()
        assert driver.metrics["vllm:kvcascade_stored_blocks"] == driver.counters.stored_blocks
        assert driver.metrics["vllm:kvcascade_loaded_blocks['nvme']"] > 0
        assert 0 < driver.metrics["vllm:kvcascade_tier_used_ratio['cpu']"] <= 1
        assert driver.metrics["vllm:kvcascade_promotion_seconds['nvme']"] > 0, "samples arrive"
        assert driver.metrics["vllm:kvcascade_day_written_bytes['nvme']"] > 0
        assert driver.metrics["vllm:kvcascade_promote_failed_blocks['nvme']"] == 0, "told as zero"
        assert driver.metrics.keys() >= reported_by_vllm(), "dashboards of vLLM's tier stay whole"
        assert driver.metrics["vllm:kvcascade_served_tokens['nvme']"] > 0
        (info,) = driver.manager.config_info()
        assert set(info) == {"kvcascade_tiers", "kvcascade_write_mode"}
        assert info["kvcascade_write_mode"] == "back", "by size"
