"""The CPU tier: a shared-memory arena of slots and the backend that allocates them.

The names are loaded on first use. A process that only moves blocks needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arena import Arena, ArenaRole
    from .arena_file import arena_path, sweep
    from .cpu_backend import CpuBackend
    from .header import ArenaGeometry

_LATE = {
    "Arena": ".arena",
    "ArenaGeometry": ".header",
    "ArenaRole": ".arena",
    "CpuBackend": ".cpu_backend",
    "arena_path": ".arena_file",
    "sweep": ".arena_file",
}

__all__ = ["Arena", "ArenaGeometry", "ArenaRole", "CpuBackend", "arena_path", "sweep"]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LATE[name], __name__), name)
    globals()[name] = value
    return value
