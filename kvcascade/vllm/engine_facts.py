"""Facts about the engine that vLLM's offloading configuration does not carry.

The scheduler process holds the engine's full configuration as a local variable of the connector
that makes our spec. The worker process offers it by a call. Both ways are tried. If neither finds
it, fewer facts are known, and the namespace is shared across processes only if the user sets
`weights_id`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from ..identity import have_files_changed, other_models, prefers_mistral_files
from .generation import offered, seeds_hashes_with_a_constant

MAX_FRAMES = 16
"""Limit on the stack frames that are searched for the engine's configuration."""

_READ_THE_MODEL = frozenset(
    "auto hf safetensors fastsafetensors instanttensor pt npcache mistral gguf bitsandbytes "
    "sharded_state runai_streamer runai_streamer_sharded".split()
)
"""Load formats, of any version, that read the files at the model's name.

Other formats take weights from a file of their own (tensorizer), from a process that loaded them
earlier (ipc_cache, modelexpress), from nowhere (dummy), or from a place that a plugin chooses."""
_READ_AS_AUTO = frozenset(
    "auto hf safetensors fastsafetensors instanttensor bitsandbytes runai_streamer".split()
)
"""Load formats that read the same files of a folder, unless it has files in Mistral's own format:
`auto` prefers those."""
_LOADER_SPEED = frozenset(
    "concurrency distributed enable_multithread_load enable_weights_track memory_limit "
    "num_threads".split()
)
"""Arguments of loaders that change how fast the same weights are read."""
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
"""Options that change what a block contains, beside weights and the model's configuration."""
_ATTENTION_OPTIONS = ("backend", "backend_per_kind", "indexer_kv_dtype")
"""Attention options that the user sets; the backend that vLLM chose is a fact of `packing`."""
_KERNEL_OPTIONS = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""Kernel options that the user sets. Some kernels quantise activations, and others do not."""
_QUERY_OPTIONS = ("use_prefill_query_quantization", "disable_flashinfer_q_quantization")
"""Attention options about the precision of queries, and so of what the next layers store."""
_DEFAULTS = (None, False, "auto")
"""Values of such options that vLLM has by itself."""
_GENERATION_OPTIONS = ("attn_temperature_tuning",)
"""Options of the generation config that change blocks: Llama 4 scales queries of late positions."""
_NUMBERS = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
)
"""Environment variables that quantise weights or activations, or their way between ranks. Some name
a file."""
_ROUNDED_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"
"""Environment variable that counts if it is 0. DeepGEMM rounds its scales to powers of two, and
vLLM sets the variable to 1 itself for some models."""
_QUANTIZATION_FILE, _SCALES_FILE = "quantization_config_file", "mm_encoder_fp8_scale_path"
"""Options whose value is the name of a file: in `hf_overrides`, and for media."""
_SIMULATED_ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
MULTI_CONNECTOR = "MultiConnector"
"""vLLM's connector that makes several others."""
EXTERNAL_LAUNCHER = "external_launcher"
"""vLLM's executor for ranks that `torchrun` starts, each with an engine of its own."""
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
    _SCALES_FILE,
)
"""Options that a server applies to all media; vLLM's hash of an image covers the request's only."""


def engine_config() -> Any | None:
    """Return vLLM's `VllmConfig` of this process, or None if it cannot be found."""
    ask = offered("vllm.config", "get_current_vllm_config_or_none")
    found = None if ask is None else ask()
    if found is not None:
        return found
    return _local_of_a_caller("vllm_config", lambda config: hasattr(config, "model_config"))


def kv_cache_config() -> Any | None:
    """Return the `KVCacheConfig` of the connector that is being made, or None."""
    return _local_of_a_caller("kv_cache_config", lambda found: hasattr(found, "kv_cache_groups"))


def has_other_connectors() -> bool:
    """Return True if vLLM's `MultiConnector` makes our connector, and others beside it."""
    return _local_of_a_caller("vllm_config", _is_one_of_several) is not None


def _is_one_of_several(config: Any) -> bool:
    return has_several_connectors(getattr(config, "kv_transfer_config", None))


def has_several_connectors(transfer: Any) -> bool:
    """Return True if a `KVTransferConfig` is that of a `MultiConnector` over several others."""
    if getattr(transfer, "kv_connector", None) != MULTI_CONNECTOR:
        return False
    return len((transfer.kv_connector_extra_config or {}).get("connectors", ())) > 1


def _local_of_a_caller(name: str, fits: Callable[[Any], bool]) -> Any | None:
    """Return the nearest local variable of this name up the stack whose value fits."""
    own = 2  # this function's frame, and that of the function that asks
    for each in islice(frames_up(inspect.currentframe(), MAX_FRAMES + own), own, None):
        candidate = each.f_locals.get(name)
        if candidate is not None and fits(candidate):
            return candidate
    return None


def frames_up(frame: FrameType | None, limit: int) -> Iterator[FrameType]:
    """Yield the frame and those up the stack, at most `limit`."""
    for _ in range(limit):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def model_facts(config: Any) -> dict[str, str]:
    """Return the parts of the engine's configuration that shape the bytes of a block."""
    model, cache = config.model_config, config.cache_config
    hf_config = getattr(model, "hf_config", None)
    loader = getattr(getattr(config, "load_config", None), "model_loader_extra_config", None)
    if isinstance(loader, Mapping):
        loader = {name: loader[name] for name in loader if name not in _LOADER_SPEED}
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
        **_facts_if_set(model),
        **_unusual(getattr(config, "kernel_config", None), _KERNEL_OPTIONS),
        **_unusual(getattr(config, "attention_config", None), _QUERY_OPTIONS),
    }


def _facts_if_set(model: Any) -> dict[str, str]:
    """Return facts about options that few models have; other fingerprints stay as they were."""
    asked: Callable[[], dict[str, Any]] = getattr(model, "try_get_generation_config", dict)
    given = {**asked(), **(getattr(model, "override_generation_config", None) or {})}
    facts = {name: str(given[name]) for name in _GENERATION_OPTIONS if name in given}
    overrides = getattr(model, "hf_overrides", None)
    media = getattr(model, "multimodal_config", None)
    named = {name: os.environ.get(name) for name in _NUMBERS}
    if os.environ.get(_ROUNDED_SCALES) == "0":
        named[_ROUNDED_SCALES] = "0"
    if isinstance(overrides, Mapping):
        named[_QUANTIZATION_FILE] = overrides.get(_QUANTIZATION_FILE)
    named[_SCALES_FILE] = getattr(media, _SCALES_FILE, None)
    return facts | {name: _digest(_content(value)) for name, value in named.items() if value}


def _unusual(config: Any, names: Sequence[str]) -> dict[str, str]:
    """Return options that are not vLLM's default; other fingerprints stay as they were."""
    found = {name: getattr(config, name, None) for name in names}
    return {name: _digest(value) for name, value in found.items() if value not in _DEFAULTS}


def _content(value: object) -> str:
    """Return what the file of this name contains, or the value itself if there is no such file."""
    text = str(value)
    return Path(text).read_text("utf-8", "replace") if os.path.isfile(text) else text


def _options(config: Any, names: Sequence[str]) -> list[str]:
    """Return the values of options; "None" for an option that the installed version lacks."""
    return [str(getattr(config, name, None)) for name in names]


def _positions(model: Any) -> str:
    """Return the longest prompt, by which some models (LongRoPE, Llama 4) scale all positions.

    Return "auto" if vLLM fits the length to the memory: models then use the one in `hf_config`.
    """
    if getattr(model, "original_max_model_len", None) == -1:
        return "auto"
    return str(getattr(model, "max_model_len", None))


def reasons_not_to_share(config: Any) -> dict[str, str]:
    """Return differences that block hash and fingerprint miss: name to a clause with the remedy.

    Within one process, equal hashes still mean equal blocks.
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
    if _have_weights_changed(config):
        found["files"] = (
            "files of the model were replaced since this process began, so the weights that the "
            "engine loaded are not known; start a new process"
        )
    if _load_format(config.load_config) == "npcache":
        found["npcache"] = (
            "vLLM copies the weights to a folder np once, and loads that copy whatever is in the "
            "model's files by now; use another load_format"
        )
    if getattr(config, "weight_transfer_config", None) is not None:  # later versions have it
        found["transferred_weights"] = (
            "a trainer may replace the weights while the engine runs, and they are then not those "
            "of the model's files; leave weight_transfer_config out"
        )
    if os.environ.get(_SIMULATED_ROUTING):
        found["simulated_routing"] = (
            f"tokens are sent to random experts; leave {_SIMULATED_ROUTING} unset"
        )
    if getattr(cache, "calculate_kv_scales", False):
        found["scales"] = (
            "the scales of the KV cache are calculated anew by every process; leave "
            "calculate_kv_scales out"
        )
    return found


def _have_weights_changed(config: Any) -> bool:
    loaded = (weights_facts(config), *other_weights_facts(config).values())
    return any(have_files_changed(name, revision, place) for name, revision, _, place in loaded)


def weights_facts(config: Any) -> tuple[str, str | None, bool, str | None]:
    """Return the arguments of `weights_identity` for the engine's model.

    If the weights lie in an object store, their place there is the name; the local path holds only
    the other files. A name at ModelScope says nothing about the cache of the Hugging Face hub.
    """
    model = config.model_config
    name = str(getattr(model, "model_weights", None) or model.model)
    return _loaded(name, getattr(model, "revision", None), config.load_config)


def _loaded(
    name: str, revision: str | None, load_config: Any
) -> tuple[str, str | None, bool, str | None]:
    """Return the arguments of `weights_identity` for a model that is loaded in this way."""
    is_elsewhere = _asks_modelscope() and not os.path.exists(name)
    is_real = _load_format(load_config) in _READ_THE_MODEL and not is_elsewhere
    return name, revision, is_real, getattr(load_config, "download_dir", None)


def _load_format(load_config: Any) -> str:
    return str(getattr(load_config, "load_format", "auto")).rpartition(".")[2].lower()


def _asks_modelscope() -> bool:
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def draft_facts(config: Any) -> tuple[str, str | None, bool, str | None] | None:
    """Return the arguments of `weights_identity` for the draft model, if there is one.

    Blocks contain its layers beside the model's own. It may be loaded in another way.
    """
    model, speculative = config.model_config, getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is model:
        return None
    own = _loaded(str(model.model), getattr(model, "revision", None), config.load_config)
    revision = getattr(draft, "revision", None)
    found = _loaded(str(draft.model), revision, _draft_load_config(config))
    return None if found == own else found


def _draft_load_config(config: Any) -> Any:
    speculative = getattr(config, "speculative_config", None)
    return getattr(speculative, "draft_load_config", None) or config.load_config


def other_weights_facts(config: Any) -> dict[str, tuple[str, str | None, bool, str | None]]:
    """Return the arguments of `weights_identity` for all weights beside the model's, by fact.

    They are those of the draft model, and of models that the model's configuration names.
    """
    hf_config = getattr(config.model_config, "hf_config", None)
    named = {} if hf_config is None else other_models(hf_config.to_dict())
    # vLLM asks for no revision: that of the model is one of another repository.
    found = {key: _loaded(name, None, config.load_config) for key, name in named.items()}
    draft = draft_facts(config)
    return found if draft is None else {**found, "draft_weights": draft}


def format_facts(config: Any) -> dict[str, str]:
    """Return the load formats that read other files of a model than `auto`; mostly there is none.

    A folder may have several: new safetensors, say, beside the old `.bin` files.
    """
    facts = {"load_format": (weights_facts(config), config.load_config)}
    draft = draft_facts(config)
    if draft is not None:
        facts["draft_load_format"] = (draft, _draft_load_config(config))
    found = {}
    for fact, ((name, revision, _, download_dir), load_config) in facts.items():
        load_format = _load_format(load_config)
        if load_format in _READ_AS_AUTO and (
            load_format == "auto" or not prefers_mistral_files(name, revision, download_dir)
        ):
            continue
        found[fact] = load_format
    return found


def remote_code(config: Any) -> tuple[str, str | None, str | None] | None:
    """Return the arguments of `code_identity`; None if the model's code is not to be trusted.

    vLLM then runs none of it.
    """
    model = config.model_config
    if not getattr(model, "trust_remote_code", False):
        return None
    name = getattr(model, "hf_config_path", None) or model.model
    return str(name), getattr(model, "revision", None), getattr(model, "code_revision", None)


def continues_prefixes(config: Any) -> bool:
    """Return False if attention cannot continue from cached blocks with this model and machine.

    vLLM then turns chunked prefill and its own prefix cache off (MLA on a CPU without AMX, see
    `vllm.platforms.cpu`), yet goes on asking an offloading connector for blocks.
    """
    if not getattr(config.model_config, "use_mla", False):
        return True
    from vllm.platforms import current_platform

    chunks = getattr(config.scheduler_config, "enable_chunked_prefill", True)
    caches = getattr(config.cache_config, "enable_prefix_caching", True)
    return bool(chunks or caches or current_platform.is_cuda_alike())


def pools_whole_prompts(config: Any) -> bool:
    """Return True for a pooling model for which vLLM supports no prefix caching.

    MEAN, CLS and STEP pooling need every token of a prompt to be computed. The answer is what vLLM
    says of the model. Its prefix cache may be off for other reasons.
    """
    model = config.model_config
    pools = getattr(model, "runner_type", "generate") == "pooling"
    return pools and not getattr(model, "is_prefix_caching_supported", True)


def pipeline_depth(config: Any | None) -> int:
    """Return the number of steps after which all transfers from before a reset have ended."""
    stages = 1 if config is None else int(config.parallel_config.pipeline_parallel_size)
    return steps_until_flushed(stages)


def steps_until_flushed(stages: int) -> int:
    """Return `pipeline_depth` of an engine with so many pipeline stages.

    In the first step after a reset, every worker ends its earlier transfers before it computes.
    vLLM has at most `stages + 1` steps in flight, so this step has ended that many steps later.
    """
    return stages + 3


def seconds_to_stop(config: Any | None) -> int | None:
    """Return how long vLLM lets an engine run on once it shall stop; None: no such setting."""
    return getattr(config, "shutdown_timeout", None)


def is_traced(config: Any | None) -> bool:
    """Return True if vLLM sends trace spans to an endpoint."""
    observability = getattr(config, "observability_config", None)
    return bool(getattr(observability, "otlp_traces_endpoint", None))


def hashes_change_at_restart(config: Any | None) -> bool:
    """Return True if block hashes differ in every process, so that blocks are not found again."""
    if os.environ.get("PYTHONHASHSEED") not in (None, "", "random"):
        return False
    algorithm = "sha256"
    if config is not None:
        algorithm = str(getattr(config.cache_config, "prefix_caching_hash_algo", algorithm))
    return not seeds_hashes_with_a_constant() or algorithm.startswith("xxhash")


def _stable(hf_config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf_config.items() if key not in _VOLATILE_HF_KEYS}


def _lasting(value: object) -> str:
    """Return text that is equal in every process: for a function its name, not its address.

    The function's effect is visible in the model's configuration, another fact."""
    if not callable(value):
        return str(value)
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
