"""vLLM's `obj` tier and a remote tier of ours on the same S3 server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .....tiers.remote.engines.object_store import open_object_store
from ...remote_server import BUCKET, REGION
from ..measurement import Figures
from ..remote_obj import BOTH, LOAD, LOOKUP
from ..remote_rates import TIMEOUT_S, Ours, RatedBlocks
from .vllm_calls import random_keys
from .vllm_engines import offloading_config

POLL_S = 0.001


class Theirs:
    """vLLM's tier, called as its manager calls it."""

    def __init__(self, endpoint: str, block_bytes: int, blocks: int, threads: int) -> None:
        os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")  # else its reads end with an error
        where = {"bucket": BUCKET, "endpoint_override": endpoint, "region": REGION}
        secrets = {"access_key": "none", "secret_key": "none"}
        tier = {"type": "obj", "store_config": {**where, **secrets}, "io_threads": threads}
        extra = {"cpu_bytes_to_use": blocks * block_bytes, "secondary_tiers": [tier]}
        self._spec = TieringOffloadingSpec(offloading_config(block_bytes, extra))
        manager = self._spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self._manager = manager
        (self._tier,) = manager.secondary_tiers
        region = self._spec._scheduler_mmap
        assert region is not None
        self.memory = region.base_tensor.view(-1, block_bytes).numpy().view(np.uint8)
        self._jobs = 0

    def _request(self) -> ReqContext:
        self._jobs += 1
        return ReqContext(req_id=str(self._jobs))

    def _move(self, keys: Sequence[OffloadKey], is_read: bool) -> None:
        context = self._request()
        chunks = np.arange(len(keys), dtype=np.int32)
        job = TransferJob(self._jobs, keys, chunks, is_read, context)
        (self._tier.submit_load if is_read else self._tier.submit_store)(job)
        while not (ended := list(self._tier.get_finished_jobs())):
            time.sleep(POLL_S)
        assert ended[0].success, "a transfer failed"

    def write(self, keys: Sequence[OffloadKey]) -> None:
        """Write the blocks in memory."""
        self._move(keys, is_read=False)

    def read(self, keys: Sequence[OffloadKey]) -> None:
        """Read blocks into memory."""
        self._move(keys, is_read=True)

    def look(self, keys: Sequence[OffloadKey]) -> int:
        """Ask for blocks until all are answered; return how many are there."""
        context = self._request()
        while True:
            answers = [self._tier.lookup(key, context) for key in keys]
            if LookupResult.RETRY not in answers:
                self._tier.on_request_finished(context)
                return answers.count(LookupResult.HIT)
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(POLL_S)

    def close(self) -> None:
        """Shut down."""
        del self.memory
        self._manager.shutdown()


class Turns:
    """Both contenders, which ask for all blocks in turn, and read them."""

    def __init__(self, endpoint: str, size: int, blocks: int, threads: int) -> None:
        secrets = {"access_key_id": "none", "secret_access_key": "none"}
        limits = (TIMEOUT_S, TIMEOUT_S)
        bucket = open_object_store(f"s3://{BUCKET}/ours", *limits, endpoint, REGION, secrets)
        self._blocks = RatedBlocks(size, size * blocks)
        self._ours = Ours(bucket, size, threads)
        self._theirs = Theirs(endpoint, size, self._blocks.count, threads)
        self._keys = random_keys(self._blocks.count)
        self._theirs.memory[:] = self._blocks.source
        self._theirs.write(self._keys)
        self._ours.write(self._blocks.keys, self._blocks.sources())

    def ours(self) -> Figures:
        """Return the rates of a lookup of all blocks, and of reading them."""
        self._ours.store._core.memory.clear()
        keys, targets = self._blocks.keys, self._blocks.targets()
        figures = rates(
            len(keys), lambda: self._ours.look(keys), lambda: self._ours.read(keys, targets)
        )
        self._blocks.check()
        return figures

    def theirs(self) -> Figures:
        """Return the same of vLLM's tier."""
        self._theirs.memory[:] = 1
        keys = self._keys
        figures = rates(len(keys), lambda: self._theirs.look(keys), lambda: self._theirs.read(keys))
        assert np.array_equal(self._theirs.memory, self._blocks.source), "a wrong byte was read"
        return figures

    def close(self) -> None:
        """Close both."""
        self._ours.close()
        self._theirs.close()


def rates(
    blocks: int,
    look: Callable[[], int],
    read: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Figures:
    """Look all blocks up, then read them; return the blocks in a second."""
    begun_s = clock()
    found = look()
    looked_s = clock()
    read()
    ended_s = clock()
    assert found, "no block is there"
    return {
        LOOKUP: blocks / (looked_s - begun_s),
        LOAD: blocks / (ended_s - looked_s),
        BOTH: blocks / (ended_s - begun_s),
    }
