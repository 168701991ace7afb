"""What the engine would do wrong with the right blocks is refused.

Chunks with gaps; answers that end with what nobody computed; blocks that vLLM clears or gives away
before they are stored; blocks that depend on later tokens; options that need every token computed;
models that the engine cannot continue from cached blocks. Of these, MLA: vLLM runs DeepSeek's
attention on a CPU, but without AMX it cannot begin behind cached blocks, and its tokens are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, ModelConfig, PoolerConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcascade.assembly.named import SPEC_NAME, configured
from kvcascade.errors import ConfigError
from kvcascade.vllm import engine_facts, generation, plugin
from kvcascade.vllm.refusals import (
    refuse_answers,
    refuse_early_clearing,
    refuse_gaps,
    refuse_producers,
    refuse_routed_experts,
    refuse_useless,
    refuse_wrong_stores,
)
from kvcascade.vllm.scheduler_side import namespace_key


def engine(*, mla: bool = False, is_off: bool = False, **of_model: Any) -> Any:
    """vLLM's configuration, as far as it is asked."""
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla, **of_model),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=not is_off),
        cache_config=SimpleNamespace(enable_prefix_caching=not is_off),
    )


def test_an_engine_that_cannot_continue_a_prefix_is_refused() -> None:
    refuse_useless(None)
    for config in (engine(mla=False, is_off=True), engine(mla=True, is_off=False)):
        refuse_useless(config)
    assert not engine_facts.continues_prefixes(engine(mla=True, is_off=True))
    with pytest.raises(ConfigError, match="MLA"):
        refuse_useless(engine(mla=True, is_off=True))


@pytest.mark.parametrize("runner", ["generate", "pooling"])
@pytest.mark.parametrize("is_supported", [False, True])
def test_a_pooling_model_that_needs_whole_prompts_is_refused(
    runner: str, is_supported: bool
) -> None:
    config = engine(runner_type=runner, is_prefix_caching_supported=is_supported, is_off=True)
    if is_supported or runner == "generate":
        refuse_useless(config)
        return
    with pytest.raises(ConfigError, match="MEAN"):
        refuse_useless(config)


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_vllm_says_which_pooling_needs_whole_prompts(pooling: Any) -> None:
    model = object.__new__(ModelConfig)  # a whole one would read a model's files
    vars(model).update(
        runner_type="pooling",
        hf_config=SimpleNamespace(is_causal=True),
        pooler_config=PoolerConfig(seq_pooling_type=pooling),
        _model_info=SimpleNamespace(default_seq_pooling_type="LAST", attn_type="decoder"),
    )
    needs_all = engine_facts.pools_whole_prompts(SimpleNamespace(model_config=model))
    assert needs_all == (pooling != "LAST")


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("of_model", [False, True], ids=["from 0.32 on", "up to 0.31"])
def test_experts_of_tokens_that_are_loaded_are_not_promised(
    of_model: bool, has_experts: bool
) -> None:
    refuse_routed_experts(None)
    config = engine(**({"enable_return_routed_experts": has_experts} if of_model else {}))
    if not of_model:
        config.aux_output_config = SimpleNamespace(enabled=has_experts)
    if not has_experts:
        refuse_routed_experts(config)
        return
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        refuse_routed_experts(config)


@pytest.mark.parametrize(
    "config",
    [
        engine(mla=True, is_off=True),
        engine(runner_type="pooling", is_prefix_caching_supported=False),
        engine(enable_return_routed_experts=True),
    ],
    ids=["attention", "pooling", "experts"],
)
def test_every_version_asks_before_a_tier_is_opened(config: Any) -> None:
    settings = configured({"tiers": [{"type": "cpu", "capacity": "1MiB"}]}, environment={})
    with pytest.raises(ConfigError, match="leave"):
        namespace_key(settings, config, "model", {})


SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=96)
STATE = MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))


@dataclass(frozen=True, kw_only=True)
class LooksAhead(FullAttentionSpec):
    """Attention of a prefix LM; early versions of vLLM lack the field."""

    non_causal: bool = True


@dataclass(frozen=True, kw_only=True)
class AnswerWindow(FullAttentionSpec):
    """vLLM's `RSWASpec`; early versions lack it."""

    rswa_window: int = 128


def stores(*specs: Any, **extra: Any) -> None:
    """Ask about an engine with these KV groups and these keys in its configuration."""
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["l0"], spec) for spec in specs])
    config: Any = SimpleNamespace(
        groups=[SimpleNamespace() for _ in specs],
        cache=SimpleNamespace(blocks_per_chunk=1),
        extra_config=extra,
    )
    refuse_wrong_stores(config, cache, None)


def of_two_layers(spec: Any) -> Any:
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"l0": FULL, "l1": spec})


@pytest.mark.parametrize("spec", [LooksAhead(**SHAPE), of_two_layers(LooksAhead(**SHAPE))])
def test_blocks_that_depend_on_later_tokens_are_refused(spec: Any) -> None:
    stores(FULL, STATE)
    with pytest.raises(ConfigError, match="later tokens"):
        stores(FULL, spec)


@pytest.mark.parametrize("spec", [AnswerWindow(**SHAPE), of_two_layers(AnswerWindow(**SHAPE))])
def test_answers_behind_a_window_of_their_own_are_refused(
    spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, 32))
    stores(FULL, spec)
    stores(FULL, spec, offload_prompt_only=True)
    stores(FULL, WINDOW, offload_prompt_only=False)
    with pytest.raises(ConfigError, match="offload_prompt_only: .* leave it out"):
        stores(FULL, spec, offload_prompt_only=False)


def test_vllm_names_both_as_expected() -> None:
    for name in ("non_causal", "rswa_window"):
        specs = [FullAttentionSpec, generation.offered("vllm.v1.kv_cache_interface", "RSWASpec")]
        known = {field for spec in specs if spec for field in spec.__dataclass_fields__}
        assert name in known or generation.vllm_version() < (0, 30)


@pytest.mark.parametrize(
    "spec",
    [
        WINDOW,
        ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64),
        STATE,
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"l0": WINDOW}),
    ],
    ids=["window", "chunks", "state", "several of a window"],
)
def test_chunks_with_gaps_are_refused(spec: Any) -> None:
    refuse_gaps([FULL, spec], 1)
    with pytest.raises(ConfigError, match=r"blocks_per_chunk: 4 .* leave blocks_per_chunk and"):
        refuse_gaps([FULL, spec], 4)


def test_full_attention_has_chunks_of_any_size() -> None:
    both = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"l0": FULL, "l1": FULL})
    refuse_gaps([FULL, MLAAttentionSpec(**SHAPE), both], 4)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
def test_vllm_keeps_freed_blocks_for_connectors_that_load(role: Any) -> None:
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role=role)
    if transfer.is_kv_consumer:
        refuse_producers(SimpleNamespace(kv_transfer_config=transfer))
        return
    with pytest.raises(ConfigError, match='use "kv_both"'):
        refuse_producers(SimpleNamespace(kv_transfer_config=transfer))


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("spec", [FULL, STATE], ids=["attention", "state"])
def test_blocks_that_are_cleared_before_they_are_stored_are_refused(spec: Any, is_v2: bool) -> None:
    engine_config = SimpleNamespace(use_v2_model_runner=is_v2)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["l0"], spec)])
    if not is_v2 or not getattr(cache, "needs_kv_cache_zeroing", False):
        refuse_early_clearing(engine_config, cache)
        return
    assert spec is STATE
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_early_clearing(engine_config, cache)


@pytest.mark.parametrize("minor", [24, 25, 26, 27, 28, 29, 30, 33])
def test_answers_are_offloaded_where_vllm_leaves_their_end_out(
    minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, minor))
    for fine in ({}, {"offload_prompt_only": True}):
        refuse_answers(fine)
    if not 26 <= minor <= 29:
        refuse_answers({"offload_prompt_only": False})
        return
    with pytest.raises(ConfigError, match=r"offload_prompt_only: .* install vLLM 0\.30"):
        refuse_answers({"offload_prompt_only": False})


def test_answers_are_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, 28))
    extra = {
        "spec_name": SPEC_NAME,
        "tiers": [{"type": "cpu", "capacity": "1MiB"}],
        "offload_prompt_only": False,
    }
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(ConfigError, match="offload_prompt_only"):
        plugin.register()
    assert vllm_config.kv_transfer_config is transfer, "the plugin finds it in this frame"
