"""Fields of the fingerprint from the engine's configuration: each one alone tells apart."""

from __future__ import annotations

from typing import Any

import pytest

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
    [("cache_dtype", "fp8"), ("prefix_caching_hash_algo", "xxhash")],
)
def test_a_changed_cache_is_another_namespace(field: str, value: str) -> None:
    config = engine()
    setattr(config.cache_config, field, value)
    assert fingerprint(config) != fingerprint(BASE)


def test_another_attention_backend_is_another_namespace() -> None:
    config = engine()
    config.attention_config.backend = "FLASHINFER"
    assert fingerprint(config) != fingerprint(BASE)


def test_where_the_model_lies_is_no_part_of_it() -> None:
    assert fingerprint(engine(hf={"_name_or_path": "elsewhere"})) == fingerprint(BASE)
