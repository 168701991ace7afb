"""Orders of a user that fail: each call raises, or names slots that may not leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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


class NamesOneThatIsNotThere(LruOrder):
    number = 1 << 40

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found = super().victims(limit, wanted, mask, window)
        wanted(self.number)
        return [*found[1:], self.number]


class NamesOneBelowZero(NamesOneThatIsNotThere):
    number = -1


class SkipsTheQuestion(LruOrder):
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        return super().victims(limit, lambda slot: True, mask, window)


class SkipsTheMask(LruOrder):
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        return super().victims(limit, wanted, None, window)


class ReturnsAnArray(LruOrder):
    """No fault: its slots are numbers of numpy."""

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found: Any = np.array(super().victims(limit, wanted, mask, window), dtype=np.int32)
        return found  # type: ignore[no-any-return]


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
    NamesOneThatIsNotThere,
    NamesOneBelowZero,
    SkipsTheQuestion,
    SkipsTheMask,
    NamesOneTwice,
)


def path_of(order: type[LruOrder]) -> str:
    """The name of a class in the configuration."""
    return f"{order.__module__}:{order.__name__}"
