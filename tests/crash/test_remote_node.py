"""Nodes of remote tiers that are killed while they write and read blocks of a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.kv_bytes import Shape
from support.open_tiers import remote_of
from support.remote_hosts import (
    CHUNKS,
    await_next_node,
    await_ready,
    end,
    hits_of,
    host,
    own_bucket,
    pid_of_node,
    serve,
)
from support.remote_servers import HOST, redis_server
from support.spec_driver import Driver
from support.waiting import wait_until

LARGE = Shape(pages=(1 << 16, 3 << 16), blocks=4 * CHUNKS)
SLOW = "192KiB"
"""Rate at which some chunks go at once, and the others wait for seconds: a kill comes before."""
DEADLINE_S = 60.0
LOOK_S = 0.001
WRITE_S = 0.05
"""Age of a write in which the node is killed."""


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.soak), "folder"])
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """Options of a remote tier."""
    if request.param == "redis":
        redis = redis_server()
        yield {"url": f"redis://{HOST}:{redis.port}"}
        redis.kill()
        return
    pytest.importorskip("obstore")
    if request.param == "folder":
        yield {"url": (tmp_path / "kv").as_uri()}
        return
    with own_bucket(monkeypatch) as options:
        yield options


def large_host(server: dict[str, Any], **options: Any) -> Driver:
    driver = host("killed", LARGE, **{"deadline_s": DEADLINE_S, **server, **options})
    await_ready(driver)
    return driver


def kill_node(driver: Driver) -> None:
    """Kill the node; return when it is dead."""
    os.kill(pid := pid_of_node(driver), signal.SIGKILL)
    with suppress(ChildProcessError):  # the engine noticed it first
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def kill_in_write(driver: Driver, text: str) -> None:
    """Kill the node a moment after the write of a text's blocks has begun."""
    request, writes = driver.request(text, CHUNKS), remote_of(driver.cascade).port.writes
    assert hits_of(driver, request) == 0
    driver.store(request)
    driver.finish(request)

    def has_begun() -> bool:
        driver.step()
        return bool(writes.jobs)

    wait_until(has_begun, pause_s=LOOK_S)
    end_s = monotonic() + WRITE_S
    wait_until(lambda: monotonic() >= end_s, pause_s=LOOK_S)
    kill_node(driver)


def kill_in_read(driver: Driver, text: str) -> tuple[int, int]:
    """Kill the node when the first of a text's blocks is arriving.

    Return how many of the chunks had arrived or begun to, and how many are loaded later.
    """
    request, queues = driver.request(text, CHUNKS), driver.cascade.manager._promoter.queues
    heads = driver.cascade.arena.slots[:, :8]
    before = heads.copy()

    def reads() -> bool:
        assert driver.look_up(request) is None, "nothing of it is in memory"
        driver.step()
        return any(queue.jobs for queue in queues)

    def arrived() -> int:
        return int((heads != before).any(axis=1).sum())

    wait_until(reads, pause_s=LOOK_S)
    wait_until(lambda: arrived() > 0, pause_s=LOOK_S)
    kill_node(driver)
    return arrived(), end(driver, request)


def test_a_node_that_is_killed_while_it_moves_blocks_costs_misses(
    server: dict[str, Any],
) -> None:
    """The driver compares every byte of what is loaded."""
    with large_host(server, write_rate=SLOW) as first:
        kill_in_write(first, "torn")
    with large_host(server) as second:
        assert (serve(second, "torn") < CHUNKS, serve(second, "whole")) == (True, 0)
    with large_host(server, read_rate=SLOW) as third:
        former = pid_of_node(third)
        arrived, loaded = kill_in_read(third, "whole")
        assert 0 < arrived < CHUNKS and loaded == 0, "a block that was torn is not served"
        await_next_node(third, former)
        assert serve(third, "torn") == CHUNKS, "its gaps were filled, and the next node reads"
