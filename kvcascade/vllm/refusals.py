"""Refuse engines that would crash or give wrong tokens even with correct blocks.

The cause lies in vLLM's own scheduler or attention and cannot be seen from the blocks it offers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..config.schema import CascadeConfig
from ..errors import ConfigError
from . import engine_facts, generation
from .kv_layers import group_specs, numbered_groups, specs_by_layer

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def refuse_platform() -> None:
    """Raise `ConfigError` if vLLM runs on devices that no copier supports.

    If vLLM has found no device, it stops by itself.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind not in ("", "cpu", "cuda"):  # ROCm says cuda
        raise ConfigError(
            f"kv_transfer_config: kvcascade copies KV caches of CUDA and ROCm GPUs and of CPUs, "
            f"and this vLLM runs on {kind!r}; leave kv_transfer_config out"
        )


def refuse_useless(engine_config: Any | None) -> None:
    """Raise `ConfigError` if attention or pooling cannot continue from cached blocks."""
    if engine_config is None:
        return
    if engine_facts.pools_whole_prompts(engine_config):
        raise ConfigError(
            "kv_transfer_config: vLLM supports no prefix caching for this pooling model (its "
            "pooling is MEAN, CLS or STEP, or its attention is not that of a plain decoder), so a "
            "loaded block may crash the engine or change its results; leave kv_transfer_config out"
        )
    if not engine_facts.continues_prefixes(engine_config):
        raise ConfigError(
            "kv_transfer_config: vLLM cannot continue a model with MLA from cached blocks on this "
            "machine (it turns its own prefix cache off), so offloading would give wrong tokens; "
            "leave kv_transfer_config out, or use a GPU or a CPU with AMX"
        )


def refuse_routed_experts(engine_config: Any | None) -> None:
    """Raise `ConfigError` if answers shall name the experts of tokens that are loaded.

    vLLM keeps the experts beside its own prefix cache. What it lacks there ends the engine from
    0.32 on, and is replaced by experts of other tokens in earlier versions.
    """
    model = getattr(engine_config, "model_config", None)
    later = getattr(engine_config, "aux_output_config", None)  # has the option from 0.32 on
    if getattr(model, "enable_return_routed_experts", False) or getattr(later, "enabled", False):
        raise ConfigError(
            "--enable-return-routed-experts: vLLM does not know the experts of tokens whose blocks "
            "are loaded, so that a hit may crash the engine; leave it out, or leave "
            "kv_transfer_config out"
        )


def refuse_encoders(engine_config: Any | None) -> None:
    """Raise `ConfigError` for an encoder-decoder model: vLLM's scheduler asserts that it is none.

    It does so in every version, after the model is loaded.
    """
    model = getattr(engine_config, "model_config", None)
    if getattr(model, "is_encoder_decoder", False):
        raise ConfigError(
            "kv_transfer_config: vLLM has no KV connectors for encoder-decoder models; leave it out"
        )


def refuse_separate_ranks(parallel_config: Any, workers: int) -> None:
    """Raise `ConfigError` if the ranks of an engine cannot share the memory of the CPU tier.

    The tier itself would find that out by waiting for ranks that do not come.
    """
    launcher = getattr(parallel_config, "distributed_executor_backend", None)
    if launcher == engine_facts.EXTERNAL_LAUNCHER and workers > 1:
        raise ConfigError(
            f'distributed_executor_backend: "{launcher}" starts an engine for each rank, and '
            'kvcascade needs one for all ranks; use "mp", or leave kv_transfer_config out'
        )
    hosts = getattr(parallel_config, "nnodes_within_dp", 1)
    if hosts > 1 and not _is_of_this_host(getattr(parallel_config, "master_addr", "")):
        raise ConfigError(
            f"nnodes: kvcascade needs all ranks of an engine on one host, and here they are on "
            f"{hosts}; use data parallelism between hosts, or leave kv_transfer_config out"
        )


def _is_of_this_host(address: str) -> bool:
    """Return True if this host may listen at an address: its ranks may all be here."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True


def refuse_records(settings: CascadeConfig) -> None:
    """Raise `ConfigError` if requests shall be recorded; for vLLM 0.16 to 0.19."""
    if settings.record is not None:
        raise ConfigError(
            "record: vLLM 0.16 to 0.19 do not tell requests apart, so none can be recorded; leave "
            "it out, or install vLLM 0.24 or newer"
        )


def refuse_other_connectors(has_others: bool) -> None:
    """Raise `ConfigError` if another connector may load into blocks that are still being stored.

    The stored bytes would be another request's, under a valid checksum. `has_others`: whether vLLM
    makes connectors beside ours.
    """
    if has_others and not generation.sees_blocks_of_other_connectors():
        raise ConfigError(
            "kv_connector: before the release of vLLM 0.33, another connector in a MultiConnector "
            "may overwrite blocks while they are stored, so that later requests would get wrong "
            "tokens; leave the other connectors out, or install vLLM 0.33.0 or a later release"
        )


def refuse_wrong_stores(
    config: OffloadingConfig, kv_config: Any | None, engine_config: Any | None
) -> None:
    """Raise `ConfigError` if this vLLM would store blocks with bytes that are not theirs.

    `kv_config`: vLLM's `KVCacheConfig`, which knows the kinds of the KV groups. `engine_config`:
    its `VllmConfig`. None for one that was not found.
    """
    refuse_answers(config.extra_config)
    refuse_producers(engine_config)
    refuse_early_clearing(engine_config, kv_config)
    if kv_config is not None:
        specs = [spec for _, spec in group_specs(kv_config, numbered_groups(config))]
        refuse_lookahead(specs)
        refuse_answer_windows(specs, config.extra_config)
        refuse_gaps(specs, config.cache.blocks_per_chunk)


def refuse_producers(engine_config: Any | None) -> None:
    """Raise `ConfigError` if vLLM frees blocks that a running step may still be stored from.

    With overlapping steps, vLLM delays the release of blocks only for connectors that load.
    """
    transfer = getattr(engine_config, "kv_transfer_config", None)
    if getattr(transfer, "kv_role", None) == "kv_producer":
        raise ConfigError(
            'kv_role: with "kv_producer", vLLM gives blocks to other requests before they are '
            'stored, so that later requests would get wrong tokens; use "kv_both"'
        )


def refuse_early_clearing(engine_config: Any | None, kv_config: Any | None) -> None:
    """Raise `ConfigError` if vLLM clears reused blocks before it launches stores that read them.

    Model Runner V2 clears and copies blocks in `update_requests`. The stores of earlier steps
    follow in `ActiveKVConnector.pre_forward`. V1 launches the stores first.
    """
    clears = getattr(kv_config, "needs_kv_cache_zeroing", False)
    if clears and getattr(engine_config, "use_v2_model_runner", False):
        raise ConfigError(
            "kv_transfer_config: with this model, vLLM's Model Runner V2 clears blocks before they "
            "are stored, so that later requests would get wrong tokens; set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or leave kv_transfer_config out"
        )


def refuse_answers(extra_config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if answers are to be offloaded and vLLM offers more than is computed.

    A block that ends with its answer would then be stored, and the next turn would load it.
    """
    if generation.offers_the_last_token() and _stores_answers(extra_config):
        raise ConfigError(
            "offload_prompt_only: vLLM 0.26 to 0.29, and perhaps a build shortly before or after "
            "them, stores the last token of an answer, which is never computed, so that the next "
            "turn of a conversation would get wrong tokens; leave it out, or install vLLM "
            "0.30.0 or a later release"
        )


def _stores_answers(extra_config: Mapping[str, Any]) -> bool:
    return not extra_config.get("offload_prompt_only", True)


def refuse_lookahead(specs: Iterable[Any]) -> None:
    """Raise `ConfigError` if a block depends on later tokens, which its hash does not cover.

    vLLM turns its own prefix cache off for such models (prefix LM), and goes on offering blocks.
    """
    if any(getattr(each, "non_causal", False) for each in _of_layers(specs)):
        raise ConfigError(
            "kv_transfer_config: blocks of this model depend on later tokens of the prompt (prefix "
            "LM), so that requests that share a prefix would get wrong tokens; leave "
            "kv_transfer_config out"
        )


def refuse_answer_windows(specs: Iterable[Any], extra_config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if answers are to be offloaded and see a window of themselves (R-SWA).

    vLLM frees blocks that have left the window while they may still be read by a store. In the
    next turn the answer is part of the prompt, and has other bytes.
    """
    if _stores_answers(extra_config) and any(map(_windows_answers, _of_layers(specs))):
        raise ConfigError(
            "offload_prompt_only: this model's answers see only a window of themselves, and vLLM "
            "frees their blocks while they are stored, so that later requests would get wrong "
            "tokens; leave it out"
        )


def refuse_gaps(specs: Iterable[Any], blocks_per_chunk: int) -> None:
    """Raise `ConfigError` if a chunk may have gaps: `specs` are those of vLLM's KV groups.

    A chunk is offered if its last device block exists. Earlier blocks that have left a window are
    not copied, and their part of the slot would keep older bytes.
    """
    if blocks_per_chunk > 1 and not all(map(keeps_every_block, specs)):
        raise ConfigError(
            f"blocks_per_chunk: {blocks_per_chunk} does not work with this model, because vLLM "
            f"stores chunks with gaps for layers that keep a window or a state only, and its "
            f"tokens would be wrong; leave blocks_per_chunk and block_size out"
        )


def keeps_every_block(spec: Any) -> bool:
    """Return False for a KV group with gaps in its list of device blocks: a window, or states."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return all(
        isinstance(each, FullAttentionSpec) and not _windows_answers(each)
        for each in _of_layers([spec])
    )


def _of_layers(specs: Iterable[Any]) -> list[Any]:
    """Return the KV cache specs of the layers of KV groups with these specs."""
    return [each for spec in specs for each in specs_by_layer(spec).values()]


def _windows_answers(spec: Any) -> bool:
    """Return True for R-SWA, a kind of full attention with a window over the answer."""
    return hasattr(spec, "rswa_window")
