"""Pins of ready blocks of the first tier, for requests that wait for the rest of their prefix.

A held block cannot be evicted. A block that several requests hold takes one slot of the promotion
budget. Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView

from ..tiers.base import BlockHash, BlockStatus
from .request import Request


class Holds:
    """Pinned blocks by request. `len` returns the number of held slots."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        """Number of requests that hold each slot."""
        self._requests: dict[Request, None] = {}
        """Requests that hold a block, in the order of their first pin."""

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, slot: int) -> bool:
        return slot in self._users

    def slots(self) -> KeysView[int]:
        """Return the held slots, each once."""
        return self._users.keys()

    def pin(self, request: Request, block_hash: BlockHash, status: BlockStatus) -> None:
        """Pin a ready block until the request loads it. No effect if the request holds it."""
        if block_hash not in request.holds:
            status.ref_cnt += 1
            request.holds[block_hash] = status
            self._requests[request] = None
            self._users[status.block_id] = self._users.get(status.block_id, 0) + 1

    def release(self, request: Request) -> None:
        """Unpin all blocks that the request holds."""
        if not request.holds:
            return
        for status in request.holds.values():
            status.ref_cnt -= 1
            users = self._users.pop(status.block_id)
            if users > 1:
                self._users[status.block_id] = users - 1
        request.holds.clear()
        del self._requests[request]

    def blocks(self) -> Iterator[BlockHash]:
        """Yield the held blocks in prefix order. A block held by several requests comes several
        times."""
        for request in self._requests:
            yield from request.holds

    def forget_all(self) -> None:
        """Forget every hold without unpinning, because the first tier was reset."""
        self._users.clear()
        for request in self._requests:
            request.holds.clear()
        self._requests.clear()
