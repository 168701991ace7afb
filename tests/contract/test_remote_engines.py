"""The contract suite of remote engines, for the twin and for engines that need no server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.remote_contract import RemoteContract
from support.remote_twin import RemoteTwin

from kvcascade.tiers.remote.base import RemoteEngine


class TestTwin(RemoteContract):
    @pytest.fixture
    def engine(self) -> Iterator[RemoteEngine]:
        twin = RemoteTwin()
        yield twin
        twin.close()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        assert isinstance(engine, RemoteTwin)
        engine.held[name] = data
