"""The plugin that vLLM loads at the start of every process, before any model is loaded.

It makes `"spec_name": "CascadeOffloadingSpec"` enough to find the spec, and checks the
configuration while a mistake still costs seconds: vLLM itself would make the spec, and meet the
mistake, only after the weights are in memory. vLLM hands nothing to a plugin, so the configuration
is looked for in the frames that are loading it; where it is not found (a command line that is not
parsed yet), a later process of the same engine finds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ..assembly.named import SPEC_NAME, checked
from ..config.machine import ThisMachine
from .refusals import refuse_answers, refuse_platform

MAX_FRAMES = 12
"""How far up the stack the configuration is looked for."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Raises `ConfigError` for a bad one."""
    extra_config = _find_extra_config(inspect.currentframe())
    if extra_config is not None and extra_config.get("spec_name") == SPEC_NAME:
        refuse_platform()
        checked(extra_config, ThisMachine())
        refuse_answers(extra_config)
    _register_spec()


def _register_spec() -> None:
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError:  # a vLLM without offloading: nothing to register with
        return
    try:
        OffloadingSpecFactory.register_spec(SPEC_NAME, "kvcascade.spec", SPEC_NAME)
    except ValueError:  # registered already
        return


def _find_extra_config(frame: FrameType | None) -> Mapping[str, Any] | None:
    """`kv_connector_extra_config` of the engine that is being made further up the stack."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        for name in ("vllm_config", "self"):
            transfer = _own(frame.f_locals.get(name), "kv_transfer_config")
            if isinstance(transfer, Mapping):
                extra = transfer.get("kv_connector_extra_config")
            else:
                extra = _own(transfer, "kv_connector_extra_config")
            if isinstance(extra, Mapping):
                return extra
        frame = frame.f_back
    return None


def _own(thing: object, name: str) -> Any:
    """An attribute that the object itself holds, else None.

    A stranger's object must not be asked by `getattr`: one that hands questions on to a part it
    does not have yet asks itself for ever.
    """
    try:
        return object.__getattribute__(thing, "__dict__").get(name)
    except AttributeError:
        return None
