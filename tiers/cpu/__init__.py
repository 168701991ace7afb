"""The CPU tier: a shared-memory arena of slots and the backend that allocates them."""

from .arena import Arena, ArenaRole
from .arena_file import arena_path, sweep
from .cpu_backend import CpuBackend
from .header import ArenaGeometry

__all__ = ["Arena", "ArenaGeometry", "ArenaRole", "CpuBackend", "arena_path", "sweep"]
