"""Fields of the fingerprint from the engine's configuration: each one alone tells apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.kv_bytes import Shape, offloading_config

from kvcascade import vllm_facts
from kvcascade.tiers.nvme.namespace import NamespaceKey


class Stub:
    """An object with these fields; what is not there is not there."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class HfConfig:
    """A model's own configuration."""

    def __init__(self, **fields: Any) -> None:
        self._fields = {"hidden_size": 64, "_name_or_path": "here", **fields}

    def to_dict(self) -> dict[str, Any]:
        """As transformers gives it."""
        return dict(self._fields)


def engine(hf: dict[str, Any] | None = None, **model: Any) -> Any:
    """What of an engine's configuration is looked at."""
    fields = {"quantization": None, "dtype": "torch.float16", "hf_overrides": {}, **model}
    cache = Stub(cache_dtype="auto", prefix_caching_hash_algo="sha256")
    return Stub(
        model_config=Stub(hf_config=HfConfig(**(hf or {})), **fields),
        cache_config=cache,
        attention_config=Stub(backend=None),
    )


def fingerprint(config: Any) -> str:
    return NamespaceKey("label", vllm_facts.model_facts(config)).fingerprint


BASE = engine()
CHANGED: dict[str, Any] = {
    "quantisation": engine(quantization="fp8"),
    "quantisation while loading": engine(quantization_config={"linear": "fp8_per_block"}),
    "quantisation in the checkpoint": engine(hf={"quantization_config": {"bits": 4}}),
    "dtype": engine(dtype="torch.bfloat16"),
    "overrides": engine(hf_overrides={"rope_theta": 1e6}),
    "configuration": engine(hf={"rope_theta": 1e6}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_model_is_another_namespace(name: str) -> None:
    assert fingerprint(CHANGED[name]) != fingerprint(BASE)
    assert fingerprint(engine()) == fingerprint(BASE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_dtype", "fp8"),
        ("prefix_caching_hash_algo", "xxhash"),
        ("mamba_cache_dtype", "float32"),
        ("mamba_ssm_cache_dtype", "bfloat16"),
    ],
)
def test_a_changed_cache_is_another_namespace(field: str, value: str) -> None:
    config = engine()
    setattr(config.cache_config, field, value)
    assert fingerprint(config) != fingerprint(BASE)


def test_another_attention_backend_is_another_namespace() -> None:
    config = engine()
    config.attention_config.backend = "FLASHINFER"
    assert fingerprint(config) != fingerprint(BASE)


def test_another_order_of_a_state_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(engine())
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert fingerprint(engine()) != before


def test_another_layout_is_another_namespace() -> None:
    """The order of heads and tokens in a page, which changes no size."""
    modern = pytest.importorskip("kvcascade.vllm_modern")
    config = offloading_config(Shape(pages=(1024,)), {}, "engine", 0)
    if not hasattr(config, "kv_cache_layout"):
        pytest.skip("this vLLM has it from the workers: see test_layers.py")
    facts = [
        modern.shape_facts(replace(config, kv_cache_layout=layout))
        for layout in ("LBHNC", "LBNHC", "BLHNC", None)
    ]
    assert len({NamespaceKey("label", each).fingerprint for each in facts}) == 4


def test_weights_elsewhere_are_not_those_of_the_local_folder() -> None:
    config = engine(model="/local", model_weights="s3://bucket/llama", revision=None)
    config.load_config = Stub(load_format="runai_streamer")
    assert vllm_facts.weights_facts(config) == ("s3://bucket/llama", None, True)


def test_what_the_loader_is_told_is_part_of_it() -> None:
    config = engine()
    config.load_config = Stub(model_loader_extra_config={"tensorizer_uri": "s3://bucket/llama"})
    assert fingerprint(config) != fingerprint(BASE)


def test_a_model_that_drafts_has_an_identity_of_its_own() -> None:
    config = engine(model="/models/llama", revision=None)
    assert vllm_facts.draft_facts(config) is None
    config.speculative_config = Stub(draft_model_config=config.model_config)
    assert vllm_facts.draft_facts(config) is None, "the model drafts for itself"
    config.speculative_config = Stub(draft_model_config=Stub(model="/models/eagle", revision=None))
    assert vllm_facts.draft_facts(config) == ("/models/eagle", None)


def test_where_the_model_lies_is_no_part_of_it() -> None:
    assert fingerprint(engine(hf={"_name_or_path": "elsewhere"})) == fingerprint(BASE)
