"""Servers that are of no use to a remote tier: its engine goes on, and the log says why."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.keys import key
from support.remote_rig import PAYLOAD_BYTES, content
from support.remote_servers import (
    HOST,
    PATIENT,
    GuardedS3Server,
    S3Server,
    ServerProcess,
    answering_always,
    redis_command,
)
from support.remote_tier_rig import is_asking
from support.waiting import wait_until

from kvcascade.assembly.node_parts import EngineFacts, SlotMemory
from kvcascade.assembly.remote_parts import OpenRemote, open_remote_tier
from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.handlers.node.node_child import Connection
from kvcascade.handlers.node.path.path_client import ThreadChild
from kvcascade.handlers.node.remote.remote_main import serve
from kvcascade.manager.below.port import Put
from kvcascade.tiers.cpu.header import HEADER_BYTES
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.frames import frame

SECRET = "hunter2-in-test"
AWS = {"AWS_ACCESS_KEY_ID": "key-in-test", "AWS_SECRET_ACCESS_KEY": SECRET}
SKEWED = "<Error><Code>RequestTimeTooSkewed</Code></Error>"
HELD = key(1)


def launch_here(setup: msgspec.Struct, arena_fd: int, module: str) -> Connection:
    """Start a node in this process, whose log the test reads."""
    ours, theirs = socket.socketpair()
    ours.sendall(frame(setup))
    ours.setblocking(False)

    def run() -> None:
        serve(theirs, arena_fd)
        os.close(arena_fd)

    return Connection(ThreadChild(run), ours)


def has_ended() -> bool:
    """Whether no call of a server goes on."""
    return not [t for t in threading.enumerate() if t.name.startswith("kvcascade-remote")]


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Iterator[OpenRemote]:
    """The tier of an engine whose arena has one slot; its node is a thread."""
    monkeypatch.setattr("kvcascade.handlers.node.remote.remote_loop.FIRST_QUESTION_S", 0.0)
    monkeypatch.setattr("kvcascade.assembly.remote_parts.launch", launch_here)
    options = parse_remote(At("tiers[1]"), {"writes": "through", **PATIENT, **given})
    arena_fd = os.memfd_create("arena")
    os.pwrite(arena_fd, content(HELD), HEADER_BYTES)
    memory = SlotMemory(PAYLOAD_BYTES, 1, memoryview(b""), duplicate=lambda: os.dup(arena_fd))
    facts = EngineFacts(NamespaceKey("model", {"weights": "w"}), memory, False, False, 10.0)
    tier = open_remote_tier("remote", options, facts)
    try:
        yield tier
    finally:
        tier.close()
        wait_until(has_ended)
        os.close(arena_fd)


def is_missing(tier: OpenRemote) -> bool:
    """Whether a lookup has its answer, which is a miss."""
    tier.port.maintain()
    tier.port.poll()
    if is_asking(tier.port, HELD, "request"):
        return False
    assert not tier.port.may_hold(HELD)
    return True


def serves(tier: OpenRemote, caplog: pytest.LogCaptureFixture, wanted: str) -> None:
    """The engine computes what it asks for and keeps nothing waiting; the log says why, once."""
    wait_until(partial(is_missing, tier))
    assert tier.port.put(1, [HELD], [0]) in ([Put.UNWANTED], [Put.STARTED])

    def has_said_it() -> bool:
        tier.port.maintain()
        tier.port.poll()
        return wanted in caplog.text and not tier.port.writes.jobs

    wait_until(has_said_it)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith("tiers[1].url: the server ") and said.endswith(".")
    assert SECRET not in caplog.text


def test_the_next_node_writes_to_no_folder_in_the_place_of_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    folder = tmp_path / "share"
    with opened(monkeypatch, url=folder.as_uri()) as tier:

        def has_read(outcome: str) -> bool:
            """Whether a node has read the counter of the namespace, with this outcome."""
            tier.node.poll()
            return outcome in tier.port.feed.totals().verbs["generation"].outcomes

        wait_until(partial(has_read, "ok"))
        folder.rename(tmp_path / "away")
        folder.mkdir()
        stream = tier.node._stream
        assert stream is not None
        stream.hang_up()
        wait_until(partial(has_read, "io_error"))
        assert not [*folder.iterdir()]


class TestBucket:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("obstore")

    def check(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        env: Mapping[str, str],
        endpoint: str,
        bucket: str,
        wanted: str,
    ) -> None:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        at = {"url": f"s3://{bucket}/kv", "endpoint": endpoint, "region": "us-east-1"}
        with opened(monkeypatch, **at) as tier:
            serves(tier, caplog, wanted)
        assert not [word for word in env.values() if word in caplog.text]

    def test_a_bucket_that_is_not_there(
        self, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        at = (s3.endpoint, "nowhere-in-test")
        self.check(monkeypatch, caplog, AWS, *at, "has no such bucket; create it")

    def test_a_bucket_that_is_only_read(
        self,
        guarded: GuardedS3Server,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        at = (guarded.endpoint, "guarded")
        self.check(monkeypatch, caplog, guarded.reader, *at, 'or set writes to "off"')

    def test_a_wrong_key(
        self,
        guarded: GuardedS3Server,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        env = {**guarded.writer, "AWS_SECRET_ACCESS_KEY": SECRET}
        at = (guarded.endpoint, "guarded")
        self.check(monkeypatch, caplog, env, *at, "refuses the credentials")

    def test_a_clock_that_is_wrong(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with answering_always(403, SKEWED) as port:
            at = (f"http://{HOST}:{port}", "bucket")
            self.check(monkeypatch, caplog, AWS, *at, "the clock of this machine")


@pytest.mark.parametrize(
    ("place", "rights", "wanted"),
    [
        ("/99", "+@all", "has no such database"),
        ("", "+ping", "does not let this user read"),
        ("", "+@read", 'set writes to "off"'),
    ],
)
def test_redis(
    redis: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    rights: str,
    wanted: str,
) -> None:
    words = ("reset", "on", f">{SECRET}", "~*", rights)
    redis_command(redis.port, "ACL", "SETUSER", "u", *words)
    monkeypatch.setenv("KVCASCADE_TEST_WORD", SECRET)
    login = {"username": "u", "password_env": "KVCASCADE_TEST_WORD"}
    try:
        url = f"redis://{HOST}:{redis.port}{place}"
        with opened(monkeypatch, url=url, **login) as tier:
            serves(tier, caplog, wanted)
    finally:
        redis_command(redis.port, "ACL", "DELUSER", "u")
