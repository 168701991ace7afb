"""What a user names in the engine's configuration: `kvcascade.spec:CascadeOffloadingSpec`.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec", "tiers": [...]}}

The class is the adapter for what the installed vLLM offers, found by looking, not by its version.
"""

from __future__ import annotations

from importlib.util import find_spec

from .errors import ConfigError


def _offers(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if not _offers("vllm"):
    raise ConfigError("kvcascade.spec needs vLLM, which is not installed; pip install vllm.")
if not _offers("vllm.v1.kv_offload.config"):
    raise ConfigError(
        "kvcascade.spec does not support the installed vLLM, whose offloading interface is older "
        "than that of 0.27; install vllm>=0.27,<0.34."
    )

from .vllm_modern import CascadeOffloadingSpec  # noqa: E402

__all__ = ["CascadeOffloadingSpec"]
