"""Manager for an engine that passes block hashes only.

Such an engine (vLLM 0.16 to 0.19) identifies no requests. It reports neither the end of a request
nor the end of a step. The missing facts are derived from its calls:

- The last hash of a lookup covers the whole prefix, so it identifies a waiting request. The request
  is kept until it loads, or until it has not asked again for twice the deadline.
- A load directly follows the lookup of the same request. Hits are therefore valid until the next
  lookup only, and a lookup starts the promotions that it queued.
- The engine fetches events once per step, after the results of the step: that ends the step.
- The recency of a prefix is set when the request arrives, and again after each of its stores.

If a request is preempted, the engine reports its stores as complete before the workers have written
the blocks. Such blocks become hits, and are written back, some steps later.

All calls come from the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from ...tiers.base import BlockHash, LoadStoreSpec
from ..base import BlockEvent, PrepareStoreOutput
from ..cascading import CascadingOffloadingManager
from ..core import Clock
from ..request import Request
from .standstill import Standstill

WAITING_MAX = 4096
"""Largest number of waiting requests. Beyond it, the oldest request is forgotten."""


class AnonymousManager:
    """Adapter from calls with hashes only to `CascadingOffloadingManager`."""

    def __init__(
        self,
        manager: CascadingOffloadingManager,
        steps_until_done: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`steps_until_done`: number of steps after which every worker has finished the transfers
        that were started before."""
        self._manager = manager
        self._steps_until_done = steps_until_done
        self._clock = clock
        self._forget_after_s = 2 * manager.options.promotion_deadline_s
        self._waiting: dict[BlockHash, tuple[float, Request]] = {}
        """Waiting requests by their last hash, with the time of their last lookup. The oldest
        lookup comes first."""
        self._asked: tuple[BlockHash, Request] | None = None
        """Last hash and request of the previous lookup, if it found hits."""
        self._arrived: BlockHash | None = None
        self._stored: BlockHash | None = None
        self._unsure: deque[tuple[int, list[BlockHash]]] = deque()
        """Stores that may still be in flight, with the step at which they have certainly ended."""
        self._unsure_hashes: set[BlockHash] = set()
        self._steps = 0
        self._standstill = Standstill()

    def lookup(self, block_hashes: Iterable[BlockHash]) -> int | None:
        """Return the length of the longest prefix of hits. None: ask again, at most until the
        deadline."""
        asked = list(block_hashes)
        self._asked = None
        if not asked:
            return 0
        if self._standstill.must_defer():
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
        """Pin blocks of the previous lookup. Return the slots that the worker reads."""
        self._standstill.note_progress()
        key, request = self._asked or (None, Request())
        spec = self._manager.prepare_load(list(block_hashes), request)
        request.keys.clear()  # their use was counted when the request arrived
        if key is not None:
            self._forget(key)
        self._asked = None
        return spec

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        """Unpin blocks that the worker has read."""
        self._manager.complete_load(list(block_hashes))

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Set the recency of a request's blocks: it arrived, waits, or stored its last block."""
        touched = list(block_hashes)
        if not touched:
            return
        last = touched[-1]
        if last == self._stored:
            self._stored = None
            self._set_recency(touched, is_new=True)
        elif last != self._arrived and last not in self._waiting:
            self._arrived = last
            self._set_recency(touched, is_new=False)

    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """Take slots for the blocks, as `CascadingOffloadingManager.prepare_store` does. The output
        may lack the end of the list."""
        self._standstill.note_progress()
        offered = list(block_hashes)
        output = self._manager.prepare_store(offered)
        self._stored = offered[-1] if offered and output is not None else None
        return output

    def complete_store(
        self, block_hashes: Iterable[BlockHash], success: bool = True, *, is_done: bool = True
    ) -> None:
        """Complete a store. If not `is_done`, the workers may still write the blocks for
        `steps_until_done` steps."""
        stored = list(block_hashes)
        if is_done or not success:
            self._manager.complete_store(stored, success)
            return
        self._unsure.append((self._steps + self._steps_until_done, stored))
        self._unsure_hashes.update(stored)

    def take_events(self) -> list[BlockEvent]:
        """End the step. Return the blocks stored or removed since the last call."""
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
        """Drop the stores whose end is not known: the engine stops, and some may never have begun.

        vLLM's workers launch the stores of a step in the next one, which may not come.
        """
        while self._unsure:
            self._complete_oldest(success=False)

    def _complete_oldest(self, *, success: bool = True) -> None:
        _, stored = self._unsure.popleft()
        self._unsure_hashes.difference_update(stored)
        self._manager.complete_store(stored, success)

    def _set_recency(self, block_hashes: list[BlockHash], *, is_new: bool) -> None:
        self._manager.finish_request(Request(keys=dict.fromkeys(block_hashes, is_new)))

    def _forget(self, key: BlockHash) -> None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._manager.finish_request(found[1])
