"""Announce the blocks that a restarted engine found on disk to cache-aware routers.

vLLM's KV events cover blocks that are stored and removed after the engine's start. Blocks of an
earlier engine would stay unknown to a router. A background thread reads the keys of the index into
a short queue, and each step announces one batch. The scheduler never waits for the disk, and no
step announces more than `BATCH_BLOCKS`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from ..errors import KVCascadeError
from ..logs import get_logger
from ..tiers.base import BlockHash

logger = get_logger(__name__)

BATCH_BLOCKS = 512
MAX_BATCHES = 4
KeysAfter = Callable[[bytes, int], list[BlockHash]]
"""`keys_after(key, limit)` returns the keys that follow a key, in order. Any thread."""

PUT_WAIT_S = 0.5
STOP_WAIT_S = 5.0


class Announcer:
    """Hands out keys in batches. The scheduler thread calls `take` and `stop`."""

    def __init__(self, keys_after: KeysAfter) -> None:
        """`keys_after` is called on a thread of its own."""
        self._keys_after = keys_after
        self._batches: queue.Queue[list[BlockHash]] = queue.Queue(MAX_BATCHES)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcascade-announcer", daemon=True)
        self._thread.start()

    def take(self) -> list[BlockHash]:
        """Return the next batch; empty if none is ready or none is left. Never waits."""
        with suppress(queue.Empty):
            return self._batches.get_nowait()
        return []

    def stop(self) -> None:
        """End the thread; idempotent. Waits for its current read, `STOP_WAIT_S` at most."""
        self._stopped.set()
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        last = b""
        try:
            while not self._stopped.is_set():
                batch = self._keys_after(last, BATCH_BLOCKS)
                if not batch:
                    return
                self._put(batch)
                last = batch[-1]
        except KVCascadeError as error:
            logger.warning("kvcascade: not every block on disk will be announced: %s", error)

    def _put(self, batch: list[BlockHash]) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._batches.put(batch, timeout=PUT_WAIT_S)
                return
