"""vLLM's own scheduler and offloading connector over the cascade, with a worker but no model.

The "model" writes, for every token, bytes that depend on all tokens up to it, and before it
computes it checks that all earlier tokens' bytes are in the device blocks that the scheduler says.
So every load, store, preemption and reuse of a block is compared. The next token depends on the
text, too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .engine_rig import engine_options

BLOCK_TOKENS = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
ROW_BYTES = 32
"""Bytes of one token in one layer."""
PAGE_BYTES = BLOCK_TOKENS * ROW_BYTES
NULL_BLOCK = 0
"""vLLM's number for a block that is not there."""
CHUNK_BLOCKS = 2
"""Device blocks of a chunk: together a slot of 4096 bytes."""
_TENSORS_ARE_SHARED = "shared_by" in KVCacheTensor.__dataclass_fields__
"""Up to 0.28; later ones say where in the memory a layer is."""
DRAIN_LIMIT_S = 60.0
"""Several times the deadline of a promotion: a disk may be slow, yet no request waits for ever."""


def survives_aborts() -> bool:
    """False up to 0.26: there vLLM itself fails when a request is aborted before its prompt is
    computed, or is begun again, because it offers blocks that were never allocated."""
    count = getattr(RequestOffloadState, "storable_chunks", None)
    return count is not None and "group_state" in inspect.signature(count).parameters


@dataclass(frozen=True)
class Kind:
    """What kind of engine it is."""

    is_mla: bool = False
    """Multi-head latent attention: one vector per token, no keys and values."""
    stages: int = 1
    """Of a pipeline: each has a worker of its own and a part of the layers."""
    window: int = 0
    """Tokens; not 0: the second layer has a sliding window, is a KV group of its own, and shares
    the memory of the first."""
    has_state: bool = False
    """The same, and the second layer keeps a state, in the block of the last token it has seen."""
    chunk: int = CHUNK_BLOCKS
    """Device blocks of a chunk."""

    @property
    def is_hybrid(self) -> bool:
        """True if there are two KV groups, whose blocks are in the same memory."""
        return self.has_state or self.window > 0

    @property
    def pages(self) -> tuple[int, ...]:
        """Bytes of a block in each KV tensor."""
        return (PAGE_BYTES,) * (1 if self.is_hybrid else len(LAYERS))


@dataclass(frozen=True)
class _Stage:
    """A worker."""

    connector: OffloadingConnector
    tensors: dict[int, torch.Tensor]
    """By layer."""


class Text:
    """Tokens, and the bytes of each of them."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._rows = [bytearray() for _ in LAYERS]
        self._state = hashlib.blake2b(digest_size=ROW_BYTES)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """One token more."""
        self.tokens.append(token)
        self._state.update(token.to_bytes(4, "big"))
        for layer, rows in enumerate(self._rows):
            copy = self._state.copy()
            copy.update(bytes([layer]))
            rows += copy.digest()

    def rows(self, layer: int, end: int) -> np.ndarray[Any, Any]:
        """The bytes of the first `end` tokens, of shape (end, ROW_BYTES)."""
        found = bytes(self._rows[layer][: end * ROW_BYTES])
        return np.frombuffer(found, np.int8).reshape(end, ROW_BYTES)

    @property
    def next_token(self) -> int:
        """What the model says after this text."""
        return self._state.digest()[0]


class SchedulerRig:
    """Scheduler, connector of both roles, and a worker that checks every byte."""

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any],
        device_blocks: int,
        is_async: bool,
        kind: Kind | None = None,
    ) -> None:
        self._kind = kind or Kind()
        extra = {"blocks_per_chunk": self._kind.chunk, **extra}
        options = engine_options(model, device_blocks, extra)
        transfer = options.pop("kv_transfer_config")
        config = self._config(options, transfer, is_async)
        cache = self._cache_config(device_blocks, 0)  # vLLM's scheduler is given the first stage's
        config.cache_config.num_gpu_blocks = device_blocks
        ranks = range(self._kind.stages)
        self._stages = [self._stage(config, device_blocks, rank) for rank in ranks]
        self._outputs = KVOutputAggregator(self._kind.stages)
        self.scheduler: Any = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._depth = 1 if is_async else 0
        self._running: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.texts: dict[str, Text] = {}
        self.preempted = 0

    def _stage(self, config: Any, device_blocks: int, rank: int) -> _Stage:
        config = copy(config)
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.rank = rank
        cache = self._cache_config(device_blocks, rank)
        connector = OffloadingConnector(config, KVConnectorRole.WORKER, cache)
        layers = range(rank, len(LAYERS), self._kind.stages)
        shape = (device_blocks, PAGE_BYTES)
        if self._kind.is_hybrid:
            tensors = dict.fromkeys(layers, torch.zeros(shape, dtype=torch.int8))
            refs = [[CanonicalKVCacheRef(0, PAGE_BYTES)] for _ in layers]
        else:
            tensors = {layer: torch.zeros(shape, dtype=torch.int8) for layer in layers}
            refs = [[CanonicalKVCacheRef(i, PAGE_BYTES) for i in range(len(tensors))]]
        distinct = list(tensors.values())[: len(self._kind.pages)]
        assert connector.connector_worker is not None
        side: Any = connector.connector_worker
        register = getattr(side, "_init_worker", None) or side._register_handlers  # up to 0.24
        register(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in distinct], refs
            )
        )
        return _Stage(connector, tensors)

    def _config(self, options: dict[str, Any], transfer: dict[str, Any], is_async: bool) -> Any:
        from vllm.config import KVTransferConfig

        options.pop("disable_log_stats")
        config = EngineArgs(
            **options,
            pipeline_parallel_size=self._kind.stages,
            kv_transfer_config=KVTransferConfig(**transfer),
            max_num_batched_tokens=192,
            max_num_seqs=6,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        if self._kind.has_state:
            config.cache_config.mamba_cache_mode = "align"
        return config

    def _cache_config(self, device_blocks: int, rank: int) -> KVCacheConfig:
        made = MLAAttentionSpec if self._kind.is_mla else FullAttentionSpec
        head_size = ROW_BYTES // torch.float32.itemsize // (1 if self._kind.is_mla else 2)
        about: Any = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "dtype": torch.float32}
        about["head_size"] = head_size
        spec = made(**about)
        assert spec.page_size_bytes == PAGE_BYTES
        layers: list[str] = list(LAYERS[rank :: self._kind.stages])
        if self._kind.is_hybrid:
            other = self._second_spec(about)
            groups = [KVCacheGroupSpec(layers[:1], spec), KVCacheGroupSpec(layers[1:], other)]
            return KVCacheConfig(device_blocks, self._shared(device_blocks, layers), groups)
        groups = [KVCacheGroupSpec(layers, spec)]
        size, tensor = PAGE_BYTES * device_blocks, cast(Any, KVCacheTensor)
        if _TENSORS_ARE_SHARED:
            apart = [tensor(size=size, shared_by=[layer]) for layer in layers]
            return KVCacheConfig(device_blocks, apart, groups)
        together = tensor(
            size=size * len(layers),
            layers=layers,
            layer_stride=size,
            block_stride=PAGE_BYTES,
        )
        return KVCacheConfig(device_blocks, [together], groups)

    def _second_spec(self, about: dict[str, Any]) -> Any:
        """Of the layer without full attention."""
        if not self._kind.has_state:
            return SlidingWindowSpec(**about, sliding_window=self._kind.window)
        return MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((PAGE_BYTES,),),
            dtypes=(torch.int8,),
            mamba_cache_mode="align",
        )

    @staticmethod
    def _shared(device_blocks: int, layers: list[str]) -> list[Any]:
        """Memory of layers whose blocks are the same ones, each of one layer at a time."""
        size, tensor = PAGE_BYTES * device_blocks, cast(Any, KVCacheTensor)
        if _TENSORS_ARE_SHARED:
            return [tensor(size=size, shared_by=layers)]
        strides = {"layer_stride": size, "block_stride": PAGE_BYTES}
        return [tensor(size=size, layers=[layer], **strides) for layer in layers]

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """A new request."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        request = Request(name, prompt, sampling, None, block_hasher=self._hasher)
        self.texts[name] = Text(prompt)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        """Requests that are waiting or running."""
        return list(self.scheduler.requests)

    def reset(self) -> bool:
        """Reset everything, unless a load is under way or its request has not run since.

        vLLM itself cannot reset then. What runs starts again.
        """
        self._take_in(0)
        scheduler = self.scheduler
        jobs = scheduler.connector.connector_scheduler._jobs.values()
        idle = [r for r in scheduler.requests.values() if r.status is not RequestStatus.RUNNING]
        blocks_of = scheduler.kv_cache_manager.get_block_ids
        if not all(job.is_store for job in jobs) or any(blocks_of(r.request_id)[0] for r in idle):
            return False
        return bool(
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        )

    def step(self) -> None:
        """One engine step; with async scheduling its output is taken in one step later."""
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self._running.append((output, self._execute(output)))
        self._take_in(self._depth)

    def drain(self) -> None:
        """Step until every request has ended and nothing is under way."""
        scheduler = self.scheduler
        self.step_until(
            lambda: not (scheduler.has_requests() or scheduler.has_unfinished_requests())
        )
        self._take_in(0)

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Step until something is so."""
        limit_s = monotonic() + DRAIN_LIMIT_S
        while not is_so():
            assert monotonic() < limit_s, f"requests never end: {self.unfinished}"
            self.step()

    def close(self) -> None:
        """Clean shutdown, workers first."""
        for stage in self._stages:
            stage.connector.shutdown()
        self.scheduler.shutdown()

    def _take_in(self, depth: int) -> None:
        while len(self._running) > depth:
            self.scheduler.update_from_output(*self._running.popleft())

    # ---- the worker ----------------------------------------------------------------------

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        assert metadata is not None
        for stage in self._stages:
            own = deepcopy(metadata)  # a worker is another process
            stage.connector.bind_connector_metadata(own)
            stage.connector.handle_preemptions(own)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(output.num_scheduled_tokens)
        sampled = [
            self._forward(name, starts[name], output.num_scheduled_tokens[name]) for name in names
        ]
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=self._transfer(stage.connector, output.finished_req_ids),
            )
            for stage in self._stages
        ]
        aggregated = self._outputs.aggregate(outputs)
        assert isinstance(aggregated, ModelRunnerOutput)
        return aggregated

    @staticmethod
    def _transfer(worker: OffloadingConnector, finished: set[str]) -> KVConnectorOutput:
        worker.start_load_kv(None)  # type: ignore[arg-type]
        worker.wait_for_save()  # type: ignore[no-untyped-call]
        _, received = worker.get_finished(finished)
        done = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=done)

    @staticmethod
    def _move_state(name: str, tensor: torch.Tensor, blocks: Any, rows: Any, start: int) -> None:
        """The state after all tokens is made of the one after the first `start`."""
        last = tensor[blocks[(len(rows) - 1) // BLOCK_TOKENS]].numpy().reshape(-1, ROW_BYTES)
        if start:
            block = blocks[(start - 1) // BLOCK_TOKENS]
            assert block != NULL_BLOCK, f"{name}: the state after {start} tokens is nowhere"
            have = tensor[block].numpy().reshape(-1, ROW_BYTES)
            assert np.array_equal(have, np.broadcast_to(rows[start - 1], have.shape)), (
                f"wrong bytes: {name}, the state after {start} tokens"
            )
        last[:] = rows[-1]

    def _forward(self, name: str, start: int, count: int) -> list[int]:
        """Check what is computed already, compute the rest, sample if the text is complete."""
        text, request = self.texts[name], self.scheduler.requests[name]
        groups = self.scheduler.kv_cache_manager.get_block_ids(name)
        end = start + count
        for layer, tensor in (pair for s in self._stages for pair in s.tensors.items()):
            has_window = self._kind.window and layer == 1
            seen = max(0, start - self._kind.window + 1) if has_window else 0
            blocks = groups[layer if self._kind.is_hybrid else 0]
            rows = text.rows(layer, end)
            if self._kind.has_state and layer == 1:
                self._move_state(name, tensor, blocks, rows, start)
                continue
            # A block that lies before the window altogether is not looked at.
            tokens = np.arange(seen, end)
            block_of = np.array(blocks)[tokens // BLOCK_TOKENS]
            nowhere = tokens[block_of == NULL_BLOCK]
            assert not nowhere.size, f"{name}, layer {layer}, token {nowhere[0]} is nowhere"
            page = tensor.numpy().reshape(len(tensor), -1, ROW_BYTES)
            place = block_of, tokens % BLOCK_TOKENS
            n_known = max(0, start - seen)
            known = tuple(part[:n_known] for part in place)
            wrong = (page[known] != rows[seen:start]).any(axis=1)
            assert not wrong.any(), (
                f"wrong bytes: {name}, layer {layer}, token {seen + int(wrong.argmax())}"
            )
            page[tuple(part[n_known:] for part in place)] = rows[seen + n_known :]
        if end < request.num_tokens:
            return []
        if end == len(text.tokens):
            text.append(text.next_token)
        return [text.tokens[end]]
