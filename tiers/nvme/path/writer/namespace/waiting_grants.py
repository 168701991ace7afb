"""Grants of one namespace that wait for slots. Used by the writer's thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...path_messages import ALREADY_SLOT, NO_SLOT, FromWriter, Grant, Granted, Why, pack_slots
from ...presence_table import PresenceTable
from .slot_space import SlotSpace

Reply = tuple[int, FromWriter]
"""A message and the number of the client that gets it."""
MAX_WAITING_PER_CLIENT = 64
"""Most grants of one client that wait; more are answered without slots."""


@dataclass(frozen=True, slots=True)
class WaitingGrant:
    """A grant without an answer."""

    client: int
    message: Grant
    until_s: float
    """Time at which it is answered in any case."""
    need: int
    """Number of slots that it needs at most."""


HeldAmong = Callable[[Sequence[bytes]], frozenset[bytes]]


class WaitingGrants:
    """The grants without an answer, oldest first; false if there are none."""

    def __init__(self, presence: PresenceTable, space: SlotSpace) -> None:
        self._presence = presence
        self._space = space
        self._waiting: deque[WaitingGrant] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def demand(self) -> int:
        """Number of slots that the grants need at most."""
        return sum(each.need for each in self._waiting)

    def add(self, client: int, message: Grant, until_s: float) -> bool:
        """Let a grant wait for `serve`, at most until `until_s`. Return False if too many wait."""
        if sum(each.client == client for each in self._waiting) >= MAX_WAITING_PER_CLIENT:
            return False
        need = int(np.count_nonzero(self._presence.find_many(message.keys) < 0))
        self._waiting.append(WaitingGrant(client, message, until_s, need))
        return True

    def serve(
        self, held_among: HeldAmong, paths: list[int], allowed: int, why: Why, now_s: float
    ) -> list[Reply]:
        """Answer grants from the free slots in `paths`, oldest first.

        `held_among` returns those of some keys that are committed. The write budget allows
        `allowed` slots. `why` is the reason if the tier lacks some of these. If it is LATER, a
        grant that lacks some stays until its deadline.
        """
        replies: list[Reply] = []
        while self._waiting:
            first = self._waiting[0]
            held = held_among(first.message.keys)
            absent = list(dict.fromkeys(key for key in first.message.keys if key not in held))
            wanted = absent[:allowed]
            granted = wanted[: self._space.free(paths)]
            lack = Why.GRANTED if len(wanted) == len(absent) else Why.BUDGET
            if len(granted) < len(wanted):
                lack = why
                if now_s < first.until_s:
                    if why is Why.LATER:
                        break
                    if len(absent) > first.need:  # blocks of it were evicted while it waited
                        self._waiting[0] = replace(first, need=len(absent))
                        break
            self._waiting.popleft()
            allowed -= len(granted)
            replies.append((first.client, self._granted(first, held, granted, paths, lack)))
        return replies

    def leave(self, client: int) -> None:
        """Forget the grants of a client."""
        self._waiting = deque(each for each in self._waiting if each.client != client)

    def _granted(
        self,
        grant: WaitingGrant,
        held: frozenset[bytes],
        keys: list[bytes],
        paths: list[int],
        why: Why,
    ) -> Granted:
        """Return the answer to a grant, which gets slots for `keys`."""
        epoch = self._presence.epoch
        slots = self._space.take(grant.client, epoch, keys, paths) if keys else []
        at = dict(zip(keys, slots, strict=True))
        answer = [
            ALREADY_SLOT if key in held else at.get(key, NO_SLOT) for key in grant.message.keys
        ]
        return Granted(grant.message.request, epoch, pack_slots(answer), why)
