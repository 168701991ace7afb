"""The end of a remote tier's node on a thread: nothing uses the arena after it."""

from __future__ import annotations

import socket
from threading import Event
from typing import Any

import pytest
from support.path_engine import WAIT_S
from support.remote_rig import PAYLOAD_BYTES
from support.remote_twin import RemoteTwin

from kvcascade.handlers.node.path_client import ThreadChild
from kvcascade.handlers.node.remote import remote_loop
from kvcascade.handlers.node.remote.remote_loop import RemoteLoop
from kvcascade.handlers.node.remote.remote_node import SlotParts
from kvcascade.tiers.remote.base import CounterAnswer
from kvcascade.tiers.remote.objects import ObjectFormat
from kvcascade.tiers.remote.remote_store import StoreOptions


class HangingTwin(RemoteTwin):
    """A server whose first call takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.answers = Event(), Event()

    def counter(self, name: str, first: int | None, limit_s: float) -> CounterAnswer:
        self.hangs.set()
        assert self.answers.wait(WAIT_S)
        return super().counter(name, first, limit_s)


def test_a_node_on_a_thread_ends_after_the_calls_of_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its jobs fail when it has ended. A call that goes on would write into slots of others."""
    monkeypatch.setattr(remote_loop, "STOP_LIMIT_S", 0.0)
    twin, is_ending, ways = HangingTwin(), Event(), []
    objects, parts = ObjectFormat("model", PAYLOAD_BYTES), SlotParts(PAYLOAD_BYTES, PAYLOAD_BYTES)
    ours, theirs = socket.socketpair()
    arena = memoryview(bytearray(PAYLOAD_BYTES))
    loop = RemoteLoop(theirs, twin, objects, StoreOptions(), arena, parts, lambda: None)
    shutdown = loop._threads.shutdown

    def noted(**how: Any) -> None:
        ways.append(how)
        is_ending.set()
        shutdown(**how)

    monkeypatch.setattr(loop._threads, "shutdown", noted)
    child = ThreadChild(loop)
    assert twin.hangs.wait(WAIT_S)
    ours.close()
    assert is_ending.wait(WAIT_S)
    assert ways == [{"wait": True, "cancel_futures": True}] and child.poll() is None
    twin.answers.set()
    assert child.wait(WAIT_S) == 0
