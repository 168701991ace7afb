"""Bytes of KV cache per token of a model, from its `config.json`.

Per layer and token, an attention layer keeps a key and a value for each KV head. Multi-head latent
attention (DeepSeek-V2 and later) keeps one latent vector and the rotary part of one key instead.
Data that tensor parallelism does not divide is copied to each rank. `MODELS` lists models that are
known by name, from their public configurations.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, file_mode, is_folder

TYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
MAX_CONFIG_BYTES = 16 << 20
MAX_NUMBER = 1 << 24
"""Upper limit of the numbers in a configuration; no layer count or width of a model is larger."""
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """KV cache that one token takes in every layer."""

    layers: int
    kv_heads: int
    """KV heads per layer; 1 for MLA."""
    head_elements: int
    """Elements per layer, head and token: `2 * head_size`, or `kv_lora_rank + rope` for MLA."""

    def bytes_per_token(self, element_bytes: int = BF16_BYTES, ranks: int = 1) -> int:
        """Return the bytes over all layers and all ranks of tensor parallelism.

        vLLM divides the KV heads among the ranks. If there are fewer heads than ranks, each rank
        has a copy of one head.
        """
        rank_heads = max(1, self.kv_heads // ranks)
        return self.layers * ranks * rank_heads * self.head_elements * element_bytes


def attention(layers: int, kv_heads: int, head_size: int) -> AttentionShape:
    """Return the shape of attention with a key and a value per head."""
    return AttentionShape(layers, kv_heads, 2 * head_size)


def latent(layers: int, kv_lora_rank: int, rope: int) -> AttentionShape:
    """Return the shape of multi-head latent attention (MLA)."""
    return AttentionShape(layers, 1, kv_lora_rank + rope)


MODELS = {
    "llama-3.1-8b": attention(32, 8, 128),
    "llama-3.1-70b": attention(80, 8, 128),
    "llama-3.1-405b": attention(126, 8, 128),
    "mistral-7b-v0.3": attention(32, 8, 128),
    "qwen3-8b": attention(36, 8, 128),
    "qwen3-32b": attention(64, 8, 128),
    "qwen3-30b-a3b": attention(48, 4, 128),
    "qwen3-235b-a22b": attention(94, 4, 128),
    "deepseek-v2-lite": latent(27, 512, 64),
    "deepseek-v3": latent(61, 512, 64),
}
"""Models by the name that `--model` accepts."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Bytes of KV cache per token of a model."""

    bytes_per_token: int
    """Bytes over all layers and ranks, replicated data included."""
    note: str
    """Source of the figure."""


def kv_shape(model: str, kv_dtype: str | None = None, ranks: int = 1) -> KvShape:
    """Return the KV cache per token of a model.

    `model` is a folder with a `config.json`, a hub name in the local cache, or a known name.
    `kv_dtype` is vLLM's `--kv-cache-dtype`; by default it is the model's own type. `ranks` is the
    tensor parallel size. Raises `ConfigError`.
    """
    if model in MODELS and not os.path.exists(model):
        name = kv_dtype if kv_dtype not in (None, "auto") else "bfloat16"
        known = MODELS[model]
        per_token = known.bytes_per_token(_type_bytes(name), ranks)
        return KvShape(per_token, f"known by name, {name}")
    config, note = _load(model)
    text = config.get("text_config")
    if isinstance(text, Mapping) and "num_hidden_layers" in text:
        config = {**config, **text}
    layers = _number(config, "num_hidden_layers", model)
    name = kv_dtype if kv_dtype not in (None, "auto") else _dtype(config)
    item = _type_bytes(name)
    if "kv_lora_rank" in config:
        kept = latent(
            layers,
            _number(config, "kv_lora_rank", model),
            _number(config, "qk_rope_head_dim", model),
        )
        return KvShape(kept.bytes_per_token(item, ranks), f"{note}, latent, {name}")
    heads = _number(config, "num_attention_heads", model)
    kv_heads = heads
    if config.get("num_key_value_heads"):
        kv_heads = _number(config, "num_key_value_heads", model)
    if not config.get("head_dim"):
        config = {**config, "head_dim": _number(config, "hidden_size", model) // heads}
    head_dim = _number(config, "head_dim", model)
    per_token = attention(layers, kv_heads, head_dim).bytes_per_token(item, ranks)
    return KvShape(per_token, f"{note}, {kv_heads}×{head_dim} per layer, {name}")


def _type_bytes(name: str | None) -> int:
    if name is None or name not in TYPE_BYTES:
        known = ", ".join(TYPE_BYTES)
        raise ConfigError(f"--kv-dtype: {name!r} is unknown; use one of {known}")
    return TYPE_BYTES[name]


def _load(model: str) -> tuple[Mapping[str, Any], str]:
    path = Path(model)
    try:
        if is_folder(path):
            path = path / "config.json"
        is_file = stat.S_ISREG(file_mode(path))
    except OSError as error:
        raise ConfigError(f"--model: {path} cannot be read ({error.strerror})") from None
    if is_file:
        return _read(path), str(path)
    cached = _cached(model)
    if cached is not None:
        return _read(cached), "local hub cache"
    known = ", ".join(MODELS)
    raise ConfigError(
        f"--model: {model!r} is not a folder with a config.json, is not in the local hub cache, "
        f"and is none of {known}; give a folder, or --kv-bytes-per-token"
    )


def _cached(model: str) -> Path | None:
    """Return the configuration in the local hub cache, if there is one."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"--model: {path} is too large for a config.json")
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read ({error})") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"--model: {path} holds no JSON object")
    return document


def _number(config: Mapping[str, Any], name: str, model: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value <= MAX_NUMBER:
        raise ConfigError(
            f"--model: the config.json of {model} has no {name}; give --kv-bytes-per-token instead"
        )
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return name.removeprefix("torch.")
