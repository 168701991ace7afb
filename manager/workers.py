"""What the workers are doing with the first tier's slots, and what they may still be doing.

After a reset the engine reports no completion of earlier transfers, yet a worker may go on writing
into its slots for a few steps: such slots stay out of use until it certainly has stopped. After a
reset by another engine, which this one's engine knows nothing of, completions come as ever: such
transfers are *outdated*, and their slots are given back when they are reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from ..tiers.base import Backend, BlockHash, BlockStatus


class WorkerTransfers:
    """Worker stores and loads under way, and the quarantine. Under the manager's lock."""

    def __init__(self, backend: Backend, steps_until_flushed: int) -> None:
        self._backend = backend
        self._steps_until_flushed = steps_until_flushed
        self._step = 0
        self._quarantine: list[tuple[int, list[BlockStatus], list[BlockStatus]]] = []
        self.stores: dict[BlockHash, BlockStatus] = {}
        """Blocks that workers write now."""
        self.loads: dict[BlockHash, tuple[BlockStatus, int]] = {}
        """Blocks that workers read now: the slot, and how many loads read it."""
        self.outdated: dict[BlockHash, tuple[BlockStatus, int]] = {}
        """Blocks that left the cache under a worker: the slot, and how many completions are to
        come. Till then nothing of that name may enter, or one could be taken for the other."""

    @property
    def is_busy(self) -> bool:
        """True if slots will be given back when workers go on."""
        return bool(self.stores or self.loads or self.outdated or self._quarantine)

    def begin_loads(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        """Workers will read these blocks, which the caller has pinned once more."""
        loads = self.loads
        for block_hash, status in zip(block_hashes, statuses, strict=True):
            entry = loads.get(block_hash)
            loads[block_hash] = (status, 1 if entry is None else entry[1] + 1)

    def end_loads(self, block_hashes: Collection[BlockHash]) -> None:
        """A worker has read these blocks: each loses one pin."""
        pop = self.loads.pop
        for block_hash in block_hashes:
            entry = pop(block_hash, None)
            if entry is None:  # from before a reset
                self.report(block_hash)
                continue
            status, left = entry
            if left > 1:
                self.loads[block_hash] = (status, left - 1)
            assert status.ref_cnt > 0, "a loading block is pinned"
            status.ref_cnt -= 1

    def using(self) -> list[BlockStatus]:
        """The slots that workers use now, each once."""
        others = chain(self.loads.values(), self.outdated.values())
        return [*self.stores.values(), *(status for status, _ in others)]

    def outdate(self) -> None:
        """Every block leaves the cache, and completions come as ever; one count of each slot in use
        is given back by the last of them (`report`)."""
        for block_hash, status in self.stores.items():
            self.outdated[block_hash] = (status, 1)
        self.outdated.update(self.loads)
        self.stores.clear()
        self.loads.clear()

    def report(self, block_hash: BlockHash) -> None:
        """A worker ended with a block that is not in the cache, or that was never prepared."""
        entry = self.outdated.pop(block_hash, None)
        if entry is None:
            return
        status, left = entry
        if left > 1:
            self.outdated[block_hash] = (status, left - 1)
        else:
            self._let_go(status)

    def outdate_pinned(self) -> None:
        """What was to stay in the cache leaves it: such slots are freed, not unpinned, later."""
        self._quarantine = [(until, [*gone, *kept], []) for until, gone, kept in self._quarantine]

    def quarantined(self) -> Iterator[BlockStatus]:
        """Slots that are out of use since a reset."""
        for _, statuses, pinned in self._quarantine:
            yield from statuses
            yield from pinned

    def forget(self, statuses: list[BlockStatus], pinned: list[BlockStatus] | None = None) -> None:
        """No completion will come any more; keep these slots (one count of each) out of use.

        Those in `pinned` hold blocks that stay in the cache: they are unpinned then, not freed.
        """
        self.stores.clear()
        self.loads.clear()
        self.outdated.clear()
        if statuses or pinned:
            until = self._step + self._steps_until_flushed
            self._quarantine.append((until, statuses, pinned or []))

    def end_step(self) -> None:
        """One more step has gone by."""
        self._step += 1
        while self._quarantine and self._quarantine[0][0] <= self._step:
            self._release_oldest()

    def all_flushed(self) -> None:
        """The workers have ended every transfer from before the last reset."""
        while self._quarantine:
            self._release_oldest()

    def _release_oldest(self) -> None:
        _, statuses, pinned = self._quarantine.pop(0)
        for status in pinned:
            status.ref_cnt -= 1
        for status in statuses:
            self._let_go(status)

    def _let_go(self, status: BlockStatus) -> None:
        """Who brings the count of a slot to zero after a reset frees it."""
        status.ref_cnt -= 1
        if status.ref_cnt == 0:
            self._backend.free(status)
