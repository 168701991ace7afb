"""Thread pools whose threads all run from the beginning."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ...errors import TierIOError


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run. Raises `TierIOError` if one cannot be started.

    An executor queues a job before it starts a thread for it. So a job that was refused for want of
    a thread would still run later. This one never starts a thread later.
    """
    executor, gate = ThreadPoolExecutor(threads, name), threading.Event()
    try:
        for _ in range(threads):  # each job keeps its thread busy, so the next one gets another
            executor.submit(gate.wait)
    except RuntimeError as error:
        gate.set()
        executor.shutdown()
        raise no_thread(error) from error
    gate.set()
    return executor


def no_thread(error: RuntimeError) -> TierIOError:
    """Return the error of a process that cannot start a thread."""
    return TierIOError(None, f"no thread can be started ({error}); raise the limit of processes")
