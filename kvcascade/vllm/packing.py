"""Facts of the fingerprint about the order of numbers inside a KV page.

Attention packs keys and values for the machine that it runs on. A page that was packed otherwise
has the same size and is noise. vLLM does not name the format, so everything that it depends on is
compared:

- the platform; on a CPU its instruction sets, on a GPU the form of its 8-bit numbers. The
  scheduler's process knows them, since its workers run on the same host;
- the specifications of the KV groups;
- in a worker, the attention backend of each layer and the memory layout of its cache.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .generation import fp8_type, offered, platform_name
from .kv_layers import group_specs, specs_by_layer

_INSTRUCTION_SETS = ("avx512_f", "avx512_bf16", "amx_tile", "avx10_2", "bf16")
"""Instruction sets that decide how attention packs on a CPU (csrc/cpu/cpu_attn_*.hpp).

vLLM chooses one of its compiled parts by the first two. Attention packs for tiles (AMX), for tiles
of fp8 (which torch does not name and which came with AVX10.2), and on ARM for products of bfloat16.
"""
_SHUFFLED = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
"""Environment variable by which one backend puts the same numbers in another order."""
_CONTENT = (
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "shapes",
    "dtypes",
)
"""Fields of a KV cache specification that describe the inside of a page."""


def machine_facts() -> dict[str, str]:
    """Return the facts about the machine that pages depend on; the GPU's model is none of them."""
    kind, name = platform_name()
    facts = {"platform": name}
    if kind == "cpu":
        return facts | {"cpu": _cpu()}
    is_shuffled = os.environ.get(_SHUFFLED, "").lower() in ("1", "true")
    return facts | {"fp8": fp8_type(), "shuffled": str(is_shuffled)}


def group_facts(kv_config: Any | None, group_ids: Iterable[int]) -> dict[str, str]:
    """Return a fact for every KV group: the fields of its specification about a page's inside.

    `kv_config`: vLLM's `KVCacheConfig`, None if it was not found.
    """
    if kv_config is None:
        return {}
    return {f"content{n}": _content(spec) for n, spec in group_specs(kv_config, group_ids)}


def packing_of_layers(
    engine_config: Any | None, groups: Iterable[Sequence[str]], num_blocks: int
) -> str:
    """Return, per KV group, the attention backends of its layers and their caches' layouts.

    For a worker that has allocated its KV cache of `num_blocks`. The scheduler's process has the
    layers only if the one worker lives in it; otherwise the result is empty.
    """
    compilation = getattr(engine_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    return ";".join(
        " ".join(
            dict.fromkeys(_layer(layers[name], num_blocks) for name in group if name in layers)
        )
        for group in groups
    ).strip(";")


def _cpu() -> str:
    """Return architecture, the instruction set that attention uses for bfloat16, and all sets.

    vLLM's choice also depends on the type and on the sizes of heads and blocks; these are facts of
    their own.
    """
    import torch

    has: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    sets = (name for name in _INSTRUCTION_SETS if has.get(name))
    try:
        ask = offered("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa")
        isa = "unknown" if ask is None else str(ask(torch.bfloat16, 32, 64))
    except (ImportError, AttributeError, TypeError):  # a private function of vLLM
        isa = "unknown"
    return " ".join([platform.machine(), isa, *sets])


def _content(spec: Any) -> str:
    """Return the different contents of a group's layers."""
    return "; ".join(dict.fromkeys(map(_content_of_layer, specs_by_layer(spec).values())))


def _content_of_layer(spec: Any) -> str:
    said = {name: getattr(spec, name, None) for name in _CONTENT}
    return " ".join(f"{name}={value}" for name, value in said.items() if value is not None)


def _layer(layer: Any, num_blocks: int) -> str:
    """Return the class of a layer's backend, and sizes and order of every tensor of its cache."""
    ask = getattr(layer, "get_attn_backend", None)
    name = "" if ask is None else ask().__name__
    cache = getattr(layer, "kv_cache", None)
    tensors = cache if isinstance(cache, list | tuple) else [cache]
    lies = (_lies(each, num_blocks) for each in tensors if hasattr(each, "stride"))
    return ",".join([name, *lies])


def _lies(tensor: Any, num_blocks: int) -> str:
    """Return `1x2x32x128:0123`: sizes for one block; dimensions from the slowest to the fastest."""
    sizes = list(tensor.shape)
    blocks = next((i for i, size in enumerate(sizes) if size and size % num_blocks == 0), None)
    if blocks is not None:
        sizes[blocks] //= num_blocks
    strides = tensor.stride()
    order = sorted(range(len(sizes)), key=lambda i: (-strides[i], i))
    return f"{'x'.join(map(str, sizes))}:{''.join(map(str, order))}"
