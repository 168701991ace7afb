"""The manager's books, counted anew: who uses which slot, what may leave, and what is announced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockStatus

from .cascade import Cascade
from .inside import demoters, first_tier
from .memory_backend import MemoryBackend


class Books:
    """What the transfers under way, as the engine and the links know them, do to each slot."""

    def __init__(self, cascade: Cascade, read: Collection[int], written: Collection[int]) -> None:
        """`read` and `written`: slots of the first tier, once for each transfer of a worker."""
        self._cascade = cascade
        self._manager = cascade.manager
        self.readers: list[Counter[int]] = [Counter() for _ in cascade.backends]
        self.writing: list[set[int]] = [set() for _ in cascade.backends]
        self.leaving: list[set[int]] = [set() for _ in cascade.backends]
        """Slots that are copied down: neither dirty nor settled."""
        self.readers[0].update(read)
        self.writing[0].update(written)
        for index, demoter in enumerate(demoters(self._manager)):
            for job in demoter.jobs.values():  # it reads here; its writes below are the tier's
                slots = [status.block_id for status in job.statuses]
                self.readers[index].update(slots)
                self.leaving[index].update(slots)
        for queue in self._manager._promoter.queues:
            for job_up in queue.jobs.values():
                self.writing[0] |= {status.block_id for status in job_up.statuses}
        ready_at = first_tier(self._manager).policy.ready_at
        for status in self._manager._workers.quarantined():  # a block that stays may be read
            if ready_at[status.block_id]:
                self.readers[0][status.block_id] += 1
            else:
                self.writing[0].add(status.block_id)

    def check(self, requests: Collection[Request], content: Callable[[BlockHash], bytes]) -> None:
        """Every slot of every tier, and the events so far. `content`: the right bytes."""
        manager = self._manager
        for request in requests:
            self.readers[0].update(status.block_id for status in request.holds.values())
        held = {status.block_id for request in requests for status in request.holds.values()}
        assert set(manager._claims._holds.users) == held, "held for nobody"
        assert manager._claims.room.taken() <= self._most(), "beyond the budget"
        for request in requests:
            self._check_request(request)
        self._check_evictable()
        self._cascade.apply_events()
        for index, backend in enumerate(self._cascade.backends):
            check = self._check_lower if index else self._check_top
            ready = set(check(index, backend, content))
            assert self._cascade.seen[backend.medium] == ready, "events"

    def _most(self) -> int:
        """Slots that promotions may ever take."""
        given = self._manager.options.promotion_budget_slots
        return self._cascade.backends[0].capacity if given is None else given

    def _check_evictable(self) -> None:
        """A store looks for no more victims than the first tier says that there may be."""
        top = first_tier(self._manager)
        victims = top.policy.coldest(top.capacity, mask=top.dirt.settled_mask)
        assert self._manager._core.is_single or len(victims) <= top.dirt.evictable_max, (
            "never evicted"
        )

    def _check_request(self, request: Request) -> None:
        """Only those that were admitted take room, and what they wait for is on its way."""
        claim, promoter = request.claim, self._manager._promoter
        if claim is None or not claim.is_admitted:
            assert not request.holds and not request.pending, "it takes room and waits for its turn"
        for block_hash in request.pending:
            pending = promoter.pending.get(block_hash)
            assert pending is not None and request in pending.waiters, "it waits for nothing"
            assert not pending.is_late, "it waits for what is late"

    def _check_lower(
        self, index: int, backend: MemoryBackend, content: Callable[[BlockHash], bytes]
    ) -> Iterator[BlockHash]:
        """Gives the blocks that a tier below says it holds; its slots are its own."""
        for block_hash, slot in self._cascade.nodes[index - 1].presence.slots.items():
            assert bytes(backend.view(slot)) == content(BlockHash(block_hash)), "wrong bytes below"
            yield BlockHash(block_hash)

    def _check_top(
        self, index: int, backend: MemoryBackend, content: Callable[[BlockHash], bytes]
    ) -> Iterator[BlockHash]:
        """Gives the blocks that are ready."""
        policy = self._cascade.policies[index]
        readers, writing, blocks = self.readers[index], self.writing[index], 0
        for status in backend._statuses:
            slot = status.block_id
            found = policy._directory.at_slot(slot)
            if slot in backend._free:
                assert found is None and not readers[slot] and slot not in writing, "in use"
            elif found is None:
                assert status.ref_cnt > 0 and (readers[slot] or slot in writing), "lost for ever"
            elif status.ref_cnt < 0:
                blocks += 1
                assert slot in writing, "nobody writes what is waited for"
            else:
                blocks += 1
                assert slot not in writing, "ready, and written to"
                assert status.ref_cnt == readers[slot], "pins do not add up"
                assert bytes(backend.view(slot)) == content(found[0]), "wrong bytes"
                assert self._may_leave_some_day(index, status), "never written, never dropped"
                yield found[0]
        assert blocks == len(policy)

    def _may_leave_some_day(self, index: int, status: BlockStatus) -> bool:
        top, slot = first_tier(self._manager), status.block_id
        is_settled = bool(top.dirt.settled_mask[slot])
        return is_settled or bool(top.dirt.dirty[slot]) or slot in self.leaving[index]
