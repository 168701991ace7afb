"""An order of the user's own, which may fail: `lru` takes its place then, until the next start.

The slots that are held are noted beside the order with their last uses, so that the next order can
begin with them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, KVCascadeError
from ...logs import get_logger
from ..base import SlotMask
from .lru import LruOrder
from .order import ArraySource, EvictionOrder, heap_arrays

_log = get_logger(__name__)


class GuardedOrder(EvictionOrder):
    """Passes every call on to an order of another package; `guarded` makes subclasses."""

    policy: ClassVar[str]
    """Name of the policy in the configuration."""
    guarded: ClassVar[type[EvictionOrder]]

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        """Raises `ConfigError` if the order cannot be made."""
        super().__init__(capacity)
        self._last_use = arrays("guarded_last_use", capacity, np.uint64)
        """Number of the last use of each slot; 0 for a slot that is not held."""
        held = self._by_last_use()
        self._uses = len(held)
        self._last_use[held] = np.arange(1, self._uses + 1)
        self._has_failed = arrays("guarded_failed", 1, np.uint8)
        """Nonzero from a fault on. The order's own arrays are not kept up to date any more."""

        def own_arrays(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
            """Under names of their own: no order of ours may trust them after a fault."""
            return arrays(f"own_{name}", length, dtype)

        try:
            self._order = self.guarded(capacity, own_arrays)
        except (KVCascadeError, OSError, MemoryError):
            raise
        except Exception as error:  # a user's class may raise anything
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"policy {self.policy!r} cannot be made ({said}); mend it") from error
        if self._has_failed[0]:
            self._has_failed[0] = 0
            self._pass_on("reconcile", np.sort(held))
            self._pass_on("settle", held)

    def expect(self, tags: Sequence[int]) -> None:
        self._pass_on("expect", tags)

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._note_use(slots)
        self._pass_on("insert", slots, tags)

    def touch(self, slots: Sequence[int]) -> None:
        self._note_use(slots)
        self._pass_on("touch", slots)

    def settle(self, slots: Sequence[int]) -> None:
        here = np.asarray(slots, dtype=np.intp)
        self._last_use[here] = np.sort(self._last_use[here])
        self._pass_on("settle", slots)

    def chain(self, slots: Sequence[int], blocks: int) -> None:
        self._pass_on("chain", slots, blocks)

    def remove(self, slots: Sequence[int]) -> None:
        self._last_use[np.asarray(slots, dtype=np.intp)] = 0
        self._pass_on("remove", slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._last_use[np.asarray(slots, dtype=np.intp)] = 0
        self._pass_on("evicted", slots, tags)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        asked = _Question(wanted, self)
        try:
            found = list(map(int, self._order.victims(limit, asked, mask, window)))
            asked.check(found, limit, mask)
        except Exception as error:
            if error is asked.error:  # of the caller, not of the order
                raise
            self._fall_back(error)
            return self._order.victims(limit, wanted, mask, window)
        return found

    def clear(self) -> None:
        self._last_use[:] = 0
        self._pass_on("clear")

    def reconcile(self, present: npt.NDArray[Any]) -> None:
        known = np.maximum(self._last_use[present], 1)
        self._last_use[:] = 0
        self._last_use[present] = known
        self._pass_on("reconcile", present)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < self.capacity and bool(self._last_use[slot])

    def _note_use(self, slots: Sequence[int]) -> None:
        first, self._uses = self._uses + 1, self._uses + len(slots)
        self._last_use[np.asarray(slots, dtype=np.intp)] = np.arange(first, self._uses + 1)

    def _by_last_use(self) -> list[int]:
        """Return the slots that are held, least recent first."""
        held = np.flatnonzero(self._last_use)
        slots: list[int] = held[np.argsort(self._last_use[held], kind="stable")].tolist()
        return slots

    def _pass_on(self, method: str, *given: object) -> None:
        try:
            getattr(self._order, method)(*given)
        except Exception as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """Let `lru` decide after a fault of the order. A fault of `lru` itself is raised."""
        if self._has_failed[0]:
            raise error
        text = "policy %r failed; lru takes its place until the next start; mend it"
        _log.error(text, self.policy, exc_info=error)
        self._has_failed[0] = 1
        self._order = LruOrder(self.capacity)
        self._order.insert(self._by_last_use(), [])


class _Question:
    """The caller's question whether a slot may leave. It remembers the slots that may."""

    def __init__(self, wanted: Callable[[int], bool], held: Container[int]) -> None:
        self.error: Exception | None = None
        """Exception of the caller."""
        self._wanted = wanted
        self._held = held
        self._accepted: set[int] = set()

    def __call__(self, slot: int) -> bool:
        slot = int(slot)  # an order may pass numbers of numpy
        if slot not in self._held:
            return False
        try:
            is_wanted = self._wanted(slot)
        except Exception as error:
            self.error = error
            raise
        if is_wanted:
            self._accepted.add(slot)
        return is_wanted

    def check(self, found: Sequence[int], limit: int, mask: SlotMask | None) -> None:
        """Raise `ValueError` unless the slots are different ones that may leave."""
        may_leave = len(self._accepted.intersection(found)) == len(found) <= limit
        if not may_leave or (mask is not None and not all(mask[slot] for slot in found)):
            raise ValueError(f"victims returned {len(found)} slots, and some may not leave")


@cache
def guarded(policy: str, order: type[EvictionOrder]) -> type[EvictionOrder]:
    """Return the guarded form of a user's class."""
    facts: dict[str, object] = {
        "__doc__": order.__doc__,
        "policy": policy,
        "guarded": order,
        "wants_tags": order.wants_tags,
        "wants_chains": order.wants_chains,
        "state_bytes": order.state_bytes,
        "state_bytes_per_slot": order.state_bytes_per_slot,
    }
    if order.expect is EvictionOrder.expect:  # else digests were made for nothing
        facts["expect"] = EvictionOrder.expect
    return type(f"Guarded{order.__name__}", (GuardedOrder,), facts)
