"""Cache policies by name.

    policy = create("lru", capacity=1024)

An order may be given by its name here, by the name of an entry point of the group
`kvcascade.policies`, or as `"package.module:Class"`: a subclass of `EvictionOrder`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from ...errors import ConfigError
from ..base import CachePolicy
from .directory import BlockDirectory, DictDirectory
from .named_object import named_object
from .order import ArraySource, EvictionOrder, heap_arrays
from .ordered import OrderedPolicy
from .usage import UsageOrder

_CLASSES = {
    "arc": "ArcOrder",
    "fifo": "FifoOrder",
    "lirs": "LirsOrder",
    "lru": "LruOrder",
    "prefix": "PrefixOrder",
    "s3fifo": "S3FifoOrder",
    "sieve": "SieveOrder",
    "slru": "SlruOrder",
}
"""Class of each built-in order, in the module that has the order's name."""

ORDERS: dict[str, type[EvictionOrder]] = {
    name: getattr(import_module(f".{name}", __name__), class_name)
    for name, class_name in _CLASSES.items()
}
"""Built-in orders by the name used in the configuration."""

ENTRY_POINTS = "kvcascade.policies"
"""Group of entry points by which other packages add orders."""

__all__ = [
    "ENTRY_POINTS",
    "ORDERS",
    "ArraySource",
    "BlockDirectory",
    "DictDirectory",
    "EvictionOrder",
    "OrderedPolicy",
    "create",
    "heap_arrays",
    "known_names",
    "order_class",
]


def order_class(name: str) -> type[EvictionOrder]:
    """The order called `name`. Raises `ConfigError` naming what there is."""
    if name in ORDERS:
        return ORDERS[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name in installed.names:
        return _loaded(name, installed[name].value)
    if ":" in name:
        return _loaded(name, name)
    known = ", ".join(known_names())
    raise ConfigError(f"policy {name!r} is unknown; use one of {known} or 'module:Class'")


def known_names() -> tuple[str, ...]:
    """Every name that may stand in the configuration: the built-in ones and what is installed."""
    return tuple(sorted({*ORDERS, *entry_points(group=ENTRY_POINTS).names}))


def _loaded(name: str, path: str) -> type[EvictionOrder]:
    found = named_object("policy", name, path)
    if not (isinstance(found, type) and issubclass(found, EvictionOrder)):
        raise ConfigError(f"policy {name!r} is no EvictionOrder; make it a subclass of that")
    return found


def create(
    name: str,
    capacity: int,
    directory: BlockDirectory | None = None,
    arrays: ArraySource = heap_arrays,
    *,
    with_usage: bool = False,
) -> CachePolicy:
    """A policy for a tier of `capacity` slots; without a directory it lives in memory.

    `with_usage` also notes when and how often blocks are used (see `UsageOrder`).
    """
    order = order_class(name)(capacity, arrays)
    if with_usage:
        order = UsageOrder(order, arrays)
    return OrderedPolicy(DictDirectory(capacity) if directory is None else directory, order)
