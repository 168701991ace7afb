"""Cache policies by name.

    policy = create("lru", capacity=1024)

An order may be given by its name here or as `"package.module:Class"`, a subclass of
`EvictionOrder`.
"""

from __future__ import annotations

import importlib

from ...errors import ConfigError
from ..base import CachePolicy
from .arc import ArcOrder
from .directory import BlockDirectory, DictDirectory
from .lru import LruOrder
from .order import ArraySource, EvictionOrder, heap_arrays
from .ordered import OrderedPolicy

ORDERS: dict[str, type[EvictionOrder]] = {"arc": ArcOrder, "lru": LruOrder}
"""Every built-in order by the name used in the configuration."""

__all__ = [
    "ORDERS",
    "ArraySource",
    "BlockDirectory",
    "DictDirectory",
    "EvictionOrder",
    "OrderedPolicy",
    "create",
    "heap_arrays",
    "order_class",
]


def order_class(name: str) -> type[EvictionOrder]:
    """The order called `name`. Raises `ConfigError` naming what there is."""
    if name in ORDERS:
        return ORDERS[name]
    module_name, _, class_name = name.partition(":")
    if not class_name:
        known = ", ".join(sorted(ORDERS))
        raise ConfigError(f"policy {name!r} is unknown; use one of {known} or 'module:Class'")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {name!r} cannot be imported ({error}); check the path") from None
    if not (isinstance(found, type) and issubclass(found, EvictionOrder)):
        raise ConfigError(f"policy {name!r} is no EvictionOrder; make it a subclass of that")
    return found


def create(
    name: str,
    capacity: int,
    directory: BlockDirectory | None = None,
    arrays: ArraySource = heap_arrays,
) -> CachePolicy:
    """A policy for a tier of `capacity` slots; without a directory it lives in memory."""
    order = order_class(name)(capacity, arrays)
    return OrderedPolicy(DictDirectory(capacity) if directory is None else directory, order)
