"""The contract suite of backends, for the CPU tier."""

from __future__ import annotations

import pytest
from contract.backend_contract import BackendContract

from kvcascade.tiers.cpu.cpu_backend import CpuBackend

BLOCK_BYTES = 4096


class TestCpuBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> CpuBackend:
        return CpuBackend(BLOCK_BYTES, 16)
