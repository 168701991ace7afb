"""Bytes of KV cache per token, for models that are known by name.

From the public configuration of each model (config.json on its model page): layers, KV heads and
size of a head; for DeepSeek's latent attention (MLA) the compressed vector and its rotary part, one
for all heads: as if the model had one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a token leaves in the cache of every layer."""

    layers: int
    kv_heads: int
    """KV heads per layer; 1 for MLA."""
    head_elements: int
    """Numbers per layer, head and token: `2 * head_size`, or `kv_lora_rank + rope` for MLA."""

    def bytes_per_token(self, element_bytes: int = BF16_BYTES, ranks: int = 1) -> int:
        """Over all layers, and all ranks of tensor parallelism: vLLM divides the KV heads among
        them, and where there are fewer heads than ranks each rank has a copy of one."""
        rank_heads = max(1, self.kv_heads // ranks)
        return self.layers * ranks * rank_heads * self.head_elements * element_bytes


def attention(layers: int, kv_heads: int, head_size: int) -> AttentionShape:
    """Keys and values of each head."""
    return AttentionShape(layers, kv_heads, 2 * head_size)


def latent(layers: int, kv_lora_rank: int, rope: int) -> AttentionShape:
    """MLA."""
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
"""By the name that `--model` takes."""
