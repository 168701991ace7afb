"""Present the KV cache tensors of a worker as pages: one row of bytes per device block.

No byte is copied: every page is a view of the engine's own tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

_MANY = 1234
"""Number of blocks to ask a backend about; no other dimension of a tensor has this size."""


@dataclass(frozen=True, slots=True)
class Pages:
    """All KV tensors of a worker, as rows of bytes."""

    tensors: list[torch.Tensor]
    """int8, shape `(num_blocks, page_bytes)`."""
    groups: list[list[tuple[int, int]]]
    """For each KV group, (tensor index, page bytes without padding) of every layer."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the device's KV cache."""
        return int(self.tensors[0].shape[0])


def from_canonical(kv_caches: Any) -> Pages:
    """Return the pages of vLLM's `CanonicalKVCaches` (0.19 and newer), which are pages already."""
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
    """Return the pages of tensors in the shapes of their attention backends (up to 0.18).

    There is one tensor per layer, or one of all layers. Where a backend keeps keys and values
    apart, each becomes a tensor of its own. Blocks that a backend divides further are put together
    again. Raises `ConfigError` for state-space layers, whose caches are lists.
    """
    tensors: list[torch.Tensor] = []
    for name, cache in kv_caches.items():
        if isinstance(cache, list | tuple):
            raise ConfigError(
                f"the KV cache of layer {name} is no attention cache; kvcascade needs vLLM 0.27 or "
                f"newer for such models: upgrade vLLM"
            )
        physical, outer = _in_memory_order(cache, attn_backends[name])
        plain = cache.permute(physical)
        if not plain.is_contiguous():
            raise ConfigError(
                f"the KV cache of layer {name} has gaps, which is not supported; choose another "
                "attention backend"
            )
        flat = plain.reshape(*plain.shape[:outer], num_blocks, -1).view(_int8())
        tensors += flat.unbind(0) if outer else [flat]
    refs = [(index, int(tensor.shape[1])) for index, tensor in enumerate(tensors)]
    return Pages(tensors, [refs])


def require_whole(pages: Pages, layers: Sequence[Sequence[str]], block_bytes: int) -> None:
    """Raise `ConfigError` unless a block's pages cover all of that block and nothing of another.

    vLLM describes a block layer by layer, or as one tensor if it takes the layers to be adjacent.
    It takes them to be adjacent even if the heads of a layer lie apart or a gap follows each page;
    the tensor then covers only a part of the block. It may also describe adjacent layers of states
    one by one.
    `layers`: names per KV group; `block_bytes`: size of a block of all layers, as vLLM states it.
    """
    if len(pages.tensors) == 1:
        is_whole = pages.tensors[0].shape[1] == block_bytes
    else:
        has_all = all(
            len(refs) >= len(names) for refs, names in zip(pages.groups, layers, strict=True)
        )
        is_whole = has_all and not any(
            starmap(_have_bytes_in_common, combinations(pages.tensors, 2))
        )
    if not is_whole:
        raise ConfigError(
            "VLLM_KV_CACHE_LAYOUT: in the layout of this KV cache vLLM does not hand over whole "
            "blocks, so parts of them would be lost; set it to another one, LBHNC or BLHNC"
        )


def _have_bytes_in_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors overlap; rows of equal stride may be interleaved without that."""
    first, second = sorted((one, other), key=lambda each: each.data_ptr())
    rows, page_bytes = first.shape
    stride, apart = first.stride(0), second.data_ptr() - first.data_ptr()
    if apart >= (rows - 1) * stride + page_bytes:
        return False
    gap = stride - apart % stride
    return stride != second.stride(0) or gap < second.shape[1] or apart % stride < page_bytes


def _in_memory_order(cache: torch.Tensor, backend: Any) -> tuple[list[int], int]:
    """Return the dimensions from slowest to fastest, and how many come before that of blocks."""
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


def _int8() -> torch.dtype:
    import torch

    return torch.int8
