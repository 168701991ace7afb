"""The manager for an engine that hands over block hashes and nothing else.

Such an engine (vLLM 0.16 to 0.19) names no requests, and says neither when one ends nor when a step
does. What the manager wants to know is made out of what there is:

- A request that waits for blocks is known by the last hash of its list, which is the hash of all it
  asks for. It is remembered until it loads, or does not ask again for twice the deadline.
- A load follows the lookup of the same request at once, so nobody relies on hits beyond the next
  lookup, and every lookup that queued something may start it: no promotion waits for a step's end.
- Events are asked for once per step, when the step's results are in: that is its end.
- The recency of a prefix is set when a request comes, and again with everything it stores.

A preempted request's stores are called complete before the workers have done them. Until they
certainly have, their blocks are neither hits nor written anywhere.

Threads: all calls come from the scheduler's thread; `close` from any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from ..tiers.base import BlockHash, LoadStoreSpec
from .base import BlockEvent, PrepareStoreOutput
from .cascading import CascadingOffloadingManager
from .flow import Clock
from .request import Request
from .standstill import Standstill

WAITING_MAX = 4096
"""Requests that are remembered while they wait; the oldest is forgotten for one more."""


class AnonymousManager:
    """Calls about hashes, answered by the cascade."""

    def __init__(
        self,
        manager: CascadingOffloadingManager,
        steps_until_done: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`steps_until_done`: ends of steps after which workers have done what was asked before."""
        self._manager = manager
        self._steps_until_done = steps_until_done
        self._clock = clock
        self._forget_after_s = 2 * manager.options.promotion_deadline_s
        self._waiting: dict[BlockHash, tuple[float, Request]] = {}
        """By last hash: when it asked last, and its state; the one that asked first comes first."""
        self._asked: tuple[BlockHash, Request] | None = None
        """The last lookup that was answered with hits."""
        self._arrived: BlockHash | None = None
        self._stored: BlockHash | None = None
        self._unsure: deque[tuple[int, list[BlockHash]]] = deque()
        """Stores that may still be under way, with the step after which they are not."""
        self._unsure_hashes: set[BlockHash] = set()
        self._steps = 0
        self._standstill = Standstill()

    def lookup(self, block_hashes: Iterable[BlockHash]) -> int | None:
        """Blocks from the first that can be loaded; None: ask again, at most until the deadline."""
        asked = list(block_hashes)
        self._asked = None
        if not asked:
            return 0
        if self._standstill.puts_off():
            return None
        if self._unsure_hashes and not self._unsure_hashes.isdisjoint(asked):
            return None
        found = self._waiting.pop(asked[-1], None)
        request = Request() if found is None else found[1]
        hits = self._manager.lookup(asked, request)
        if hits is None or (hits and found is not None):
            self._waiting[asked[-1]] = self._clock(), request
        if hits is None:
            if len(self._waiting) > WAITING_MAX:
                self._forget(next(iter(self._waiting)))
            self._manager.end_step()
        elif hits:
            self._asked = asked[-1], request
        elif found is not None:
            self._manager.finish_request(request)
        return hits

    def prepare_load(self, block_hashes: Iterable[BlockHash]) -> LoadStoreSpec:
        """Pin blocks of the lookup just answered; returns where the worker finds them."""
        self._standstill.note_progress()
        key, request = self._asked or (None, Request())
        spec = self._manager.prepare_load(list(block_hashes), request)
        request.keys.clear()  # their use was counted when the request came
        if key is not None:
            self._forget(key)
        self._asked = None
        return spec

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        """The worker has read them."""
        self._manager.complete_load(list(block_hashes))

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """All blocks of a request, which came, waits, or stored the last of them just now."""
        touched = list(block_hashes)
        if not touched:
            return
        last = touched[-1]
        if last == self._stored:
            self._stored = None
            self._settle(touched, is_new=True)
        elif last != self._arrived and last not in self._waiting:
            self._arrived = last
            self._settle(touched, is_new=False)

    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """As the cascade's. What is returned may lack the end of the list."""
        self._standstill.note_progress()
        offered = list(block_hashes)
        output = self._manager.prepare_store(offered)
        self._stored = offered[-1] if offered and output is not None else None
        return output

    def complete_store(
        self, block_hashes: Iterable[BlockHash], success: bool = True, *, is_done: bool = True
    ) -> None:
        """The workers wrote them, or, if not `is_done`, will have within the steps it takes."""
        stored = list(block_hashes)
        if is_done or not success:
            self._manager.complete_store(stored, success)
            return
        self._unsure.append((self._steps + self._steps_until_done, stored))
        self._unsure_hashes.update(stored)

    def take_events(self) -> list[BlockEvent]:
        """What came and went since the last call; the end of a step."""
        self._steps += 1
        self._standstill.end_step()
        while self._unsure and self._unsure[0][0] <= self._steps:
            self._complete_oldest()
        self._manager.end_step()
        oldest_s = self._clock() - self._forget_after_s
        while self._waiting:
            key, (since_s, _) = next(iter(self._waiting.items()))
            if since_s > oldest_s:
                break
            self._forget(key)
        return self._manager.take_events()

    def workers_ended(self) -> None:
        """No worker transfer is under way any more: the engine stops."""
        while self._unsure:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        _, stored = self._unsure.popleft()
        self._unsure_hashes.difference_update(stored)
        self._manager.complete_store(stored)

    def _settle(self, block_hashes: list[BlockHash], *, is_new: bool) -> None:
        self._manager.finish_request(Request(keys=dict.fromkeys(block_hashes, is_new)))

    def _forget(self, key: BlockHash) -> None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._manager.finish_request(found[1])
