"""Orders of a user that fail: each call raises, or names slots that may not leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcascade.tiers.base import SlotMask
from kvcascade.tiers.policies.lru import LruOrder


class Sound(LruOrder):
    """No fault at all."""


class FailsAtInsert(LruOrder):
    """Has changed something already when it raises."""

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        super().insert(slots[:1], tags[:1])
        raise ZeroDivisionError


class FailsAtTouch(LruOrder):
    def touch(self, slots: Sequence[int]) -> None:
        raise ZeroDivisionError


class FailsAtEvicted(LruOrder):
    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        raise ZeroDivisionError


class FailsAtRemove(LruOrder):
    def remove(self, slots: Sequence[int]) -> None:
        raise ZeroDivisionError


class FailsAtVictims(LruOrder):
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        raise ZeroDivisionError


class NamesOneThatMayNotLeave(LruOrder):
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found = super().victims(limit, wanted, mask, window)
        return [*found[1:], self.capacity - 1]


class NamesOneTwice(LruOrder):
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found = super().victims(limit, wanted, mask, window)
        return [*found[:-1], *found[:1]]


class CannotBeMade(LruOrder):
    def __init__(self, *given: object) -> None:
        raise ZeroDivisionError("as users' classes do")


FAILING = (
    FailsAtInsert,
    FailsAtTouch,
    FailsAtEvicted,
    FailsAtRemove,
    FailsAtVictims,
    NamesOneThatMayNotLeave,
    NamesOneTwice,
)


def path_of(order: type[LruOrder]) -> str:
    """The name of a class in the configuration."""
    return f"{order.__module__}:{order.__name__}"
