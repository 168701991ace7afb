"""Real servers, started once for each test run and emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.remote_servers import (
    GuardedS3Server,
    S3Server,
    ServerProcess,
    redis_command,
    redis_server,
    valkey_server,
)


@pytest.fixture(scope="session")
def _one_redis() -> Iterator[ServerProcess]:
    server = redis_server()
    yield server
    server.kill()


@pytest.fixture
def redis(_one_redis: ServerProcess) -> ServerProcess:
    """An empty server that runs."""
    redis_command(_one_redis.port, "FLUSHALL")
    return _one_redis


@pytest.fixture(scope="session")
def _one_valkey() -> Iterator[ServerProcess]:
    server = valkey_server()
    yield server
    server.kill()


@pytest.fixture
def valkey(_one_valkey: ServerProcess) -> ServerProcess:
    """An empty server that runs."""
    redis_command(_one_valkey.port, "FLUSHALL")
    return _one_valkey


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server for all tests; each makes a bucket of its own."""
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def guarded() -> Iterator[GuardedS3Server]:
    """A server with users and their rights."""
    pytest.importorskip("obstore")
    server = GuardedS3Server()
    yield server
    server.kill()
