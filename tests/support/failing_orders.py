"""Orders of a user that fail: each call raises, or names slots that may not leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcascade.tiers.base import SlotMask
from kvcascade.tiers.policies.lru import LruOrder
from kvcascade.tiers.policies.order import EvictionOrder
from kvcascade.tiers.policies.prefix import PrefixOrder


class Sound(LruOrder):
    """No fault at all."""


class SoundPrefix(PrefixOrder):
    """No fault at all, and the most arrays."""


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


class OtherVictims(LruOrder):
    """Asks another question than it was given, or returns other slots; subclasses say which."""

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found = super().victims(limit, self.question(wanted), self.allowed(mask), window)
        return self.named(found)

    def question(self, wanted: Callable[[int], bool]) -> Callable[[int], bool]:
        return wanted

    def allowed(self, mask: SlotMask | None) -> SlotMask | None:
        return mask

    def named(self, found: list[int]) -> list[int]:
        return found


class FailsAtVictims(OtherVictims):
    def named(self, found: list[int]) -> list[int]:
        raise ZeroDivisionError


class NamesOneThatIsNotThere(OtherVictims):
    """Asks about that slot, too."""

    number = 1 << 40

    def question(self, wanted: Callable[[int], bool]) -> Callable[[int], bool]:
        wanted(self.number)
        return wanted

    def named(self, found: list[int]) -> list[int]:
        return [*found[1:], self.number]


class NamesOneBelowZero(NamesOneThatIsNotThere):
    number = -1


class SkipsTheQuestion(OtherVictims):
    def question(self, wanted: Callable[[int], bool]) -> Callable[[int], bool]:
        return lambda slot: True


class SkipsTheMask(OtherVictims):
    def allowed(self, mask: SlotMask | None) -> SlotMask | None:
        return None


class ReturnsAnArray(OtherVictims):
    """No fault: its slots are numbers of numpy."""

    def named(self, found: list[int]) -> list[int]:
        slots: Any = np.array(found, dtype=np.int32)
        return slots  # type: ignore[no-any-return]


class NamesOneTwice(OtherVictims):
    def named(self, found: list[int]) -> list[int]:
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


def path_of(order: type[EvictionOrder]) -> str:
    """The name of a class in the configuration."""
    return f"{order.__module__}:{order.__name__}"
