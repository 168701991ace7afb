"""Which adapter fits the installed vLLM, found by what it offers, not by its version.

The interface for offloading was rebuilt several times; its generations are told apart by their
modules and by the names in them. What is between two supported ones is refused, in one sentence.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module

from ..errors import ConfigError

SUPPORTED = "0.16 to 0.19 or 0.24 to 0.33"
_BASE = "vllm.v1.kv_offload"


def adapter() -> str:
    """Name of the module with the adapter. Raises `ConfigError` if no adapter fits."""
    if not _offers("vllm"):
        raise ConfigError("kvcascade.spec needs vLLM, which is not installed; pip install vllm.")
    if _offers(f"{_BASE}.base", "OffloadingWorker"):
        return "v0_26" if _offers(f"{_BASE}.config") else "v0_25"
    if _has_handlers_and_steps():
        return "v0_24"
    if _is_seed():
        return "v0_16"
    version = getattr(import_module("vllm"), "__version__", "(of no known version)")
    raise ConfigError(
        f"kvcascade does not support the installed vLLM {version}, whose interface for offloading "
        f"is another one; install vLLM {SUPPORTED}."
    )


def _has_handlers_and_steps() -> bool:
    """Managers are told of requests and steps, and asked for what an idle engine waits for."""
    if not _offers(f"{_BASE}.base", "OffloadingManager") or not _offers(f"{_BASE}.worker.worker"):
        return False
    return hasattr(import_module(f"{_BASE}.base").OffloadingManager, "has_pending_work")


def _is_seed() -> bool:
    """Keys are plain hashes, and handlers report objects (pairs up to 0.15)."""
    if not _offers(f"{_BASE}.mediums") or _offers(f"{_BASE}.abstract", "OffloadKey"):
        return False
    worker = f"{_BASE}.worker.worker"
    return _offers(worker, "TransferResult") and is_dataclass(import_module(worker).TransferResult)


def _offers(module: str, *names: str) -> bool:
    """True if the installed vLLM has this module with these names in it."""
    try:
        found = import_module(module)
    except ModuleNotFoundError:
        return False
    return all(hasattr(found, name) for name in names)
