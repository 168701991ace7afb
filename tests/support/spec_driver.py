"""The spec driven as vLLM's scheduler and workers drive it, without an engine.

One process plays everybody: the workers open first, the manager last, over a real arena and real
NVMe tiers. Every chunk has bytes of its own, made from its key, so every load can be compared. The
calls, their order and their arguments are vLLM's; what the model would compute is the pattern.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvcascade.spec import CascadeOffloadingSpec
from kvcascade.vllm.v0_26 import CascadeManager

from .inside import demoters
from .kv_bytes import Shape, offloading_config, page
from .spec_parts import Job, Load, Request, Worker

WAIT_S = 60.0
ROUNDS_MAX = 400
"""Longest run of steps that a driver waits for something to end."""
_engines = itertools.count()


class Driver:
    """An engine without a model. Context manager: leaving it is a clean shutdown."""

    def __init__(
        self, shape: Shape, tier_options: Sequence[Any], is_late: bool = False, **options: Any
    ) -> None:
        """`is_late`: `on_schedule_end` comes at the end of a step (0.33), not before the stores.

        Loading is never held against computing, which takes no time here, unless `options` say so.
        """
        self.shape = shape
        self.is_late = is_late
        given = {"load_or_recompute": False, **options}
        self.extra_config = {"tiers": list(tier_options), **given}
        engine_id = f"driver-{next(_engines)}-{id(self):x}"
        self.workers: list[Worker] = []
        try:
            for rank in range(shape.world):
                self.workers.append(Worker(shape, self.extra_config, engine_id, rank))
            config = offloading_config(shape, self.extra_config, engine_id, rank=0)
            manager = CascadeOffloadingSpec(config).get_manager()
        except BaseException:
            self._close_workers()
            raise
        assert isinstance(manager, CascadeManager)
        self.manager = manager
        self.cascade = manager._cascade
        self._job_ids = itertools.count()
        self._request_ids = itertools.count()
        self._free = list(range(1, shape.blocks))
        self.jobs: dict[int, Job] = {}
        self.queued: list[tuple[Job, GPULoadStoreSpec, LoadStoreSpec]] = []
        """Stores that the workers are given at the start of the next step."""
        self.flush: set[int] = set()
        self.seen: dict[str, set[OffloadKey]] = {}
        """Keys in each medium by the events; with several tiers below, in each tier."""
        self.told: set[tuple[Medium, Any, str | None]] = set()
        """Medium, locality and owner that the events so far name."""
        self.metrics: dict[str, float] = {}
        """Sum of every counter that was sent, by name and labels."""
        self.is_fresh = all(state.blocks == 0 for state in self.cascade.manager.tier_states()[1:])
        """False if NVMe tiers held blocks already: nobody was told of those."""
        self.declared = CascadeOffloadingSpec.build_metric_definitions(self.extra_config)
        self.loaded_chunks = 0

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Clean shutdown in vLLM's order: workers first."""
        self._close_workers()
        self.manager.shutdown()

    def _part(self, worker: Worker) -> int:
        """The rank whose bytes a worker holds."""
        return 0 if self.shape.is_replicated else worker.rank

    def _close_workers(self) -> None:
        for worker in self.workers:
            worker.worker.shutdown()

    # ---- requests ------------------------------------------------------------------------

    def request(self, text: str, chunks: int, **context: Any) -> Request:
        """A new request; those with the same `text` share their prefix."""
        name = f"{text}/{next(self._request_ids)}"
        made = ReqContext(name, **context)
        hashes = [hashlib.sha256(f"{text}:{i}".encode()).digest() for i in range(chunks)]
        keys = [[make_offload_key(h, g) for h in hashes] for g in range(len(self.shape.groups))]
        self.manager.on_new_request(made)
        return Request(made, keys)

    def finish(self, request: Request) -> None:
        """The request ended."""
        self.manager.on_request_finished(request.context)

    # ---- lookups and loads ---------------------------------------------------------------

    def look_up(self, request: Request, start: int = 0, end: int | None = None) -> int | None:
        """Chunks from `start` that can be loaded, over all groups; None: ask again."""
        hits = len(request.keys[0][start:end])
        is_deferred = False
        for keys in request.keys:
            count = 0
            for key in keys[start : start + hits]:
                result = self.manager.lookup(key, request.context)
                if result is LookupResult.MISS:
                    break
                is_deferred |= result is not LookupResult.HIT
                count += result is not LookupResult.RETRY
            hits = min(hits, count)
        return None if is_deferred else hits

    def await_hits(self, request: Request, start: int = 0, end: int | None = None) -> int:
        """Step until a lookup has an answer; it holds until the end of this step."""
        for _ in range(ROUNDS_MAX):
            hits = self.look_up(request, start, end)
            if hits is not None:
                return hits
            self.step()
            self.wait_for_transfers()
        raise AssertionError("a lookup never ended")

    def plan_load(
        self, request: Request, hits: int, start: int = 0, skip: int = 0, cut: int = 0
    ) -> Load:
        """The scheduler's part of a load of chunks `start .. start + hits - 1`, without their
        first `skip` and last `cut` device blocks, into device blocks that hold other bytes."""
        chunk = self.shape.chunk
        keys = request.span(start, start + hits)
        source = self.manager.prepare_load(keys, request.context)
        first, last = start * chunk + skip, (start + hits) * chunk - cut
        job = Job(next(self._job_ids), request, keys, False, set(), [])
        for group in range(len(self.shape.groups)):
            for at in range(first, last):
                block = self._take_block(job)
                job.pages.append((request.keys[group][at // chunk], at % chunk, group, block))
        groups = len(self.shape.groups)
        target = GPULoadStoreSpec(job.blocks, [last - first] * groups, [first] * groups)
        self._start(job)
        self.loaded_chunks += len(keys)
        return Load(job, source, target)

    def send_load(self, load: Load, expedited: bool = False) -> Job:
        """The workers' part of a load."""
        arguments: dict[str, Any] = {"expedited": True} if expedited else {}
        for worker in self.workers:
            assert worker.worker.submit_load(load.job.job_id, load.source, load.target, **arguments)
        return load.job

    def begin_load(self, request: Request, hits: int, **options: int) -> Job:
        """Start a load; options are those of `plan_load`."""
        return self.send_load(self.plan_load(request, hits, **options))

    def load(self, request: Request, hits: int, **options: int) -> None:
        """Load and compare every byte."""
        job = self.begin_load(request, hits, **options)
        self.finish_jobs([job])

    # ---- stores --------------------------------------------------------------------------

    def offer(self, request: Request, start: int, end: int) -> list[OffloadKey] | None:
        """Offer chunks; what the manager takes goes to the workers at the next step."""
        offered = request.span(start, end)
        output = self.manager.prepare_store(offered, request.context)
        if output is None:
            return None
        taken = set(output.keys_to_store)
        assert output.keys_to_store == [key for key in offered if key in taken], "order is kept"
        if not taken:
            return []
        job = Job(next(self._job_ids), request, output.keys_to_store, True, set(), [])
        sizes, indices = [], []
        for group, keys in enumerate(request.keys):
            chosen = [i for i in range(start, end) if keys[i] in taken]
            for i in chosen:
                for sub in range(self.shape.chunk):
                    self._compute(self._take_block(job), group, keys[i], sub)
            sizes.append(len(chosen) * self.shape.chunk)
            indices.append(chosen[0] * self.shape.chunk if chosen else 0)
        source = GPULoadStoreSpec(job.blocks, sizes, indices)
        self._start(job)
        self.queued.append((job, source, output.store_spec))
        return output.keys_to_store

    def offer_until_taken(self, request: Request, start: int = 0) -> list[OffloadKey]:
        """Offer the chunks from `start` on, step after step, while slots are busy."""
        for _ in range(ROUNDS_MAX):
            taken = self.offer(request, start, len(request.keys[0]))
            if taken is not None:
                return taken
            self.step()
            self.wait_for_transfers()
        raise AssertionError("a store was refused for ever")

    def store(self, request: Request, start: int = 0) -> None:
        """Offer the chunks from `start` on, and wait until what was taken is there."""
        self.offer_until_taken(request, start)
        self.step()
        self.finish_jobs([job for job in self.jobs.values() if job.is_store])

    def serve(self, text: str, chunks: int, **context: Any) -> int:
        """A whole request; returns how many chunks were loaded."""
        request = self.request(text, chunks, **context)
        hits = self.await_hits(request)
        if hits:
            self.load(request, hits)
        if hits < chunks:
            self.store(request, hits)
        self.finish(request)
        self.step()
        return hits

    # ---- steps ---------------------------------------------------------------------------

    def step(self) -> None:
        """End a scheduler step and play the workers' part of it."""
        if not self.is_late:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
        for job, source, target in self.queued:
            for worker in self.workers:
                assert worker.worker.submit_store(job.job_id, source, target)
        self.queued.clear()
        if self.flush:
            for worker in self.workers:
                worker.worker.wait(self.flush | {10**9})  # ids it never saw are ignored
        self.collect()
        if self.flush:
            assert self.flush.isdisjoint(self.jobs), "old jobs have ended"
            self.flush.clear()
            if self.is_late:
                self.manager.on_reset_flushed()
        if self.is_late:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.take_events()
        self.take_stats()

    def collect(self) -> None:
        """Take in what the workers finished; a job ends when all of them reported it."""
        for worker in self.workers:
            for result in worker.worker.get_finished():
                assert result.success, "a failed transfer would end the engine"
                job = self.jobs[result.job_id]
                job.waiting.remove(worker.rank)
                if not job.waiting:
                    self._end(job)

    def finish_jobs(self, jobs: Iterable[Job]) -> None:
        """Wait until the workers have ended these jobs, and take them in."""
        ids = {job.job_id for job in jobs}
        for worker in self.workers:
            worker.worker.wait(ids)
        self.collect()
        assert ids.isdisjoint(self.jobs), "every job that was waited for is reported"

    def wait_for_transfers(self) -> None:
        """Wait until the transfers between tiers that are under way now have ended."""
        manager = self.cascade.manager
        below = manager._core.below
        end_s = monotonic() + WAIT_S
        while below.wait(WAIT_S) and monotonic() < end_s:
            with manager.lock:
                manager._collect()

    def settle(self) -> None:
        """Step until nothing moves any more."""
        manager = self.cascade.manager
        for _ in range(ROUNDS_MAX):
            self.step()
            self.wait_for_transfers()
            self.finish_jobs(list(self.jobs.values()))
            self.step()
            busy = any(demoter.jobs for demoter in demoters(manager))
            if not busy and not self.manager.has_pending_work():
                return
        raise AssertionError("the cascade never came to rest")

    def reset(self) -> set[int]:
        """Reset the cache as the connector does; the old jobs, which the next step flushes."""
        self.take_events()
        self.manager.reset_cache()
        self.take_events()
        if self.extra_config.get("on_reset") != "keep":  # a reset removes without naming
            for held in self.seen.values():
                held.clear()
        old = set(self.jobs)
        for job in self.jobs.values():
            job.is_stale = True
        self.flush |= old
        return old

    # ---- events and metrics --------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        """Take events in; each one must be news."""
        events = list(self.manager.take_events())
        below = len(self.cascade.below)
        for event in events:
            # Up to vLLM 0.28 events name neither, and then the tiers below look like one.
            locality, owner = (getattr(event, name, None) for name in ("locality", "ownership"))
            self.told.add((event.medium, locality, owner))
            tier = owner if below > 1 else None
            held = self.seen.setdefault(tier or event.medium.name, set())
            if event.removed:
                is_known = self.is_fresh or event.medium is Medium.CPU
                assert not is_known or held.issuperset(event.keys), "removed what was not there"
                held.difference_update(event.keys)
            else:
                assert held.isdisjoint(event.keys), "stored twice"
                held.update(event.keys)
        return events

    def take_stats(self) -> None:
        """Take metrics in; every one must have been declared, with as many labels."""
        stats = self.manager.get_stats()
        if stats is None:
            return
        for name, by_labels in stats.data["data"].items():
            assert name in self.declared, f"{name} was not declared"
            for labels, value in by_labels.items():
                assert len(labels) == len(self.declared[name].labelnames)
                where = f"{name}{list(labels)}" if labels else name
                kind = stats.data["types"][name]
                if kind == "histogram":
                    assert all(sample >= 0 for sample in value)
                    value = len(value)
                before = 0 if kind == "gauge" else self.metrics.get(where, 0)
                self.metrics[where] = before + value

    @property
    def counters(self) -> Any:
        """The manager's own counters."""
        return self.cascade.manager.counters

    # ---- inside --------------------------------------------------------------------------

    def _take_block(self, job: Job) -> int:
        block = self._free.pop(len(self._free) * 5 // 7)  # not in order: pages are scattered
        job.blocks.append(block)
        for worker in self.workers:
            for tensor in worker.tensors:
                tensor[block] = 85
        return block

    def _compute(self, block: int, group: int, key: OffloadKey, sub: int) -> None:
        """What a forward pass leaves in a device block."""
        for worker in self.workers:
            for tensor in self.shape.groups[group]:
                content = page(key, self._part(worker), tensor, sub, self.shape.pages[tensor])
                worker.tensors[tensor][block] = torch.from_numpy(content.copy())

    def _start(self, job: Job) -> None:
        job.waiting = {worker.rank for worker in self.workers}
        self.jobs[job.job_id] = job

    def _end(self, job: Job) -> None:
        del self.jobs[job.job_id]
        self._free += job.blocks
        if not job.is_store:
            self._compare(job)  # a stale one too: the engine may go on with what it loads
        if job.is_stale:
            return
        if job.is_store:
            self.manager.complete_store(set(job.keys), job.request.context)
        else:
            self.manager.complete_load(set(job.keys), job.request.context)

    def _compare(self, job: Job) -> None:
        for key, sub, group, block in job.pages:
            for worker in self.workers:
                for tensor in self.shape.groups[group]:
                    want = page(key, self._part(worker), tensor, sub, self.shape.pages[tensor])
                    got = worker.tensors[tensor][block].numpy()
                    assert np.array_equal(got, want), (
                        f"wrong bytes: {key.hex()[:8]} rank {worker.rank} tensor {tensor} sub {sub}"
                    )
