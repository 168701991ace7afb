"""The plugin that vLLM loads at the start of every process, before any model is loaded.

It registers the spec, so that `"spec_name": "CascadeOffloadingSpec"` alone finds it. It also checks
the configuration early, and notes the files of the model: vLLM itself makes the spec only after the
weights are loaded, and the files may have been replaced meanwhile. vLLM hands nothing to a plugin,
so the configuration is looked for in the calling stack frames. If it is not there (the command line
is not parsed yet), a later process of the same engine finds it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ..assembly.named import SPEC_NAME, checked
from ..config.environment import with_environment
from ..config.machine import Machine
from ..config.options import noting
from ..errors import ConfigError
from ..identity import note_files, other_models
from ..tiers.cpu.arena import DEFAULT_ARENA_DIR
from ..tiers.cpu.arena_file import sweep
from .generation import offered
from .refusals import refuse_answers, refuse_platform

MAX_FRAMES = 12
"""Limit on the stack frames that are searched for the configuration."""


def register() -> None:
    """Entry point in `vllm.general_plugins`. Raises `ConfigError` if the configuration is wrong."""
    extra_config, models = _find_engine(inspect.currentframe())
    for model in models:
        note_files(*model)
    if extra_config.get("spec_name") == SPEC_NAME:
        refuse_platform()
        for folder in _arena_folders(extra_config):  # of killed engines: they would count as taken
            sweep(folder)
        _check(extra_config)
        refuse_answers(extra_config)
    _register_spec()


def _check(extra_config: Mapping[str, Any]) -> None:
    """Raise one `ConfigError` with all problems, a line each."""
    problems: list[str] = []
    with noting(problems):
        checked(extra_config, Machine(), problems)
    if problems:
        raise ConfigError("\n".join(problems))


def _register_spec() -> None:
    factory = offered("vllm.v1.kv_offload.factory", "OffloadingSpecFactory")
    if factory is None:  # a vLLM without offloading: nothing to register with
        return
    try:
        factory.register_spec(SPEC_NAME, "kvcascade.spec", SPEC_NAME)
    except ValueError:  # registered already
        return


def _arena_folders(extra_config: Mapping[str, Any]) -> list[str]:
    """Return the folders in which CPU tiers may have their memory; nothing is checked yet."""
    given, _ = with_environment(extra_config, os.environ)
    tiers = given.get("tiers")
    named = [tier for tier in tiers if isinstance(tier, Mapping)] if isinstance(tiers, list) else []
    return sorted({DEFAULT_ARENA_DIR, *(str(tier.get("arena_dir", "")) for tier in named)} - {""})


_Model = tuple[str, str | None, str | None]
"""Name, revision and download directory of a model."""


def _find_engine(frame: FrameType | None) -> tuple[Mapping[str, Any], list[_Model]]:
    """Return `kv_connector_extra_config` of the engine that a frame up the stack makes, and the
    models that it loads; empty if there is none."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        for name in ("vllm_config", "self"):
            engine = frame.f_locals.get(name)
            transfer = _own(engine, "kv_transfer_config")
            if isinstance(transfer, Mapping):
                extra = transfer.get("kv_connector_extra_config")
            else:
                extra = _own(transfer, "kv_connector_extra_config")
            if isinstance(extra, Mapping):
                return extra, _models(engine)
        frame = frame.f_back
    return {}, []


def _models(engine: object) -> list[_Model]:
    """Return the model of an engine, its draft model, and models that its configuration names."""
    about = _own(engine, "model_config") or engine
    place = _own(_own(engine, "load_config") or engine, "download_dir")
    found = [(str(_own(about, "model") or ""), _own(about, "revision"), place)]
    draft = _own(engine, "speculative_config")
    if isinstance(draft, Mapping):
        found.append((str(draft.get("model") or ""), draft.get("revision"), place))
    elif (draft := _own(draft, "draft_model_config")) is not None:
        found.append((str(_own(draft, "model") or ""), _own(draft, "revision"), place))
    overrides = _own(about, "hf_overrides")
    named = {**(overrides if isinstance(overrides, Mapping) else {})}
    named.update(_attributes(_own(about, "hf_config")))
    return found + [(name, None, place) for name in other_models(named).values()]


def _own(thing: object, name: str) -> Any:
    """Return an attribute from the object's own `__dict__`, else None.

    `getattr` is not safe on a half-made object: a `__getattr__` that delegates to a part which does
    not exist yet calls itself without end.
    """
    return _attributes(thing).get(name)


def _attributes(thing: object) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found
