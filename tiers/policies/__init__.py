"""Cache policies by name.

    policy = create("lru", capacity=1024)

A policy's order is a subclass of `EvictionOrder`. It is named by its key in `ORDERS`, by an entry
point of the group `kvcascade.policies`, or as `"package.module:Class"`.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .arc import ArcOrder
from .fifo import FifoOrder
from .guarded import guarded
from .lirs import LirsOrder
from .lru import LruOrder
from .order import ArraySource, EvictionOrder, heap_arrays
from .ordered import CachePolicy
from .parts.directory import DictDirectory
from .prefix import PrefixOrder
from .s3fifo import S3FifoOrder
from .sieve import SieveOrder
from .slru import SlruOrder

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ORDERS: dict[str, type[EvictionOrder]] = {
    "arc": ArcOrder,
    "fifo": FifoOrder,
    "lirs": LirsOrder,
    "lru": LruOrder,
    "prefix": PrefixOrder,
    "s3fifo": S3FifoOrder,
    "sieve": SieveOrder,
    "slru": SlruOrder,
}
"""Built-in orders by the name used in the configuration."""

ENTRY_POINTS = "kvcascade.policies"
"""Group of entry points through which other packages add orders."""

__all__ = [
    "ENTRY_POINTS",
    "ORDERS",
    "ArraySource",
    "DictDirectory",
    "EvictionOrder",
    "CachePolicy",
    "create",
    "heap_arrays",
    "known_names",
    "named_object",
    "order_class",
]


def order_class(name: str) -> type[EvictionOrder]:
    """Return the order called `name`. Raises `ConfigError` with the known names."""
    if name in ORDERS:
        return ORDERS[name]
    installed = _installed()
    if name in installed.names:
        return _loaded(name, installed[name].value)
    if ":" in name:
        return _loaded(name, name)
    known = ", ".join(known_names())
    raise ConfigError(f"policy {name!r} is unknown; use one of {known} or 'module:Class'")


def known_names() -> tuple[str, ...]:
    """Return the names of all built-in and installed orders, sorted."""
    return tuple(sorted({*ORDERS, *_installed().names}))


def _installed() -> EntryPoints:
    """Return the entry points of other packages' orders."""
    from importlib.metadata import entry_points  # takes 30 ms, and a built-in order needs none

    return entry_points(group=ENTRY_POINTS)


def _loaded(name: str, path: str) -> type[EvictionOrder]:
    """Import an order, and guard it unless it is one of ours.

    Raises `ConfigError` unless it is a subclass of `EvictionOrder`.
    """
    found = named_object("policy", name, path)
    if not (isinstance(found, type) and issubclass(found, EvictionOrder)):
        raise ConfigError(f"policy {name!r} is no EvictionOrder; make it a subclass of that")
    return found if found in ORDERS.values() else guarded(name, found)


def named_object(kind: str, name: str, path: str) -> Any:
    """Import and return the object at `"package.module:object"`.

    Raises `ConfigError` if that fails. `kind` and `name` appear in its message.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:  # a user's module may raise anything when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({said}); check the path, or mend the module"
        ) from None


def create(name: str, capacity: int, directory: DictDirectory | None = None) -> CachePolicy:
    """Create a policy for a tier of `capacity` slots. By default its directory is in memory."""
    order = order_class(name)(capacity)
    return CachePolicy(DictDirectory(capacity) if directory is None else directory, order)
