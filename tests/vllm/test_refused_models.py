"""What the engine would do wrong with the right blocks is refused.

Chunks with gaps; answers that end with what nobody computed; blocks that vLLM clears or gives away
before they are stored; models that the engine cannot continue
from cached blocks. Of these, MLA: vLLM runs DeepSeek's attention on a CPU, but without AMX it
cannot begin behind cached blocks, and its tokens are wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
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

from kvcascade.assembly.named import SPEC_NAME
from kvcascade.errors import ConfigError
from kvcascade.vllm import engine_facts, generation, plugin
from kvcascade.vllm.refusals import (
    refuse_answers,
    refuse_early_clearing,
    refuse_gaps,
    refuse_producers,
    refuse_useless,
)


def engine(*, mla: bool, is_off: bool) -> Any:
    """vLLM's configuration, as far as it is asked."""
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla),
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


SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=96)
STATE = MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))


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
