"""Small models of several architectures, with real random weights as `make_llama` draws them.

A damaged, missing or exchanged piece of their KV cache or state shows as another token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from kvcascade.tools.dev.model import WEIGHT_GAIN, make_llama

Weights = dict[str, npt.NDArray[np.float32]]
ADAPTER_RANK = 8
HIDDEN, INNER, LAYERS, VOCAB, POSITIONS = 256, 512, 4, 1024, 4096
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class Drawer:
    """Draws weights in a fixed order, so that a seed means one model."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.weights: Weights = {}

    def linear(self, name: str, rows: int, columns: int) -> None:
        """Draw a matrix that neither lets activations fade nor explode."""
        drawn = self._random.standard_normal((rows, columns), dtype=np.float32)
        self.weights[f"{name}.weight"] = drawn * np.float32(WEIGHT_GAIN / math.sqrt(columns))

    def norm(self, name: str, size: int) -> None:
        """Make a norm that changes no scale."""
        self.weights[f"{name}.weight"] = np.ones(size, dtype=np.float32)

    def table(self, name: str, *shape: int) -> None:
        """Draw numbers of variance 1."""
        self.weights[f"{name}.weight"] = self._random.standard_normal(shape, dtype=np.float32)


def write_model(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    """Write what `vllm` loads; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def make_sliding_llama(folder: Path, window: int = 96) -> Path:
    """A Llama whose layers take turns: full attention, and a window of `window` tokens."""
    target = make_llama(folder)
    config = json.loads((target / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    config["sliding_window"] = window
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def make_eagle(folder: Path, vocab: int, seed: int = 4) -> Path:
    """An EAGLE head for a Llama with this vocabulary: one layer, whose K and V a block holds, too.

    It has learned nothing, so most of its proposals are refused.
    """
    target = make_llama(folder, seed, layers=1, vocab=vocab)
    config = json.loads((target / "config.json").read_text())
    draw = Drawer(seed)
    draw.linear("fc", HIDDEN, 2 * HIDDEN)
    for name, weight in load_file(target / "model.safetensors").items():
        if name.startswith("model.layers.") and "input_layernorm" not in name:
            draw.weights[name.removeprefix("model.")] = weight
    return write_model(target, config, draw.weights)


def make_int8_llama(folder: Path, seed: int = 0) -> Path:
    """`make_llama` with 8-bit weights, one scale per row; activations are quantised per token."""
    target = make_llama(folder, seed)
    stored: dict[str, npt.NDArray[Any]] = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = np.abs(weight).max(axis=1, keepdims=True) / 127
            stored[f"{name}_scale"] = scale
            weight = np.rint(weight / scale).astype(np.int8)
        stored[name] = weight
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for `make_llama` that changes K and V of every layer, and so every block."""
    random = np.random.default_rng(seed)
    weights: Weights = {}
    for layer in range(LAYERS):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (ADAPTER_RANK, HIDDEN)), ("B", (HIDDEN // 2, ADAPTER_RANK))):
                drawn = random.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[1])
                weights[f"{name}.lora_{part}.weight"] = drawn.astype(np.float32)
    config = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def make_mla(folder: Path, seed: int = 0) -> Path:
    """A DeepSeek V2 without experts: multi-head latent attention."""
    heads, nope, rope, value, rank = 4, 64, 64, 64, 512
    config = COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    draw = Drawer(seed)
    draw.table("model.embed_tokens", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        draw.norm(f"{name}.input_layernorm", HIDDEN)
        draw.linear(f"{name}.self_attn.q_proj", heads * (nope + rope), HIDDEN)
        draw.linear(f"{name}.self_attn.kv_a_proj_with_mqa", rank + rope, HIDDEN)
        draw.norm(f"{name}.self_attn.kv_a_layernorm", rank)
        draw.linear(f"{name}.self_attn.kv_b_proj", heads * (nope + value), rank)
        draw.linear(f"{name}.self_attn.o_proj", HIDDEN, heads * value)
        draw.norm(f"{name}.post_attention_layernorm", HIDDEN)
        draw.linear(f"{name}.mlp.gate_proj", INNER, HIDDEN)
        draw.linear(f"{name}.mlp.up_proj", INNER, HIDDEN)
        draw.linear(f"{name}.mlp.down_proj", HIDDEN, INNER)
    draw.norm("model.norm", HIDDEN)
    draw.linear("lm_head", VOCAB, HIDDEN)
    return write_model(folder, config, draw.weights)


def make_state_space(folder: Path, seed: int = 0) -> Path:
    """An LFM2: layers that keep a state (short convolutions) between layers of attention."""
    heads, kv_heads, kernel = 8, 4, 3
    head = HIDDEN // heads
    kinds = ["conv", "full_attention"] * (LAYERS // 2)
    config = COMMON | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "block_ff_dim": INNER,
        "block_auto_adjust_ff_dim": False,
        "block_dim": HIDDEN,
        "conv_L_cache": kernel,
        "conv_bias": False,
        "conv_dim": HIDDEN,
        "layer_types": kinds,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "tie_embedding": True,
    }
    draw = Drawer(seed)
    draw.table("model.embed_tokens", VOCAB, HIDDEN)
    for layer, kind in enumerate(kinds):
        name = f"model.layers.{layer}"
        draw.norm(f"{name}.operator_norm", HIDDEN)
        if kind == "conv":
            draw.linear(f"{name}.conv.in_proj", 3 * HIDDEN, HIDDEN)
            draw.table(f"{name}.conv.conv", HIDDEN, 1, kernel)
            draw.linear(f"{name}.conv.out_proj", HIDDEN, HIDDEN)
        else:
            draw.linear(f"{name}.self_attn.q_proj", HIDDEN, HIDDEN)
            draw.linear(f"{name}.self_attn.k_proj", kv_heads * head, HIDDEN)
            draw.linear(f"{name}.self_attn.v_proj", kv_heads * head, HIDDEN)
            draw.linear(f"{name}.self_attn.out_proj", HIDDEN, HIDDEN)
            draw.norm(f"{name}.self_attn.q_layernorm", head)
            draw.norm(f"{name}.self_attn.k_layernorm", head)
        draw.norm(f"{name}.ffn_norm", HIDDEN)
        draw.linear(f"{name}.feed_forward.w1", INNER, HIDDEN)
        draw.linear(f"{name}.feed_forward.w3", INNER, HIDDEN)
        draw.linear(f"{name}.feed_forward.w2", HIDDEN, INNER)
    draw.norm("model.embedding_norm", HIDDEN)
    return write_model(folder, config, draw.weights)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "sliding": make_sliding_llama,
    "mla": make_mla,
    "state_space": make_state_space,
}
"""Every architecture by name."""
