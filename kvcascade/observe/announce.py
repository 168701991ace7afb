"""Telling routers what a restarted engine found on disk.

vLLM's KV events say what is stored and removed from the start of the engine on; what an earlier
engine left would stay unknown to a cache-aware router. A background thread reads the keys of the
index into a short queue, and each step announces a batch: the scheduler never waits for the disk,
and no step pays for more than `BATCH_BLOCKS`.
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
"""`keys_after(key, limit)`: keys that follow a key, in order; any thread."""

PUT_WAIT_S = 0.5
STOP_WAIT_S = 5.0


class Announcer:
    """Hands out keys in batches; `take` and `stop` belong to the scheduler thread."""

    def __init__(self, keys_after: KeysAfter) -> None:
        """`keys_after` is called on a thread of its own."""
        self._keys_after = keys_after
        self._batches: queue.Queue[list[BlockHash]] = queue.Queue(MAX_BATCHES)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcascade-announcer", daemon=True)
        self._thread.start()

    def take(self) -> list[BlockHash]:
        """The next batch; empty if none is there yet, or all were handed out. Never waits."""
        with suppress(queue.Empty):
            return self._batches.get_nowait()
        return []

    def stop(self) -> None:
        """End the thread; idempotent. Waits for the batch it is reading, `STOP_WAIT_S` at most."""
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
