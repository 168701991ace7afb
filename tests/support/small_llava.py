"""A small LLaVA: the Llama of `make_llama`, and a CLIP with random weights that sees images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from support.rare_requests import IMAGE_PIXELS
from support.small_models import HIDDEN, VOCAB, Drawer, write_model

from kvcascade.tools.dev.server import served_model

PATCH, SEEN, SEEN_INNER, SEEN_LAYERS = 14, 64, 128, 3
IMAGE_TOKENS = (IMAGE_PIXELS // PATCH) ** 2
"""Tokens of an image in the engine; a client sends one."""
IMAGE_TOKEN, IMAGE_WORD = VOCAB - 1, "<image>"
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": SEEN,
    "intermediate_size": SEEN_INNER,
    "num_hidden_layers": SEEN_LAYERS,
    "num_attention_heads": 4,
    "image_size": IMAGE_PIXELS,
    "patch_size": PATCH,
    "projection_dim": SEEN,
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": IMAGE_PIXELS},
    "crop_size": {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
}
PROCESSOR: dict[str, Any] = {
    "processor_class": "LlavaProcessor",
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": IMAGE_WORD,
}


def make_llava(folder: Path, seed: int = 0) -> Path:
    """Write the model with its tokenizer and its processor of images; return the folder."""
    target = served_model(folder, VOCAB, seed=seed)
    text = json.loads((target / "config.json").read_text())
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": VISION,
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": IMAGE_TOKENS,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "torch_dtype": "float32",
    }
    draw = Drawer(seed + 1)
    for name, weight in load_file(target / "model.safetensors").items():
        draw.weights[f"language_model.{name}"] = weight
    _draw_vision(draw)
    write_model(target, config, draw.weights)
    (target / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (target / "processor_config.json").write_text(json.dumps(PROCESSOR))
    _name_the_image_token(target / "tokenizer.json")
    return target


def _draw_vision(draw: Drawer) -> None:
    """Draw what sees, and what makes embeddings of it; all biases are zero."""

    def biased(name: str, rows: int, columns: int) -> None:
        draw.linear(name, rows, columns)
        draw.weights[f"{name}.bias"] = np.zeros(rows, dtype=np.float32)

    def norm(name: str) -> None:
        draw.norm(name, SEEN)
        draw.weights[f"{name}.bias"] = np.zeros(SEEN, dtype=np.float32)

    vision = "vision_tower.vision_model"
    draw.linear(f"{vision}.embeddings.patch_embedding", SEEN, 3 * PATCH * PATCH)
    patches = draw.weights[f"{vision}.embeddings.patch_embedding.weight"]
    shaped = patches.reshape(SEEN, 3, PATCH, PATCH)
    draw.weights[f"{vision}.embeddings.patch_embedding.weight"] = shaped
    draw.table(f"{vision}.embeddings.position_embedding", IMAGE_TOKENS + 1, SEEN)
    draw.weights[f"{vision}.embeddings.class_embedding"] = np.ones(SEEN, dtype=np.float32)
    norm(f"{vision}.pre_layrnorm")
    for layer in range(SEEN_LAYERS):
        name = f"{vision}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            biased(f"{name}.self_attn.{part}", SEEN, SEEN)
        norm(f"{name}.layer_norm1")
        biased(f"{name}.mlp.fc1", SEEN_INNER, SEEN)
        biased(f"{name}.mlp.fc2", SEEN, SEEN_INNER)
        norm(f"{name}.layer_norm2")
    norm(f"{vision}.post_layernorm")
    biased("multi_modal_projector.linear_1", HIDDEN, SEEN)
    biased("multi_modal_projector.linear_2", HIDDEN, HIDDEN)


def _name_the_image_token(file: Path) -> None:
    """Give the last word of the vocabulary a name that is found in any text."""
    tokenizer = json.loads(file.read_text())
    del tokenizer["model"]["vocab"][str(IMAGE_TOKEN)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": IMAGE_TOKEN, "content": IMAGE_WORD, "special": True, **flags}
    tokenizer["added_tokens"] = [added]
    file.write_text(json.dumps(tokenizer))
