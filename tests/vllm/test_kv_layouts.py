"""Every layout of a KV cache that vLLM knows, laid out and handed over by vLLM's own code.

A block comes back with every byte, into the block that was named and no other; or the start is
refused. Needs vLLM 0.29 or newer, whose layouts are a list.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.kv_bytes import Shape, offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
from vllm.v1.worker.utils import allocate_kv_cache

from kvcascade.errors import ConfigError
from kvcascade.spec import CascadeOffloadingSpec
from kvcascade.vllm.v0_26 import CascadeLoadStoreSpec

BLOCKS, SLOTS, TOKENS = 8, 40, 32
Groups = list[KVCacheGroupSpec]


def attention(heads: int = 2, head_size: int = 64, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=head_size, dtype=torch.float16, **more
    )


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=64
    )


def states(page_bytes: int | None = None) -> MambaSpec:
    return MambaSpec(
        block_size=TOKENS,
        shapes=((3, 256), (8, 16, 16)),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=page_bytes,
    )


def group(spec: KVCacheSpec, *layers: str) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(layers), spec)


PAGE_BYTES = attention().page_size_bytes
GAP = {"block_stride_alignment": PAGE_BYTES * 3 // 4}
EACH = UniformTypeKVCacheSpecs(
    block_size=TOKENS, kv_cache_specs={"a": attention(), "b": attention(head_size=128)}
)
MODELS: dict[str, Groups] = {
    "plain": [group(attention(), "a", "b", "c")],
    "shared_cache": [group(attention(), "a", "b")],
    "one_layer": [group(attention(), "a")],
    "one_head": [group(attention(1), "a", "b")],
    "gap_after_pages": [group(attention(**GAP), "a", "b")],
    "padded_pages": [group(attention(page_size_padded=PAGE_BYTES * 5 // 4), "a", "b")],
    "layers_of_two_sizes": [group(EACH, "a", "b")],
    "two_groups": [group(attention(), "a", "b"), group(sliding(), "c")],
    "two_groups_of_one_layer": [group(attention(), "a"), group(sliding(), "b")],
    "states": [group(states(), "a", "b")],
    "attention_and_states": [group(attention(), "a", "b"), group(states(PAGE_BYTES), "c", "d")],
}
SIDE_BY_SIDE = {"BLHNC", "BLNHC", "BHLNC"}
REFUSED = {
    **{name: {"LHBNC"} for name in MODELS},  # the heads of a block lie apart
    "one_head": set(),
    "gap_after_pages": {"LBHNC", "LBNHC"},
    "states": SIDE_BY_SIDE,
}
NOT_MADE = {
    "gap_after_pages": {"LHBNC"},
    "padded_pages": {"LHBNC", "BHLNC"},
    "layers_of_two_sizes": {"LHBNC", "BHLNC"},
}
"""vLLM itself refuses these."""


class Engine:
    """A worker of vLLM's with its KV cache, and the connector's half over it."""

    def __init__(self, groups: Groups, layout: KVCacheLayout, name: str) -> None:
        """Raises what vLLM or the spec raises."""
        config = engine_config(layout)
        self.groups = [replace(each, layer_names=list(each.layer_names)) for each in groups]
        kv_config = get_kv_cache_config_from_groups(config, self.groups, BLOCKS << 20)
        self.caches = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
        self._spec = CascadeOffloadingSpec(self._config(kv_config, layout, name))
        if name == "shared_cache":  # vLLM adds such layers after the spec was made
            self.groups[0].layer_names.append("sharer")
            self.caches["sharer"] = self.caches["a"]
        side: Any = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
        side.spec, side.vllm_config, side.kv_cache_config = self._spec, config, kv_config
        side.register_kv_caches(self.caches)
        self.worker: OffloadingWorker = side.worker

    def _config(self, kv_config: Any, layout: KVCacheLayout, name: str) -> Any:
        block_bytes = kv_config.kv_cache_tensors[0].size // kv_config.num_blocks
        shape = Shape(pages=(block_bytes,), groups=((0,),) * len(self.groups), blocks=BLOCKS)
        tier = {"type": "cpu", "capacity": SLOTS * shape.slot_bytes + 4096}
        made = offloading_config(shape, {"tiers": [tier]}, f"layouts-{name}-{layout.name}", 0)
        both = zip(made.groups, self.groups, strict=True)
        groups = tuple(replace(a, layer_names=tuple(b.layer_names)) for a, b in both)
        return replace(made, groups=groups, kv_cache_layout=layout.name)

    def copy(self, group: int, source: int, target: int) -> None:
        """A block goes to a slot, and from there to another block."""
        slot = CascadeLoadStoreSpec([])
        slot.block_ids = np.array([5], dtype=np.int32)
        sizes = [int(number == group) for number in range(len(self.groups))]
        first, second = (
            GPULoadStoreSpec([block], group_sizes=sizes, block_indices=[0] * len(sizes))
            for block in (source, target)
        )
        self._end(self.worker.submit_store(1, first, slot), 1)
        self._end(self.worker.submit_load(2, slot, second), 2)

    def _end(self, is_taken: bool, job: int) -> None:
        self.worker.wait({job})
        (result,) = self.worker.get_finished()
        assert is_taken and result.success

    def content(self, group: int) -> dict[str, torch.Tensor]:
        """Bytes of every layer of a group, blocks first."""
        names = self.groups[group].layer_names
        return {name: self.caches[name].view(torch.int8).clone() for name in names}

    def fill(self) -> None:
        """New random bytes everywhere."""
        for cache in self.caches.values():
            cache.view(torch.int8).random_(-128, 128)


def engine_config(layout: KVCacheLayout) -> Any:
    """What of an engine's configuration these parts of vLLM look at."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        world_size=1,
        rank=0,
    )
    return SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
    )


CASES = [
    (name, layout)
    for name in MODELS
    for layout in KVCacheLayout
    if layout.name not in NOT_MADE.get(name, ())
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_blocks_come_back_whole_or_the_start_is_refused(name: str, layout: KVCacheLayout) -> None:
    torch.manual_seed(0)
    if layout.name in REFUSED[name]:
        with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT: "):
            Engine(MODELS[name], layout, name)
        return
    engine = Engine(MODELS[name], layout, name)
    for number in range(len(engine.groups)):
        engine.fill()
        before = engine.content(number)
        engine.copy(number, source=3, target=6)
        for layer, found in engine.content(number).items():
            expected = before[layer]
            expected[6] = expected[3]
            assert torch.equal(found, expected), layer
    engine.worker.shutdown()
