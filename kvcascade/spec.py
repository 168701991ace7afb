"""Public name of the spec: `kvcascade.spec:CascadeOffloadingSpec` in the engine's configuration.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec", "tiers": [...]}}

The class is the adapter for the installed vLLM. Importing this module raises `ConfigError` if there
is none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .vllm.generation import adapter

if TYPE_CHECKING:
    from .vllm.v0_26 import CascadeOffloadingSpec
else:
    CascadeOffloadingSpec = import_module(f".vllm.{adapter()}", __package__).CascadeOffloadingSpec

__all__ = ["CascadeOffloadingSpec"]
