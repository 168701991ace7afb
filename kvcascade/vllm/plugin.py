"""The plugin that vLLM loads at the start of every process, before any model is loaded.

It registers the spec, so that `"spec_name": "CascadeOffloadingSpec"` alone finds it. It also checks
the configuration early, and notes the files of the model: vLLM itself makes the spec only after the
weights are loaded, and the files may have been replaced meanwhile. vLLM hands nothing to a plugin,
so the configuration is looked for in the calling stack frames. If it is not there (the command line
is not parsed yet), a later process of the same engine finds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from ..assembly.named import SPEC_NAME
from ..identity import note_files, other_models
from .early_checks import attributes, check_early, own
from .engine_facts import frames_up
from .generation import offered

MAX_FRAMES = 12
"""Limit on the stack frames that are searched for the configuration."""


def register() -> None:
    """Entry point in `vllm.general_plugins`. Raises `ConfigError` if the configuration is wrong."""
    frame = inspect.currentframe()
    engine = _find_engine(frame)
    if engine is not None:
        # Also for an engine without us: vLLM runs no plugin again for later engines of its process,
        # and they may have the same model.
        with suppress(Exception):  # vLLM may do without the file that raised it
            for model in _models(engine):
                note_files(*model)
        if not _is_beside_engines(frame):
            check_early(engine)
    _register_spec()


def _register_spec() -> None:
    factory = offered("vllm.v1.kv_offload.factory", "OffloadingSpecFactory")
    if factory is None:  # a vLLM without offloading: nothing to register with
        return
    try:
        factory.register_spec(SPEC_NAME, "kvcascade.spec", SPEC_NAME)
    except ValueError:  # registered already
        return


def _find_engine(frame: FrameType | None) -> Any | None:
    """Return the `EngineArgs` or `VllmConfig` of the engine that a frame up the stack makes."""
    for each in frames_up(frame, MAX_FRAMES):
        for name in ("vllm_config", "self"):
            engine = each.f_locals.get(name)
            if "kv_transfer_config" in attributes(engine):  # None in an engine without a connector
                return engine
    return None


def _models(engine: Any) -> list[tuple[str, str | None, str | None]]:
    """Return name, revision and download directory of each model that an engine loads.

    They are its model, its draft model, and those that its configuration names.
    """
    about = own(engine, "model_config") or engine
    place = own(own(engine, "load_config") or engine, "download_dir")
    draft = own(engine, "speculative_config")
    draft = own(draft, "draft_model_config") or draft
    loaded = [about] if draft is None else [about, draft]
    found = [(str(own(each, "model") or ""), own(each, "revision"), place) for each in loaded]
    overrides = own(about, "hf_overrides")
    named = {**(overrides if isinstance(overrides, Mapping) else {})}
    named.update(attributes(own(about, "hf_config")))
    return found + [(name, None, place) for name in other_models(named).values()]


def _is_beside_engines(frame: FrameType | None) -> bool:
    """Return True in one of several API servers: vLLM starts them beside the engines.

    The engines check, and may have taken their memory already.
    """
    return any(each.f_locals.get("client_config") for each in frames_up(frame, MAX_FRAMES))
