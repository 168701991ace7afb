"""Engines that would give wrong tokens with the right blocks: each is refused in one sentence.

What is wrong is in vLLM's own scheduler or attention, and nothing of it can be seen from the blocks
that it offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import engine_facts
from .layer_map import group_specs, kv_cache_config

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

_OFFER_THE_LAST_TOKEN = ((0, 26), (0, 29))
"""First and last version whose scheduler counts the last token of an answer as computed when the
request ends (`num_tokens_after_batch = req.num_tokens`). Its keys and values never are: nothing is
computed behind it. Earlier versions store nothing at the end, later ones leave that token out."""


def refuse_platform() -> None:
    """Raises `ConfigError` if vLLM runs on devices that no copier reads. A vLLM that has found no
    device stops by itself."""
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind not in ("", "cpu", "cuda"):  # ROCm says cuda
        raise ConfigError(
            f"kv_transfer_config: kvcascade copies KV caches of CUDA and ROCm GPUs and of CPUs, "
            f"and this vLLM runs on {kind!r}; leave kv_transfer_config out"
        )


def refuse_useless(engine_config: Any | None) -> None:
    """Raises `ConfigError` where attention cannot begin behind cached blocks."""
    if engine_config is not None and not engine_facts.continues_prefixes(engine_config):
        raise ConfigError(
            "kv_transfer_config: vLLM cannot continue a model with MLA from cached blocks on this "
            "machine (it turns its own prefix cache off), so offloading would give wrong tokens; "
            "leave kv_transfer_config out, or use a GPU or a CPU with AMX"
        )


def refuse_wrong_stores(config: OffloadingConfig) -> None:
    """Raises `ConfigError` if this vLLM would store blocks of which a part was never written.

    To be called while the connector is being made: it knows the kinds of the KV groups.
    """
    refuse_answers(config.extra_config)
    kv_config = kv_cache_config()
    if kv_config is not None:
        specs = (spec for _, _, spec in group_specs(config, kv_config))
        refuse_gaps(specs, config.cache.blocks_per_chunk)


def refuse_answers(extra_config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if answers are to be offloaded and vLLM offers more than is computed.

    A block that ends with its answer would then be stored, and the next turn would load it.
    """
    if offers_the_last_token() and not extra_config.get("offload_prompt_only", True):
        raise ConfigError(
            "offload_prompt_only: vLLM 0.26 to 0.29 stores the last token of an answer, which is "
            "never computed, so that the next turn of a conversation would get wrong tokens; "
            "leave it out, or install vLLM 0.30 or newer"
        )


def offers_the_last_token() -> bool:
    """True if the installed vLLM stores the end of an answer that nobody computed."""
    first, last = _OFFER_THE_LAST_TOKEN
    return first <= engine_facts.vllm_version() <= last


def refuse_gaps(specs: Iterable[Any], blocks_per_chunk: int) -> None:
    """Raises `ConfigError` if a chunk may have gaps: `specs` are those of vLLM's KV groups.

    A chunk is offered if its last device block is there. Blocks before it that have left a window
    are not copied, and their part of the slot would be whatever was there.
    """
    if blocks_per_chunk > 1 and not all(map(keeps_every_block, specs)):
        raise ConfigError(
            f"blocks_per_chunk: {blocks_per_chunk} does not work with this model, because vLLM "
            f"stores chunks with gaps for layers that keep a window or a state only, and its "
            f"tokens would be wrong; leave blocks_per_chunk and block_size out"
        )


def keeps_every_block(spec: Any) -> bool:
    """False for a KV group that has gaps in its list of device blocks: a window, or a state."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    by_layer = getattr(spec, "kv_cache_specs", None)
    if by_layer is not None:
        return all(map(keeps_every_block, by_layer.values()))
    # Of full attention there is one kind with a window, over the answer.
    return isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window")
