"""Executors for tests: work runs at once, or when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from kvcascade.tools.replay.virtual import InlineExecutor

__all__ = ["InlineExecutor", "SteppingExecutor"]


class SteppingExecutor(Executor):
    """Keeps tasks until `step`; their order is the test's to choose."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.is_shut_down = False

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: fn(*args, **kwargs)))
        return future

    def step(self, which: int = 0) -> bool:
        """Run one task, the oldest by default; False if there is none."""
        if not self._tasks:
            return False
        which %= len(self._tasks)
        future, run = self._tasks[which]
        del self._tasks[which]
        if future.set_running_or_notify_cancel():
            future.set_result(run())
        return True

    def run_all(self) -> None:
        """Run everything, what is submitted meanwhile included."""
        while self.step():
            pass
