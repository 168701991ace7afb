"""What is written about the layout of blocks is what the worker's tensors are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvcascade.vllm import generation
from kvcascade.vllm.kv_layers import (
    about_blocks,
    full_attention_group,
    groups_of_windows,
    groups_offered_once,
)
from kvcascade.vllm.v0_26 import _geometry

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
PAGE = SPEC.page_size_bytes
BLOCKS = 10


def kv_config(layers: list[str]) -> KVCacheConfig:
    """One group; every layer has a region of its own."""
    region = PAGE * BLOCKS
    tensor = KVCacheTensor(region * len(layers), layers, layer_stride=region, block_stride=PAGE)
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(layers, SPEC)])


def offloading_config(layers: list[str], block_bytes: int, pp_size: int = 1) -> OffloadingConfig:
    """Two workers, chunks of three blocks."""
    parallel = OffloadingParallelConfig(
        rank=0, world_size=2, tp_size=2, pp_size=pp_size, pcp_size=1, dcp_size=1,
        data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )  # fmt: skip
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, tuple(layers), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=3),
        parallel=parallel,
    )


def test_layers_follow_each_other() -> None:
    layers = ["l0", "l1"]
    found = about_blocks(offloading_config(layers, 2 * PAGE), kv_config(layers))
    assert (found["world_size"], found["rank_bytes"]) == (2, 2 * 3 * PAGE)
    assert found["layers"] == [
        {"layer": f"l{i}", "group": 0, "offset": i * 3 * PAGE, "page_bytes": PAGE, "pages": 3,
         "dtype": "bfloat16", "shape": [2, 16, 2, 8]}
        for i in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        offloading_config(["l0", "l1"], 3 * PAGE),  # does not add up
        offloading_config(["l0", "l1"], 2 * PAGE, pp_size=2),
    ],
)
def test_nothing_is_written_where_it_is_not_known(config: Any) -> None:
    assert about_blocks(config, kv_config(["l0", "l1"])) == {}


def test_nothing_is_written_without_the_engine() -> None:
    assert about_blocks(offloading_config(["l0"], PAGE), None) == {}


def test_tokens_are_counted_by_the_group_whose_every_block_is_loaded() -> None:
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=32
    )
    config = replace(
        offloading_config([], PAGE),
        groups=(OffloadingGroupConfig(16, ("l0",), 0), OffloadingGroupConfig(32, ("l1",), 1)),
    )
    groups = [KVCacheGroupSpec(["l0"], window), KVCacheGroupSpec(["l1"], SPEC)]
    assert full_attention_group(config, KVCacheConfig(BLOCKS, [], groups)) == (1, 32)
    assert groups_of_windows(config, KVCacheConfig(BLOCKS, [], groups)) == [0]
    groups[1] = KVCacheGroupSpec(["l1"], window)
    assert full_attention_group(config, KVCacheConfig(BLOCKS, [], groups)) is None
    assert groups_of_windows(config, KVCacheConfig(BLOCKS, [], groups)) == [0, 1]
    assert full_attention_group(config, None) is None
    assert groups_of_windows(config, None) == []


def test_a_block_of_that_group_stands_for_its_tokens_whatever_the_others_are() -> None:
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=32
    )
    groups = [KVCacheGroupSpec(["l0"], window), KVCacheGroupSpec(["l1"], SPEC)]
    kv_config = KVCacheConfig(BLOCKS, [], groups)
    one = offloading_config(["l0"], PAGE)
    two = replace(
        one, groups=(OffloadingGroupConfig(16, ("l0",), 0), OffloadingGroupConfig(48, ("l1",), 1))
    )
    geometry = _geometry(two, None, kv_config)
    assert (geometry.tokens_per_block, geometry.served_end) == (3 * 48, b"\0\0\0\1")
    assert geometry.mean_tokens == 3 * 12, "144 tokens are three blocks here and one there"
    geometry = _geometry(one, None, kv_config)
    assert geometry.served_end == b"", "there is one group: every block counts"
    assert geometry.tokens_per_block == geometry.mean_tokens == 3 * 16


@pytest.mark.parametrize(
    ("mode", "minor", "found"),
    [("align", 32, [1]), ("align", 29, [1]), ("align", 28, []), ("all", 32, []), ("none", 32, [])],
)
def test_states_at_boundaries_are_offered_once(
    mode: Any, minor: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, minor))
    state = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    config = replace(
        offloading_config([], PAGE),
        groups=(OffloadingGroupConfig(16, ("l0",), 0), OffloadingGroupConfig(16, ("l1",), 1)),
    )
    groups = [KVCacheGroupSpec(["l0"], SPEC), KVCacheGroupSpec(["l1"], state)]
    assert groups_offered_once(config, KVCacheConfig(BLOCKS, [], groups)) == found
    assert groups_offered_once(config, None) == [], "the engine's configuration was not found"
