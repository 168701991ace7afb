"""A small Llama with random weights, for the demo and for tests of the real engine.

Greedy tokens of this model depend on every block of the prompt. The weights are scaled so that
activations neither fade nor explode, and a damaged KV block therefore gives a wrong token. (Dummy
weights of an engine are near zero, and hide the damage.) The same arguments always give the same
files, byte for byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

WEIGHT_GAIN = 1.6
"""Standard deviation of a weight, times the square root of its fan-in."""

Weights = dict[str, npt.NDArray[np.float32]]


def make_llama(
    folder: str | os.PathLike[str],
    seed: int = 0,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    vocab: int = 1024,
    max_positions: int = 4096,
) -> Path:
    """Write `config.json` and `model.safetensors` to `folder`, which is created; return the folder.

    Load it with `skip_tokenizer_init=True` and `dtype="float32"`. There is no tokenizer, and only
    float32 gives the same tokens in any batch.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"hidden {hidden} must be a multiple of heads {heads}, and heads of kv_heads {kv_heads}"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    weights = _weights(config, seed)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def _weights(config: Mapping[str, object], seed: int) -> Weights:
    """Return all tensors of the model, in a fixed order, so that a seed determines the model."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv_hidden = sizes["num_key_value_heads"] * sizes["head_dim"]
    random = np.random.default_rng(seed)

    def linear(rows: int, columns: int) -> npt.NDArray[np.float32]:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(WEIGHT_GAIN / math.sqrt(columns))

    norm = np.ones(hidden, dtype=np.float32)
    embedding = random.standard_normal((sizes["vocab_size"], hidden), dtype=np.float32)
    weights: Weights = {"model.embed_tokens.weight": embedding}
    for layer in range(sizes["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": norm.copy(),
            f"{name}.self_attn.q_proj.weight": linear(hidden, hidden),
            f"{name}.self_attn.k_proj.weight": linear(kv_hidden, hidden),
            f"{name}.self_attn.v_proj.weight": linear(kv_hidden, hidden),
            f"{name}.self_attn.o_proj.weight": linear(hidden, hidden),
            f"{name}.post_attention_layernorm.weight": norm.copy(),
            f"{name}.mlp.gate_proj.weight": linear(inner, hidden),
            f"{name}.mlp.up_proj.weight": linear(inner, hidden),
            f"{name}.mlp.down_proj.weight": linear(hidden, inner),
        }
    weights["model.norm.weight"] = norm.copy()
    weights["lm_head.weight"] = linear(sizes["vocab_size"], hidden)
    return weights
