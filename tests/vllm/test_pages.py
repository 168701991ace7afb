"""KV tensors in backends' shapes become rows of bytes, one per block, without a copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcascade.errors import ConfigError
from kvcascade.vllm.kv_pages import Pages, from_canonical, from_tensors, require_whole

BLOCKS, HEADS, TOKENS, SIZE = 7, 2, 16, 8


class BlocksFirst:
    """A backend whose tensor begins with the blocks."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


class KeysThenValues:
    """A backend that keeps all keys before all values."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)


class BlocksLast:
    """A backend that scatters a block over the tensor."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_kv_heads, head_size, num_blocks, block_size)


def one_layer(tensor: Any, backend: Any) -> Pages:
    return from_tensors({"layer": tensor}, {"layer": backend}, BLOCKS)


def check_views(pages: Pages, tensor: torch.Tensor, marked: list[torch.Tensor]) -> None:
    """What the engine writes into a block shows in that block's row and in no other."""
    assert all(each.dtype == torch.int8 for each in pages.tensors)
    assert sum(each.numel() for each in pages.tensors) == tensor.numel() * tensor.element_size()
    tensor.zero_()
    for block, part in enumerate(marked):
        part.fill_(block + 1)
    for rows in pages.tensors:
        for block in range(BLOCKS):
            found = rows[block].view(tensor.dtype)
            assert bool((found == block + 1).all())


def test_keys_and_values_apart() -> None:
    tensor = torch.zeros(2, BLOCKS, HEADS, TOKENS, SIZE)
    pages = one_layer(tensor, KeysThenValues)
    page_bytes = HEADS * TOKENS * SIZE * 4
    assert [tuple(each.shape) for each in pages.tensors] == [(BLOCKS, page_bytes)] * 2
    assert pages.groups == [[(0, page_bytes), (1, page_bytes)]]
    check_views(pages, tensor, [tensor[:, block] for block in range(BLOCKS)])


def test_blocks_first() -> None:
    tensor = torch.zeros(BLOCKS, 2, HEADS, TOKENS, SIZE, dtype=torch.bfloat16)
    pages = one_layer(tensor, BlocksFirst)
    assert len(pages.tensors) == 1
    check_views(pages, tensor, list(tensor.unbind(0)))


def test_the_order_in_memory_decides() -> None:
    """Logical and physical order differ."""
    physical = torch.zeros(BLOCKS, 2, TOKENS, HEADS, SIZE)
    tensor = physical.permute(0, 1, 3, 2, 4)
    pages = one_layer(tensor, BlocksFirst)
    check_views(pages, tensor, list(tensor.unbind(0)))


def test_blocks_that_the_backend_divides() -> None:
    tensor = torch.zeros(2, 4 * BLOCKS, HEADS, TOKENS // 4, SIZE)
    pages = one_layer(tensor, KeysThenValues)
    assert [len(each) for each in pages.tensors] == [BLOCKS] * 2
    check_views(pages, tensor, [tensor[:, 4 * b : 4 * b + 4] for b in range(BLOCKS)])


def test_one_tensor_of_all_layers() -> None:
    tensor = torch.zeros(BLOCKS, 2, 5, HEADS, TOKENS, SIZE)
    pages = one_layer(tensor, BlocksFirst)
    assert len(pages.tensors) == 1
    check_views(pages, tensor, list(tensor.unbind(0)))


def test_several_layers_are_one_group() -> None:
    layers = {f"layer.{i}": torch.zeros(2, BLOCKS, HEADS, TOKENS, SIZE) for i in range(3)}
    pages = from_tensors(layers, dict.fromkeys(layers, KeysThenValues), BLOCKS)
    assert [tensor for tensor, _ in pages.groups[0]] == list(range(6))


@pytest.mark.parametrize(
    ("tensor", "backend", "word"),
    [
        ([torch.zeros(BLOCKS, 4)], BlocksFirst, "no attention cache"),
        (torch.zeros(HEADS, SIZE, BLOCKS, TOKENS), BlocksLast, "does not keep"),
        (torch.zeros(BLOCKS, 2, HEADS, TOKENS, 2 * SIZE)[..., :SIZE], BlocksFirst, "backend"),
    ],
)
def test_what_cannot_be_offloaded_is_named(tensor: Any, backend: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        one_layer(tensor, backend)


def test_canonical_caches_are_taken_as_they_are() -> None:
    tensor = torch.zeros(BLOCKS, 64, dtype=torch.int8)
    ref = SimpleNamespace(tensor_idx=0, page_size_bytes=48)
    caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=tensor)], group_data_refs=[[ref]])
    pages = from_canonical(caches)
    assert pages.tensors[0] is tensor
    assert pages.groups == [[(0, 48)]]


def rows(memory: torch.Tensor, start: int, page_bytes: int, stride: int) -> torch.Tensor:
    """One page of every block, in memory that others may have pages in, too."""
    return memory.as_strided((BLOCKS, page_bytes), (stride, 1), start)


def whole(tensors: list[torch.Tensor], groups: list[list[int]], names: list[int]) -> None:
    """`groups`: tensors of each group's layers; `names`: how many layers it is said to have."""
    refs = [[(tensor, 64) for tensor in group] for group in groups]
    layers = [[f"layer.{i}" for i in range(count)] for count in names]
    require_whole(Pages(tensors, refs), layers, block_bytes=192)


def test_whole_blocks_are_taken() -> None:
    memory = torch.zeros(3 * 64 * BLOCKS, dtype=torch.int8)
    apart = [rows(memory, i * 64 * BLOCKS, 64, 64) for i in range(3)]
    whole(apart, [[0, 1, 2]], [3])
    whole([rows(memory, 0, 192, 192)], [[0]], [3])  # side by side
    whole([rows(memory, i * 64, 64, 192) for i in range(3)], [[0, 1, 2]], [3])
    whole(apart, [[0, 1, 2], [2, 1]], [3, 2])  # groups that lie over each other
    whole(apart[:2], [[0], [1]], [1, 1])  # a third group is not offloaded
    whole(apart, [[0, 1, 2, 0]], [3])  # the last layer has no cache of its own
    whole(apart, [[0, 1, 2], []], [3, 0])  # a stage of a pipeline


def test_blocks_in_part_are_refused() -> None:
    memory = torch.zeros(3 * 64 * BLOCKS, dtype=torch.int8)
    apart = [rows(memory, i * 64 * BLOCKS, 64, 64) for i in range(3)]
    parts: list[tuple[list[torch.Tensor], list[list[int]], list[int]]] = [
        ([rows(memory, 0, 64, 64)], [[0]], [3]),
        ([rows(memory, 0, 64, 64)], [[0]], [1]),  # the first of three heads
        (apart[:2], [[0, 1]], [3]),
        (apart, [[0, 1, 2], [0]], [3, 2]),
        ([rows(memory, i * 64, 64, 64) for i in range(3)], [[0, 1, 2]], [3]),  # other blocks' bytes
        ([rows(memory, i * 32, 64, 192) for i in range(2)], [[0, 1]], [2]),
        ([rows(memory, 0, 64, 64), rows(memory, 64, 64, 128)], [[0, 1]], [2]),
    ]
    for tensors, groups, names in parts:
        with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT: .* LBHNC or BLHNC"):
            whole(tensors, groups, names)
