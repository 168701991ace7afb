"""KV cache tensors as vLLM's workers hand them over, as pages: one row of bytes per device block.

No byte is copied: every page is a view of the engine's own tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

_MANY = 1234
"""A number of blocks that is no other dimension of a tensor."""


@dataclass(frozen=True, slots=True)
class Pages:
    """All KV tensors of a worker."""

    tensors: list[torch.Tensor]
    """int8, shape `(num_blocks, page_bytes)`."""
    groups: list[list[tuple[int, int]]]
    """Per KV group, (tensor index, page bytes without padding) of every layer."""
    order: str = ""
    """How the inside of a page is arranged, as far as the tensors show it."""


def from_canonical(kv_caches: Any) -> Pages:
    """Of vLLM's `CanonicalKVCaches` (0.19 and newer), which are in pages already."""
    return Pages(
        [each.tensor for each in kv_caches.tensors],
        [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


def from_tensors(
    kv_caches: Mapping[str, Any], attn_backends: Mapping[str, Any], num_blocks: int
) -> Pages:
    """Of one tensor per layer in its attention backend's shape, or one of all layers (to 0.18).

    Keys and values lie apart in some backends: they are two tensors then. Blocks that the backend
    divides further are put together again. Raises `ConfigError` for state-space layers, whose
    caches are lists.
    """
    tensors: list[torch.Tensor] = []
    orders: list[str] = []
    for name, cache in kv_caches.items():
        if isinstance(cache, list | tuple):
            raise ConfigError(
                f"the KV cache of layer {name} is no attention cache; kvcascade needs vLLM 0.27 or "
                f"newer for such models: upgrade vLLM"
            )
        physical, outer = _in_memory_order(cache, attn_backends[name])
        orders.append(",".join(map(str, physical)))
        plain = cache.permute(physical)
        if not plain.is_contiguous():
            raise ConfigError(f"the KV cache of layer {name} has gaps; this layout is unsupported")
        flat = plain.reshape(*plain.shape[:outer], num_blocks, -1).view(_int8())
        tensors += flat.unbind(0) if outer else [flat]
    refs = [(index, int(tensor.shape[1])) for index, tensor in enumerate(tensors)]
    return Pages(tensors, [refs], ";".join(dict.fromkeys(orders)))


def _in_memory_order(cache: torch.Tensor, backend: Any) -> tuple[list[int], int]:
    """The tensor's dimensions from the slowest to the fastest, and how many come before blocks."""
    shape = backend.get_kv_cache_shape(
        num_blocks=_MANY, block_size=16, num_kv_heads=8, head_size=256
    )
    strides = cache.stride()
    physical = sorted(range(cache.dim()), key=lambda i: (-strides[i], i))
    if cache.dim() > len(shape):  # all layers in one, already in the order of memory
        return physical, 0
    outer = physical.index(shape.index(_MANY))
    if outer > 1 or (outer == 1 and cache.shape[physical[0]] != 2):
        raise ConfigError(
            f"the KV cache of shape {tuple(cache.shape)} does not keep a block's bytes together; "
            f"this attention backend is unsupported: choose another one"
        )
    return physical, outer


def page_order() -> str:
    """vLLM's name of the order of heads and tokens in a page; empty if it does not say.

    Asked of versions that do not put it into the scheduler's configuration; in a worker.
    """
    from vllm.v1.attention.backends import utils

    ask = getattr(utils, "get_kv_cache_layout", None)
    return "" if ask is None else str(ask())


def _int8() -> torch.dtype:
    import torch

    return torch.int8
