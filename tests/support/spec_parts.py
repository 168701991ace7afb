"""What a driver of the spec moves about: requests, transfers, and a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    ReqContext,
)

from kvcascade.spec import CascadeOffloadingSpec
from kvcascade.vllm.v0_26 import CascadeWorker

from .kv_bytes import Shape, offloading_config


@dataclass
class Request:
    """A request: a prompt of `chunks` chunks, named by the text it begins with."""

    context: ReqContext
    keys: list[list[OffloadKey]]
    """Per KV group, one key per chunk."""

    def span(self, start: int, end: int) -> list[OffloadKey]:
        """Keys of chunks `start .. end - 1`, group-major, as the connector lists them."""
        return [key for group in self.keys for key in group[start:end]]


@dataclass
class Job:
    """A transfer that every worker has been given."""

    job_id: int
    request: Request
    keys: list[OffloadKey]
    is_store: bool
    waiting: set[int]
    """Ranks that have not reported it."""
    blocks: list[int]
    """Device blocks it uses."""
    pages: list[tuple[OffloadKey, int, int, int]] = field(default_factory=list)
    """Of a load, per device block: key, place in the chunk, KV group, device block."""
    is_stale: bool = False
    """From before a reset: nobody tells the manager when it ends."""


@dataclass
class Load:
    """What the scheduler tells the workers of a load."""

    job: Job
    source: LoadStoreSpec
    target: GPULoadStoreSpec


class Worker:
    """One worker process: its KV tensors and its side of the spec."""

    def __init__(
        self, shape: Shape, extra_config: dict[str, Any], engine_id: str, rank: int
    ) -> None:
        self.rank = rank
        config = offloading_config(shape, extra_config, engine_id, rank)
        self.tensors = [torch.zeros((shape.blocks, n), dtype=torch.int8) for n in shape.pages]
        refs = [
            [CanonicalKVCacheRef(tensor, shape.pages[tensor]) for tensor in group]
            for group in shape.groups
        ]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors], refs
        )
        worker = CascadeOffloadingSpec(config).get_worker(caches)
        assert isinstance(worker, CascadeWorker)
        self.worker = worker
