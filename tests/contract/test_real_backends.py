"""The contract suite of backends, for the tiers that engines use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract.backend_contract import BackendContract, hashes

from kvcascade.tiers.cpu.cpu_backend import CpuBackend
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.opening import open_nvme_tier
from kvcascade.tiers.nvme.tier import NvmeTier, NvmeTierConfig
from kvcascade.tiers.policies import create

BLOCK_BYTES = 4096


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[NvmeTier]:
    config = NvmeTierConfig((tmp_path,), 1 << 20, BLOCK_BYTES, NamespaceKey("model", {"a": 1}))
    with ThreadPoolExecutor(1) as executor:
        tier = open_nvme_tier(config, executor)
        yield tier
    tier.close()


class TestCpuBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> CpuBackend:
        return CpuBackend(BLOCK_BYTES, 16)


def test_nvme_backend_and_policy_keep_their_books(nvme: NvmeTier) -> None:
    policy = create("lru", nvme.backend.capacity, nvme.directory, nvme.arrays)
    some = hashes(4)
    statuses = nvme.backend.allocate_blocks(some)
    policy.insert_many(some, statuses)
    found = [policy.get(block_hash) for block_hash in some]
    assert [s.block_id for s in found if s is not None] == [s.block_id for s in statuses]
    assert policy.evict(1, ()) is None, "nothing that is on its way leaves"
    for status in statuses:
        status.ref_cnt = 0
    evicted = policy.evict(2, {some[0]})
    assert evicted is not None and [h for h, _ in evicted] == [some[3], some[2]]
    for _, status in evicted:
        nvme.backend.free(status)
    assert len(policy) == 2
