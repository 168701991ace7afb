"""A limit of processes, as a container has."""

from __future__ import annotations

import threading

import pytest


class Limited:
    """A limit of processes: at most `left` more threads can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1000
        self.started: list[threading.Thread] = []
        begin = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            begin(thread)
            self.started.append(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
