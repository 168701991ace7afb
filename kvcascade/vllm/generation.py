"""Which adapter fits the installed vLLM, found by what it offers, not by its version.

vLLM rebuilt its interface for offloading several times. The generations differ in their modules and
in the names in them. A vLLM that fits none of them is refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module

from ..errors import ConfigError

_BASE = "vllm.v1.kv_offload"


@dataclass(frozen=True, slots=True)
class Generation:
    """vLLM versions that one adapter serves."""

    module: str
    """Name of the adapter's module in this folder."""
    first: int
    """Minor version of the oldest vLLM of the generation."""
    last: int
    """Minor version of the newest vLLM of the generation."""
    fits: Callable[[], bool]
    """Returns True if the installed vLLM is of this generation, or of a newer one."""


GENERATIONS = (
    Generation("v0_26", 26, 33, lambda: _has_worker() and _offers(f"{_BASE}.config")),
    Generation("v0_25", 25, 25, lambda: _has_worker()),
    Generation("v0_24", 24, 24, lambda: _has_handlers_and_steps()),
    Generation("v0_16", 16, 19, lambda: _is_seed()),
)
"""Newest first; the first that fits is taken."""


def supported(generations: Sequence[Generation] = GENERATIONS) -> str:
    """Return the supported versions in words, generations without a gap as one range."""
    spans: list[tuple[int, int]] = []
    for each in reversed(generations):
        if spans and each.first == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], each.last)
        else:
            spans.append((each.first, each.last))
    return " or ".join(
        f"0.{first}" if first == last else f"0.{first} to 0.{last}" for first, last in spans
    )


def adapter() -> str:
    """Name of the module with the adapter. Raises `ConfigError` if no adapter fits."""
    if not _offers("vllm"):
        raise ConfigError("kvcascade.spec needs vLLM, which is not installed; pip install vllm.")
    for generation in GENERATIONS:
        if generation.fits():
            return generation.module
    version = getattr(import_module("vllm"), "__version__", "(of no known version)")
    raise ConfigError(
        f"kvcascade does not support the installed vLLM {version}, whose interface for offloading "
        f"is another one; install vLLM {supported()}."
    )


def _has_worker() -> bool:
    """Return True if a spec makes a worker that submits jobs."""
    return _offers(f"{_BASE}.base", "OffloadingWorker")


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
