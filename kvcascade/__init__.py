"""kvcascade: multi-tier KV-cache offloading for vLLM, from GPU to CPU memory to NVMe.

Importing this package loads neither torch nor vLLM. All names but the errors are loaded on first
use: a process that moves blocks starts with this package, and needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    ErrorKind,
    FormatError,
    InUseError,
    KVCascadeError,
    NoSpaceError,
    TierIOError,
)

if TYPE_CHECKING:
    from .block_cache import BlockCache, PutOutcome, open
    from .config.schema import CascadeConfig, parse
    from .tiers.base import Backend, BlockStatus, LoadStoreSpec
    from .tiers.policies.ordered import CachePolicy

__version__ = "0.1.0"

_LATE = {
    "Backend": ".tiers.base",
    "BlockCache": ".block_cache",
    "BlockStatus": ".tiers.base",
    "CachePolicy": ".tiers.policies.ordered",
    "CascadeConfig": ".config.schema",
    "LoadStoreSpec": ".tiers.base",
    "PutOutcome": ".block_cache",
    "open": ".block_cache",
    "parse": ".config.schema",
}

__all__ = [
    "Backend",
    "BlockCache",
    "BlockStatus",
    "CachePolicy",
    "CascadeConfig",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "ErrorKind",
    "FormatError",
    "InUseError",
    "KVCascadeError",
    "LoadStoreSpec",
    "NoSpaceError",
    "PutOutcome",
    "TierIOError",
    "__version__",
    "open",
    "parse",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LATE[name], __name__), name)
    globals()[name] = value
    return value
