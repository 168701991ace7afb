"""Threads that run, or a sentence that says why they, or a process, cannot be started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from .errors import TierIOError

START_LIMIT_S = 30.0
"""Longest wait until all threads of a pool run."""


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that does not keep its process alive. Raises `TierIOError` if it cannot be
    started."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise cannot_start("thread", error) from error
    return thread


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run. Raises `TierIOError` if one cannot be started.

    An executor queues a job before it starts a thread for it. So a job that was refused for want of
    a thread would still run later. This one never starts a thread later.
    """
    executor, gate = ThreadPoolExecutor(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):  # each job keeps its thread busy, so the next one gets another
            executor.submit(gate.wait)
        gate.wait(START_LIMIT_S)
    except RuntimeError as error:  # so is that of a broken barrier
        gate.abort()
        executor.shutdown()
        raise cannot_start("thread", error) from error
    return executor


def run_on_each(executor: ThreadPoolExecutor, threads: int, work: Callable[[], object]) -> None:
    """Run this once on each thread of a started pool that does nothing else, and wait for it.

    If a thread is busy for `START_LIMIT_S`, none runs it. Errors of the work are ignored.
    """
    gate = threading.Barrier(threads)

    def once() -> None:
        gate.wait(START_LIMIT_S)
        work()

    wait([executor.submit(once) for _ in range(threads)])


def cannot_start(kind: str, error: Exception) -> TierIOError:
    """Return the error for a thread or process, the `kind`, that a limit forbids."""
    remedy = "raise the limit of processes, or that of memory (`ulimit -v`)"
    return TierIOError(None, f"no {kind} can be started ({error}); {remedy}")
