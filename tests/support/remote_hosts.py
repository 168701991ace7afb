"""Engines without a model, each a host with a CPU tier and a remote one, over a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from .kv_bytes import Shape, tiers
from .open_tiers import remote_of
from .remote_servers import PATIENT, S3Server
from .spec_driver import Driver
from .spec_parts import Request
from .waiting import wait_until

SHAPE = Shape()
CHUNKS = 8
CPU = 64


def host(label: str, shape: Shape = SHAPE, cpu: int = CPU, **remote: Any) -> Driver:
    """An engine of its own; those with equal labels share blocks."""
    last = {"type": "remote", "writes": "through", **PATIENT, **remote}
    return Driver(shape, [*tiers(shape, None, cpu=cpu), last], label=label)


@contextmanager
def own_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a remote tier in a bucket, whose server ends with the block."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "in-test")
    server = S3Server()
    server.make_bucket("blocks")
    yield {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1"}
    server.kill()


def hits_of(driver: Driver, request: Request) -> int:
    """Ask at every step until there is an answer."""
    found: list[int | None] = [None]

    def has_answer() -> bool:
        driver.step()
        driver.wait_for_transfers()
        found[0] = driver.look_up(request)
        return found[0] is not None

    wait_until(has_answer)
    assert found[0] is not None
    return found[0]


def serve(driver: Driver, text: str) -> int:
    """A whole request; returns how many chunks were loaded and compared."""
    return end(driver, driver.request(text, CHUNKS))


def end(driver: Driver, request: Request) -> int:
    """All of a request; returns how many chunks were loaded and compared."""
    hits = hits_of(driver, request)
    if hits:
        driver.load(request, hits)
    if hits < CHUNKS:
        driver.store(request, hits)
    driver.finish(request)
    driver.settle()
    return hits


def is_ready(driver: Driver) -> bool:
    """Whether the node has asked the server for the last reset."""
    driver.step()
    return remote_of(driver.cascade).port.feed.mark is not None


def await_ready(*drivers: Driver) -> None:
    """Wait until the nodes have asked the server for the last reset."""
    for driver in drivers:
        wait_until(partial(is_ready, driver))


def pid_of_node(driver: Driver) -> int:
    """Process of the remote tier's node."""
    pid = remote_of(driver.cascade).node.pid
    assert pid is not None
    return pid


def await_next_node(driver: Driver, former: int) -> None:
    """Wait until another node than that of process `former` has asked for the last reset."""
    remote = remote_of(driver.cascade)

    def is_ready_and_new() -> bool:
        driver.step()
        return remote.node.pid not in (None, former) and remote.port.feed.totals().mark is not None

    wait_until(is_ready_and_new)
