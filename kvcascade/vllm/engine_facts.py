"""Facts about the engine that vLLM's offloading configuration does not carry.

The scheduler process holds the engine's full configuration as a local variable of the connector
that makes our spec; the worker process offers it by a call. Both are tried, and their absence is
no error: the facts are then fewer, and the namespace is shared across processes only under the
user's own `weights_id`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from typing import Any

from .generation import offered, seeds_hashes_with_a_constant

MAX_FRAMES = 16
"""How far up the stack the engine's configuration is looked for."""

_READ_THE_MODEL = frozenset(
    "auto hf safetensors fastsafetensors instanttensor pt npcache mistral gguf bitsandbytes "
    "sharded_state runai_streamer runai_streamer_sharded".split()
)
"""Load formats of any version that read the files which the model's name stands for. Others take
weights from a file of their own (tensorizer), a process that loaded them when those files may have
been others (ipc_cache, modelexpress), nowhere (dummy), or wherever a plugin says."""
_VOLATILE_HF_KEYS = frozenset({"_name_or_path", "transformers_version", "name_or_path"})
_STATE_OPTIONS = (
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "mamba_block_size",
    "use_replayssm",
)
_MODEL_OPTIONS = (
    "disable_sliding_window",
    "override_attention_dtype",
    "model_impl",
    "model_class_overrides",
    "code_revision",
)
"""What computes the blocks, beside the weights and the model's own configuration."""
_ATTENTION_OPTIONS = ("backend", "backend_per_kind", "indexer_kv_dtype")
"""What the user asks for; what vLLM chose is `packing`'s."""
_STATE_ORDER = "VLLM_SSM_CONV_STATE_LAYOUT"
_INTERLEAVING = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
_MEDIA_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_attn_backend",
    "mm_encoder_fp8_scale_path",
)
"""What a server does to all media; vLLM's hash of an image knows what its request asks for only."""


def engine_config() -> Any | None:
    """vLLM's `VllmConfig` of this process, or None if it cannot be found."""
    ask = offered("vllm.config", "get_current_vllm_config_or_none")
    found = None if ask is None else ask()
    return _local_of_a_caller("vllm_config", "model_config") if found is None else found


def kv_cache_config() -> Any | None:
    """Return the `KVCacheConfig` of the connector that is being made, or None."""
    return _local_of_a_caller("kv_cache_config", "kv_cache_groups")


def _local_of_a_caller(name: str, attribute: str) -> Any | None:
    """Return the nearest local variable of this name up the stack whose value has the attribute."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame is not None else None  # the function that asks
    for _ in range(MAX_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            return None
        candidate = frame.f_locals.get(name)
        if hasattr(candidate, attribute):
            return candidate
    return None


def model_facts(config: Any) -> dict[str, str]:
    """What of the model's configuration shapes the bytes of a block."""
    model, cache = config.model_config, config.cache_config
    hf_config = getattr(model, "hf_config", None)
    loader = getattr(getattr(config, "load_config", None), "model_loader_extra_config", None)
    parallel = getattr(config, "parallel_config", None)
    media = getattr(model, "multimodal_config", None)
    return {
        "max_model_len": _positions(model),
        "model_options": _digest(_options(model, _MODEL_OPTIONS)),
        "interleaving": " ".join(_options(parallel, _INTERLEAVING)),
        "media": _digest(_options(media, _MEDIA_OPTIONS)),
        "quantization": str(getattr(model, "quantization", None)),
        "quantization_config": _digest(str(getattr(model, "quantization_config", None))),
        "loader": _digest(str(loader or {})),
        "state": " ".join([*_options(cache, _STATE_OPTIONS), os.environ.get(_STATE_ORDER) or "SD"]),
        "model_dtype": str(getattr(model, "dtype", None)),
        "cache_dtype": str(getattr(cache, "cache_dtype", None)),
        "other_dtype_layers": str(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "hf_config": _digest(_stable(hf_config.to_dict())) if hf_config is not None else "unknown",
        "hf_overrides": _digest(_lasting(getattr(model, "hf_overrides", None))),
        "hash_algorithm": str(getattr(cache, "prefix_caching_hash_algo", "unknown")),
        "attention": " ".join(
            _options(getattr(config, "attention_config", None), _ATTENTION_OPTIONS)
        ),
    }


def _options(config: Any, names: Sequence[str]) -> list[str]:
    """The values of options; versions that do not know one all say None."""
    return [str(getattr(config, name, None)) for name in names]


def _positions(model: Any) -> str:
    """Longest prompt: some models (LongRoPE, Llama 4) choose by it how they turn every position.

    Where vLLM makes it fit the memory, they were made for what `hf_config` says.
    """
    if getattr(model, "original_max_model_len", None) == -1:
        return "auto"
    return str(getattr(model, "max_model_len", None))


def reasons_not_to_share(config: Any) -> dict[str, str]:
    """What block hash and fingerprint cannot tell apart: name to a sentence with the remedy.

    Within one process equal hashes still mean equal blocks.
    """
    cache = config.cache_config
    media = getattr(config.model_config, "multimodal_config", None)
    has_media_hashes = (
        media is None
        or getattr(media, "mm_processor_cache_gb", None) != 0
        or getattr(cache, "enable_prefix_caching", True)
    )
    found: dict[str, str] = {}
    if not has_media_hashes:  # vllm/renderers/base.py counts them instead
        found["media_hashes"] = (
            "vLLM does not hash images and other media with neither prefix caching nor a processor "
            "cache; enable one of the two"
        )
    if getattr(config, "lora_config", None):  # names up to 0.30, then names and paths
        found["adapters"] = (
            "vLLM knows a LoRA adapter by its name and path, whatever is in its files; set "
            "weights_id to a word that you change with the weights and with the files of an adapter"
        )
    if getattr(cache, "calculate_kv_scales", False):
        found["scales"] = (
            "the scales of the KV cache are calculated anew by every process; leave "
            "calculate_kv_scales out"
        )
    return found


def weights_facts(config: Any) -> tuple[str, str | None, bool]:
    """(model path or hub name, revision, whether the weights are what that name stands for).

    Where the weights lie elsewhere, in an object store, the local path holds the rest only; and
    what ModelScope calls so is not what the Hugging Face hub's cache knows by the name.
    """
    model = config.model_config
    load_format = str(getattr(config.load_config, "load_format", "auto")).rpartition(".")[2].lower()
    name = str(getattr(model, "model_weights", None) or model.model)
    is_elsewhere = _asks_modelscope() and not os.path.exists(name)
    is_real = load_format in _READ_THE_MODEL and not is_elsewhere
    return name, getattr(model, "revision", None), is_real


def _asks_modelscope() -> bool:
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def draft_facts(config: Any) -> tuple[str, str | None] | None:
    """(path or hub name, revision) of a model that drafts tokens for the engine's, if there is one.

    Its layers are in the blocks beside the model's own.
    """
    model = config.model_config
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if draft is None or draft is model:
        return None
    found = str(draft.model), getattr(draft, "revision", None)
    return None if found == (str(model.model), getattr(model, "revision", None)) else found


def continues_prefixes(config: Any) -> bool:
    """False if the attention of this model on this machine cannot begin behind cached blocks.

    vLLM then turns chunked prefill and its own prefix cache off (MLA on a CPU without AMX, see
    `vllm.platforms.cpu`), yet goes on asking an offloading connector for blocks.
    """
    if not getattr(config.model_config, "use_mla", False):
        return True
    from vllm.platforms import current_platform

    chunks = getattr(config.scheduler_config, "enable_chunked_prefill", True)
    caches = getattr(config.cache_config, "enable_prefix_caching", True)
    return bool(chunks or caches or current_platform.is_cuda_alike())


def pipeline_depth(config: Any | None) -> int:
    """Steps after which every worker has certainly finished transfers from before a reset."""
    stages = 1 if config is None else int(config.parallel_config.pipeline_parallel_size)
    return max(3, stages + 2) + 1


def seconds_to_stop(config: Any | None) -> int | None:
    """How long vLLM lets an engine live that it was asked to stop; None: this vLLM has no such
    setting."""
    return getattr(config, "shutdown_timeout", None)


def hashes_change_at_restart(config: Any | None) -> bool:
    """True if block hashes differ in every process, so that persistence is of no use."""
    if os.environ.get("PYTHONHASHSEED") not in (None, "", "random"):
        return False
    algorithm = "sha256"
    if config is not None:
        algorithm = str(getattr(config.cache_config, "prefix_caching_hash_algo", algorithm))
    return not seeds_hashes_with_a_constant() or algorithm.startswith("xxhash")


def _stable(hf_config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf_config.items() if key not in _VOLATILE_HF_KEYS}


def _lasting(value: object) -> str:
    """As text that says the same in every process: of a function its name, not its address. What
    it does to the model's configuration is seen there."""
    if not callable(value):
        return str(value)
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
