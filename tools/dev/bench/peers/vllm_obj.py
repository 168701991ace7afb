"""vLLM's `obj` tier and a remote tier of ours on the same S3 server.

    python -m kvcascade.tools.dev.bench.peers.vllm_obj --out FOLDER

Both ask whether 1,000 blocks are there, then read them into memory that stands for the arena, and
take turns. Ours verifies every block; theirs has no checksums. The server is moto, started here.
vLLM's tier needs `nixl` (`pip install nixl`), but no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .....tiers.remote.object_store import open_object_store
from ...remote_server import BUCKET, REGION, s3_server
from ..remote_rates import OURS, TIMEOUT_S, Ours, RatedBlocks, RateRow, shown
from .vllm_calls import random_keys
from .vllm_engines import offloading_config

BLOCKS = 1000
VLLM = "vLLM obj"
POLL_S = 0.001
Contender = Callable[[], tuple[float, float]]
"""Returns the seconds of a lookup of all blocks, and those of reading them."""
GOALS = {"lookup": 10.0, "load": 1.0, "lookup and load": 1.3}


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
        self._theirs = Theirs(endpoint, size, blocks, threads)
        self._keys = random_keys(blocks)
        self._theirs.memory[:] = self._blocks.source
        self._theirs.write(self._keys)
        self._ours.write(self._blocks.keys, self._blocks.sources())

    def ours(self) -> tuple[float, float]:
        """Return the seconds of a lookup of all blocks, and those of reading them."""
        self._ours.store._link.memory.clear()
        keys, targets = self._blocks.keys, self._blocks.targets()
        took = _timed(lambda: self._ours.look(keys), lambda: self._ours.read(keys, targets))
        self._blocks.check()
        return took

    def theirs(self) -> tuple[float, float]:
        """Return the same of vLLM's tier."""
        self._theirs.memory[:] = 1
        keys = self._keys
        took = _timed(lambda: self._theirs.look(keys), lambda: self._theirs.read(keys))
        assert np.array_equal(self._theirs.memory, self._blocks.source), "a wrong byte was read"
        return took

    def close(self) -> None:
        """Close both."""
        self._ours.close()
        self._theirs.close()


def _timed(look: Callable[[], int], read: Callable[[], None]) -> tuple[float, float]:
    begun_s = time.perf_counter()
    found = look()
    looked_s = time.perf_counter()
    read()
    assert found, "no block is there"
    return looked_s - begun_s, time.perf_counter() - looked_s


def measure(contenders: Mapping[str, Contender], repeats: int) -> list[RateRow]:
    """Return the rows; figures are rates, so that a ratio above 1 means that ours is faster."""
    rows = [RateRow(case, "per s", goals={VLLM: goal}) for case, goal in GOALS.items()]
    for repeat in range(repeats):
        for name in [*contenders][:: 1 if repeat % 2 else -1]:
            looked_s, read_s = contenders[name]()
            for row, took_s in zip(rows, (looked_s, read_s, looked_s + read_s), strict=True):
                row.samples.setdefault(name, []).append(1 / took_s)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write `vllm-obj.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the JSON file")
    parser.add_argument("--size", type=int, default=512 << 10, help="bytes of a block")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--threads", type=int, default=8, help="of each of both")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        endpoint = stack.enter_context(s3_server())
        turns = Turns(endpoint, options.size, options.blocks, options.threads)
        stack.enter_context(closing(turns))
        rows = measure({OURS: turns.ours, VLLM: turns.theirs}, options.repeats)
    print("| case | median | ours | |\n|---|---|---|---|")
    for row in rows:
        print(shown(row))
    described: dict[str, Any] = {"cpus": os.cpu_count(), "load": os.getloadavg()}
    described["rows"] = [row.figures() for row in rows]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "vllm-obj.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
