"""What a driver of the spec tells it about the engine: shapes, configurations, and every byte."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

Made = TypeVar("Made")
Pages = npt.NDArray[np.int8]

TOKENS_PER_BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """What the engine's KV cache looks like."""

    pages: tuple[int, ...] = (1024, 3072)
    """Bytes of one block in each KV tensor."""
    groups: tuple[tuple[int, ...], ...] = ((0, 1),)
    """Per KV group, the tensors of its layers."""
    chunk: int = 1
    """Device blocks in one offloaded chunk."""
    world: int = 1
    """Workers."""
    is_replicated: bool = False
    """All workers hold the same bytes, and vLLM says so."""
    blocks: int = 256
    """Device blocks."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk in the arena, all workers together."""
        row = sum(self.pages) * self.chunk * self.world
        return -(-row // 4096) * 4096


def tiers(shape: Shape, path: Path | None, cpu: int, nvme: int = 0, **options: Any) -> list[Any]:
    """The `tiers` of a configuration: capacities in chunks; `options` go to the NVMe tier."""
    found: list[Any] = [{"type": "cpu", "capacity": cpu * shape.slot_bytes + 4096}]
    if path is not None:
        per_segment = 16
        capacity = capacity_of(-(-nvme // per_segment), per_segment, shape.slot_bytes) + 4096
        found.append(
            {
                "type": "nvme",
                "path": str(path),
                "capacity": capacity,
                "segment_size": per_segment * shape.slot_bytes,
                "min_free": 0,
                **options,
            }
        )
    return found


def make(cls: type[Made], **values: Any) -> Made:
    """A vLLM dataclass, without the fields that the installed version does not know."""
    known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in known})


def offloading_config(
    shape: Shape, extra_config: dict[str, Any], engine_id: str, rank: int
) -> OffloadingConfig:
    """What vLLM, from 0.26 on, hands to the spec in the process of this rank (0: the scheduler)."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    groups = tuple(
        make(
            OffloadingGroupConfig,
            tokens_per_block=TOKENS_PER_BLOCK,
            layer_names=tuple(f"layer.{number}.{tensor}" for tensor in tensors),
            group_id=number,
            sliding_window_size_in_chunks=None,
        )
        for number, tensors in enumerate(shape.groups)
    )
    parallel = make(
        OffloadingParallelConfig,
        rank=rank,
        world_size=shape.world,
        tp_size=shape.world,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    return make(
        OffloadingConfig,
        groups=groups,
        worker_kv_bytes_per_block=sum(shape.pages),
        enable_kv_cache_events=True,
        extra_config={"weights_id": "test", **extra_config},
        engine_id=engine_id,
        model=make(OffloadingModelConfig, name="test/model", dtype="float16", max_model_len=4096),
        cache=OffloadingCacheConfig(TOKENS_PER_BLOCK, shape.chunk),
        parallel=parallel,
        replicated_layout=shape.is_replicated,
        kv_cache_layout="LBHNC",
    )


def page(key: bytes, rank: int, tensor: int, sub: int, size: int) -> Pages:
    """The one right content of a page: block `sub` of the chunk `key`, in one worker's tensor."""
    name = key + bytes([rank, tensor, sub])
    return np.frombuffer(hashlib.shake_128(name).digest(size), dtype=np.int8)


def segment_files(path: Path) -> list[Path]:
    """Every segment file below an NVMe path."""
    return sorted(path.glob("*/segments/*.safetensors"))


def damage(path: Path, every: int = 512) -> int:
    """Flip a byte in every `every` payload bytes below an NVMe path; returns how many."""
    flipped = 0
    for segment in segment_files(path):
        raw = bytearray(segment.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        if not raw[8:start].strip(b"\0"):  # it is being made
            continue
        begin, end = json.loads(raw[8:start])["blocks"]["data_offsets"]
        payload = np.frombuffer(raw, dtype=np.uint8)[start + begin : start + end]
        payload[::every] ^= 0x5A
        flipped += len(payload[::every])
        with segment.open("r+b") as file:
            file.seek(start + begin)
            file.write(payload.tobytes())
    return flipped
