"""Bytes of KV cache per token, for models that are known by name.

From the public configuration of each model (config.json on its model page): layers, KV heads and
size of a head; for DeepSeek's latent attention (MLA) the compressed vector and its rotary part, one
for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token leaves in the cache of every layer."""

    layers: int
    elements: int
    """Numbers per layer and token: `2 * kv_heads * head_size`, or `kv_lora_rank + rope` for MLA."""

    def bytes_per_token(self, element_bytes: int = BF16_BYTES) -> int:
        """Over all layers."""
        return self.layers * self.elements * element_bytes


def _attention(layers: int, kv_heads: int, head_size: int) -> KvShape:
    return KvShape(layers, 2 * kv_heads * head_size)


def _latent(layers: int, kv_lora_rank: int, rope: int) -> KvShape:
    return KvShape(layers, kv_lora_rank + rope)


MODELS = {
    "llama-3.1-8b": _attention(32, 8, 128),
    "llama-3.1-70b": _attention(80, 8, 128),
    "llama-3.1-405b": _attention(126, 8, 128),
    "mistral-7b-v0.3": _attention(32, 8, 128),
    "qwen3-8b": _attention(36, 8, 128),
    "qwen3-32b": _attention(64, 8, 128),
    "qwen3-30b-a3b": _attention(48, 4, 128),
    "qwen3-235b-a22b": _attention(94, 4, 128),
    "deepseek-v2-lite": _latent(27, 512, 64),
    "deepseek-v3": _latent(61, 512, 64),
}
"""By the name that `--model` takes."""


def kv_bytes_per_token(model: str) -> int:
    """In bfloat16. Raises `ConfigError` naming what there is."""
    if model not in MODELS:
        known = ", ".join(MODELS)
        raise ConfigError(
            f"--model: {model!r} is not known; use one of {known}, or --kv-bytes-per-token."
        )
    return MODELS[model].bytes_per_token()
