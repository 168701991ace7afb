"""The small model: same arguments, same bytes; another seed, another model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvcascade.tools.dev.model import make_llama

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 128}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        (make_llama(tmp_path / name, seed, **SMALL) / "model.safetensors").read_bytes()
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert first == again != other


def test_shapes_and_scale(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", **SMALL)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["head_dim"] == 16
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert weights["lm_head.weight"].shape == (128, 64)
    assert weights["lm_head.weight"].std() == pytest.approx(1.6 / 64**0.5, rel=0.05)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(1, rel=0.05)
    assert np.all(weights["model.norm.weight"] == 1)
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}


def test_shape_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of heads 5"):
        make_llama(tmp_path / "model", hidden=64, heads=5)
    assert not (tmp_path / "model").exists()
