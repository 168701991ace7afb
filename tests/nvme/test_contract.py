"""The shared suites of `Backend` and `CachePolicy`, for the NVMe tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.backend_contract import BackendContract
from contract.policy_contract import Make, PolicyContract
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.base import Backend, CachePolicy
from kvcascade.tiers.policies import ORDERS


@pytest.mark.parametrize("paths", [1, 2])
class TestNvmeBackend(BackendContract):
    @pytest.fixture
    def backend(self, paths: int, tmp_path: Path) -> Iterator[Backend]:
        folders = [tmp_path / str(part) for part in range(paths)]
        for folder in folders:
            folder.mkdir()
        rig = Rig(config_for(folders, slots=16))
        yield rig.tier.backend
        rig.close()


@pytest.mark.parametrize("name", sorted(ORDERS))
class TestNvmePolicy(PolicyContract):
    @pytest.fixture
    def make(self, name: str, tmp_path: Path) -> Iterator[Make]:
        rigs: list[Rig] = []

        def make_one(capacity: int) -> CachePolicy:
            rigs.append(Rig(config_for([tmp_path], slots=capacity), policy=name))
            assert rigs[-1].tier.backend.capacity == capacity
            return rigs[-1].policy

        yield make_one
        for rig in rigs:
            rig.close(clean=False)
