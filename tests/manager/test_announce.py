"""Blocks that an earlier engine left are announced in batches, and only while they are there."""

from __future__ import annotations

import threading

from support.cascade import Cascade, key

from kvcascade.errors import CorruptionError
from kvcascade.observe.announce import BATCH_BLOCKS, MAX_BATCHES, Announcer
from kvcascade.tiers.base import BlockHash

WAIT_S = 10.0


class Index:
    """Sorted keys; `asked` tells when the announcer asked for the end."""

    def __init__(self, n: int) -> None:
        self.keys = sorted(key(i) for i in range(n))
        self.ended = threading.Event()

    def after(self, last: bytes, limit: int) -> list[BlockHash]:
        found = [k for k in self.keys if k > last][:limit]
        if not found:
            self.ended.set()
        return found


def test_every_key_comes_once_in_bounded_batches() -> None:
    index = Index(3 * BATCH_BLOCKS + 7)
    announcer = Announcer(index.after)
    assert index.ended.wait(WAIT_S)
    taken: list[BlockHash] = []
    while batch := announcer.take():
        assert len(batch) <= BATCH_BLOCKS
        taken += batch
    assert taken == index.keys
    announcer.stop()


def test_the_queue_is_bounded_and_stopping_does_not_wait_for_a_reader() -> None:
    index = Index((MAX_BATCHES + 3) * BATCH_BLOCKS)
    announcer = Announcer(index.after)
    announcer.stop()
    assert not index.ended.is_set()


def test_a_damaged_index_ends_it_quietly() -> None:
    asked = threading.Event()

    def broken(last: bytes, limit: int) -> list[BlockHash]:
        asked.set()
        raise CorruptionError("a page does not read")

    announcer = Announcer(broken)
    assert asked.wait(WAIT_S)
    announcer.stop()
    assert announcer.take() == []


def test_only_what_is_still_there_becomes_an_event() -> None:
    cascade = Cascade((8, 16), is_immediate=True)
    cascade.store([key(0), key(1)])
    cascade.manager.flush_dirty(cascade.now_s + 1)
    cascade.manager.take_events()
    cascade.manager.announce(1, [key(0), key(1), key(9)])
    (event,) = cascade.manager.take_events()
    assert (event.block_hashes, event.removed, event.tier) == ((key(0), key(1)), False, "M1")
