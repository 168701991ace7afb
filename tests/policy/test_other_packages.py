"""An order from another package, by its path or by an entry point, in a CPU and an NVMe tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for, key

from kvcascade.config import parse
from kvcascade.named import check_names
from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies import ENTRY_POINTS, create, known_names

MODULE = """
from kvcascade.tiers.policies.lru import LruOrder

class NewestFirst(LruOrder):
    def victims(self, limit, wanted, mask=None, window=None):
        return super().victims(self.capacity, wanted, mask, window)[::-1][:limit]
"""
KEYS = [key(i) for i in range(12)]


@pytest.fixture(params=["newest-first", "newest_package:NewestFirst"])
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one order is installed; its name in the configuration."""
    (tmp_path / "newest_package.py").write_text(MODULE)
    facts = tmp_path / "newest-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: newest\nVersion: 1.0\n")
    entry = f"[{ENTRY_POINTS}]\nnewest-first = newest_package:NewestFirst\n"
    (facts / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(request.param)


def test_the_configuration_takes_it_for_both_tiers(name: str, tmp_path: Path) -> None:
    nvme = {"type": "nvme", "capacity": "1GiB", "path": str(tmp_path / "kv"), "policy": name}
    cpu = {"type": "cpu", "capacity": "1GiB", "policy": name}
    check_names(parse({"tiers": [cpu, nvme]}, known_names()))


def test_it_orders_a_tier_in_memory(name: str) -> None:
    policy = create(name, len(KEYS))
    policy.insert_many(KEYS, [BlockStatus(0, slot) for slot in range(len(KEYS))])
    evicted = policy.evict(3, ())
    assert evicted is not None and [h for h, _ in evicted] == KEYS[:3], "heads come in last"


def test_it_orders_a_tier_on_disk_and_survives_a_restart(name: str, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    config = config_for([tmp_path / "kv"], slots=len(KEYS), per_segment=4)
    rig = Rig(config, policy=name)
    for start in range(0, len(KEYS), 4):
        rig.store(KEYS[start : start + 4])
    rig.policy.touch(KEYS[5:6])
    cold = [block_hash for block_hash, _ in rig.policy.coldest(len(KEYS))]
    assert cold[0] == KEYS[5] and len(cold) == len(KEYS)
    rig.close()
    rig = Rig(config, policy=name)
    assert [block_hash for block_hash, _ in rig.policy.coldest(len(KEYS))] == cold
    rig.close()
