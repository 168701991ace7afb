"""Walk the KV cache groups and layers of an engine, and describe where layers lie in a block.

The description is for people: it is written beside the fingerprint and is no part of it. It is
checked against the size of a block. If it does not add up (packed layouts, pipeline stages with
layers of their own), nothing is written. `kv_config` is vLLM's `KVCacheConfig`, None if it was not
found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from . import generation

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def about_blocks(config: OffloadingConfig, kv_config: Any | None) -> dict[str, Any]:
    """Return `{"world_size", "rank_bytes", "layers": [...]}`; empty if the layout is not known.

    Each layer has its name, KV group, offset in a rank's part, number of pages, and the bytes, type
    and shape of a page.
    """
    chunk = config.cache.blocks_per_chunk
    rank_bytes = config.worker_kv_bytes_per_block * chunk
    if kv_config is None or config.parallel.pp_size != 1:
        return {}
    offsets: dict[Any, int] = {}
    end = 0
    layers: list[dict[str, Any]] = []
    for group_id, name, spec in walk_layers(config, kv_config):
        page_bytes = int(spec.page_size_bytes)
        place = _place(kv_config, name)
        if place not in offsets:
            offsets[place] = end
            end += page_bytes * chunk
        layers.append(
            {
                "layer": name,
                "group": group_id,
                "offset": offsets[place],
                "page_bytes": page_bytes,
                "pages": chunk,
                **_shape(spec, page_bytes),
            }
        )
    if end != rank_bytes:
        return {}
    return {"world_size": config.parallel.world_size, "rank_bytes": rank_bytes, "layers": layers}


def full_attention_group(config: OffloadingConfig, kv_config: Any | None) -> tuple[int, int] | None:
    """Return the first group with full attention and its tokens per block; None if not known."""
    if kv_config is None:
        return None
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for group_id, _, spec in walk_layers(config, kv_config):
        if isinstance(spec, FullAttentionSpec):
            return group_id, numbered_groups(config)[group_id].tokens_per_block
    return None


def groups_offered_once(config: OffloadingConfig, kv_config: Any | None) -> list[int]:
    """Return the KV groups whose blocks vLLM offers only in the step that fills them.

    These groups hold states at the ends of scheduled parts of a prompt, in device blocks that are
    not kept for the request. Earlier versions offer such blocks again, like all others.
    """
    if kv_config is None or not generation.offers_states_once():
        return []
    from vllm.v1.kv_cache_interface import MambaSpec

    return [
        group_id
        for group_id, spec in group_specs(kv_config, numbered_groups(config))
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
    ]


def groups_of_windows(config: OffloadingConfig, kv_config: Any | None) -> list[int]:
    """Return the KV groups of which only the last blocks of a prefix are loaded; empty if not
    known."""
    if kv_config is None:
        return []
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    walked = list(walk_layers(config, kv_config))
    full = {group_id for group_id, _, spec in walked if isinstance(spec, FullAttentionSpec)}
    return sorted({group_id for group_id, _, _ in walked} - full)


def numbered_groups(config: OffloadingConfig) -> dict[int, Any]:
    """Return the KV groups that are offloaded, by their number in the engine."""
    return {getattr(group, "group_id", i): group for i, group in enumerate(config.groups)}


def group_specs(kv_config: Any, group_ids: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Yield (group number, KV cache spec of the group)."""
    for group_id in group_ids:
        yield group_id, kv_config.kv_cache_groups[group_id].kv_cache_spec


def specs_by_layer(spec: Any) -> Mapping[str, Any]:
    """Return the KV cache spec of each layer of a group; under "" if they all have the same."""
    return getattr(spec, "kv_cache_specs", None) or {"": spec}


def layer_names(config: OffloadingConfig) -> list[Sequence[str]]:
    """Return the names of the layers of every KV group that is offloaded."""
    return [group.layer_names for group in config.groups]


def walk_layers(config: OffloadingConfig, kv_config: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield (group number, layer name, its KV cache spec) in the order of the worker's tensors."""
    groups = numbered_groups(config)
    for group_id, spec in group_specs(kv_config, groups):
        by_layer = specs_by_layer(spec)
        for name in groups[group_id].layer_names:
            yield group_id, name, by_layer.get(name, spec)


def _place(kv_config: Any, name: str) -> Any:
    """Return a value that is equal for layers that share their memory."""
    for number, tensor in enumerate(kv_config.kv_cache_tensors):
        layers = getattr(tensor, "layers", None)
        if layers is not None and name in layers:
            start = tensor.offset + layers.index(name) * tensor.layer_stride
            return (tensor.size, start)
        if name in getattr(tensor, "shared_by", ()):
            return number
    return name


def _shape(spec: Any, page_bytes: int) -> dict[str, Any]:
    """Return a page's type and shape: (K and V, tokens, heads, head size) for attention layers."""
    dtype = str(getattr(spec, "dtype", "")).removeprefix("torch.")
    item = getattr(getattr(spec, "dtype", None), "itemsize", 0)
    tokens, heads = getattr(spec, "block_size", 0), getattr(spec, "num_kv_heads", 0)
    size = getattr(spec, "head_size", 0)
    for shape in ([2, tokens, heads, size], [tokens, heads, size]):
        if item and prod(shape) * item == page_bytes:
            return {"dtype": dtype, "shape": shape}
    return {"dtype": "uint8", "shape": [page_bytes]}
