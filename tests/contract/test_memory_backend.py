"""The contract suite of backends, for the in-memory twin."""

from __future__ import annotations

import pytest
from contract.backend_contract import BackendContract
from support.memory_backend import MemoryBackend


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> MemoryBackend:
        return MemoryBackend(block_size=64, capacity=12)
