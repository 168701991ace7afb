"""An order from another package, by its path or by an entry point, in a CPU and an NVMe tier."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.inside import order_of_eviction
from support.keys import key
from support.path_rig import PathRig, RigNode, key_of

from kvcascade.assembly.named import check_names
from kvcascade.config.schema import parse
from kvcascade.manager.admission import admission_by_path
from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.nvme.path.path_messages import Touch
from kvcascade.tiers.policies import ENTRY_POINTS, create, known_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
MODULE = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
"""What the page shows: an order `NewestFirst`, and a rule `admit`."""
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


def test_the_rule_beside_it_is_one(name: str) -> None:
    admits = admission_by_path("newest_package:admit")
    assert [uses for uses in range(1, 6) if admits(KEYS[0], uses)] == [3, 4, 5]


def test_it_orders_a_tier_in_memory(name: str) -> None:
    policy = create(name, len(KEYS))
    policy.insert_many(KEYS, [BlockStatus(0, slot) for slot in range(len(KEYS))])
    evicted = policy.evict(3, ())
    assert evicted is not None and [h for h, _ in evicted] == KEYS[:3], "heads come in last"


def test_it_orders_a_tier_on_disk_and_survives_a_restart(name: str) -> None:
    rig = PathRig(segments=3, slots_per_segment=4, policy=name)
    node = RigNode(rig)
    numbers = list(range(len(KEYS)))
    for start in range(0, len(KEYS), 4):
        node.store(numbers[start : start + 4])
    rig.send(node.client, Touch([key_of(5)]))
    rig.step()
    assert node.welcome is not None
    folder = node.welcome.folder

    def cold() -> list[bytes]:
        return order_of_eviction(rig.writer.namespaces[folder])

    before = cold()
    assert before[0] == key_of(5) and len(before) == len(KEYS)
    rig.close()
    rig.start()
    RigNode(rig)
    assert cold() == before
    rig.close()
