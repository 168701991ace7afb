"""How numbers lie inside a KV page, beside what the model says: facts of the fingerprint.

Attention packs keys and values as suits the machine it runs on, and pages of equal size are noise
to one that packs otherwise. vLLM names no format, so everything is compared that it goes by: the
platform and, on a CPU, its instruction sets, which the scheduler's process knows (its workers are
on the same host); what the specifications of KV groups say; and in a worker, where the layers are,
the backend that was taken for each and how its cache lies in memory.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .generation import offered, platform_name
from .kv_layers import group_specs, specs_by_layer

_INSTRUCTION_SETS = ("avx512_f", "avx512_bf16", "amx_tile", "avx10_2", "bf16")
"""By the first two vLLM takes one of its compiled parts. Attention packs for tiles (AMX), otherwise
again for tiles of fp8, which torch does not name and which came with AVX10.2, and on ARM for
products of bfloat16 (csrc/cpu/cpu_attn_*.hpp)."""
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
"""What specifications say of a page's inside; backends may have written some of it."""


def machine_facts() -> dict[str, str]:
    """The kind of machine that computes, as far as pages depend on it: no model of a GPU."""
    kind, name = platform_name()
    facts = {"platform": name}
    return facts | {"cpu": _cpu()} if kind == "cpu" else facts


def group_facts(kv_config: Any | None, group_ids: Iterable[int]) -> dict[str, str]:
    """A fact for every KV group: what its specification says of a page's inside.

    `kv_config`: vLLM's `KVCacheConfig`, None if it was not found.
    """
    if kv_config is None:
        return {}
    return {f"content{n}": _content(spec) for n, spec in group_specs(kv_config, group_ids)}


def packing_of_layers(
    engine_config: Any | None, groups: Iterable[Sequence[str]], num_blocks: int
) -> str:
    """Per KV group: the attention backends of its layers, and how their caches lie in memory.

    For a worker that has its KV cache of `num_blocks`. The scheduler's process has the layers only
    if the one worker lives in it; elsewhere this is empty.
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
    """Architecture, what attention takes for the type it packs most for, and instruction sets.

    vLLM chooses by the type and by the sizes of heads and blocks, too; these are facts already.
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
    """The class of its backend, and sizes and order of every tensor of its cache."""
    ask = getattr(layer, "get_attn_backend", None)
    name = "" if ask is None else ask().__name__
    cache = getattr(layer, "kv_cache", None)
    tensors = cache if isinstance(cache, list | tuple) else [cache]
    lies = (_lies(each, num_blocks) for each in tensors if hasattr(each, "stride"))
    return ",".join([name, *lies])


def _lies(tensor: Any, num_blocks: int) -> str:
    """`1x2x32x128:0123`: sizes for one block; dimensions from the slowest to the fastest."""
    sizes = list(tensor.shape)
    blocks = next((i for i, size in enumerate(sizes) if size and size % num_blocks == 0), None)
    if blocks is not None:
        sizes[blocks] //= num_blocks
    strides = tensor.stride()
    order = sorted(range(len(sizes)), key=lambda i: (-strides[i], i))
    return f"{'x'.join(map(str, sizes))}:{''.join(map(str, order))}"
