"""Limits of threads in the process of a remote tier: it has all of them before it serves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.keys import key
from support.remote_rig import PAYLOAD_BYTES, THROUGH
from support.remote_twin import RemoteTwin
from support.thread_limit import Limited

from kvcascade.errors import TierIOError
from kvcascade.handlers.node.path_wire import JobDone, unpack_outcomes
from kvcascade.handlers.node.remote.remote_loop import RemoteLoop
from kvcascade.handlers.node.remote.remote_wire import AskJob, RemoteSetup, from_remote_node
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.frames import FrameReader, frame
from kvcascade.tiers.remote.objects import ObjectFormat

WAIT_S = 20.0


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limited:
    return Limited(monkeypatch)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    with ours, theirs:
        yield ours, theirs


def loop_of(theirs: socket.socket) -> RemoteLoop:
    objects, arena = ObjectFormat("model-1", PAYLOAD_BYTES), memoryview(bytearray(PAYLOAD_BYTES))
    setup = RemoteSetup("tiers[1]", b"{}", "model-1", PAYLOAD_BYTES, PAYLOAD_BYTES, 1, 0, 1)
    return RemoteLoop(theirs, setup, RemoteTwin(), objects, THROUGH, arena, lambda: None, "remote")


@pytest.mark.parametrize("threads", [0, 1, THROUGH.threads])
def test_a_node_that_lacks_threads_ends_at_its_start(
    limit: Limited, ends: tuple[socket.socket, socket.socket], threads: int
) -> None:
    """Its keeper starts it again, until it has them."""
    limit.left = threads
    with pytest.raises(TierIOError, match="raise the limit"):
        loop_of(ends[1])
    assert not any(thread.is_alive() for thread in limit.started)


def test_a_limit_that_is_reached_later_closes_nothing(
    limit: Limited, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = ends
    with ExitStack() as undo:
        runner = undo.enter_context(ThreadPoolExecutor(1))
        loop = runner.submit(loop_of, theirs).result(WAIT_S)
        limit.left = 0
        running = runner.submit(loop.run)
        undo.callback(ours.shutdown, socket.SHUT_RDWR)
        ours.sendall(frame(AskJob(1, [[key(1)]])))
        reader, heard = FrameReader(), list[object]()
        while not any(isinstance(message, JobDone) for message in heard):
            heard += map(from_remote_node.decode, reader.feed(ours.recv(1 << 16)))
        (done,) = (message for message in heard if isinstance(message, JobDone))
        assert unpack_outcomes(done.outcomes, 1) == [BlockOutcome.GONE]
    running.result(WAIT_S)
