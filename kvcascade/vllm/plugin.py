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
from types import FrameType
from typing import Any

from ..assembly.named import SPEC_NAME, checked, sweep_arenas
from ..config.machine import Machine
from ..config.options import noting
from ..errors import ConfigError
from ..identity import note_files
from .generation import offered
from .refusals import refuse_answers, refuse_platform

MAX_FRAMES = 12
"""Limit on the stack frames that are searched for the configuration."""


def register() -> None:
    """Entry point in `vllm.general_plugins`. Raises `ConfigError` if the configuration is wrong."""
    extra_config, weights = _find_engine(inspect.currentframe())
    note_files(*weights)
    if extra_config.get("spec_name") == SPEC_NAME:
        refuse_platform()
        sweep_arenas(extra_config)
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


def _find_engine(
    frame: FrameType | None,
) -> tuple[Mapping[str, Any], tuple[str, str | None, str | None]]:
    """Return `kv_connector_extra_config` of the engine that a frame up the stack makes, and its
    model, revision and download directory; empty if there is none."""
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
                about = _own(engine, "model_config") or engine
                name = str(_own(about, "model") or "")
                load = _own(engine, "load_config") or engine
                return extra, (name, _own(about, "revision"), _own(load, "download_dir"))
        frame = frame.f_back
    return {}, ("", None, None)


def _own(thing: object, name: str) -> Any:
    """Return an attribute from the object's own `__dict__`, else None.

    `getattr` is not safe on a half-made object: a `__getattr__` that delegates to a part which does
    not exist yet calls itself without end.
    """
    try:
        return object.__getattribute__(thing, "__dict__").get(name)
    except AttributeError:
        return None
