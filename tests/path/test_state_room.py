"""Room for the arrays of an eviction order: a plan counts what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.failing_orders import SoundPrefix, path_of
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of

from kvcascade.errors import ConfigError
from kvcascade.tiers.nvme.path.block_table import block_table_bytes
from kvcascade.tiers.nvme.path.path_messages import Chain, PathOptions
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of, plan_namespace, state_bytes
from kvcascade.tiers.nvme.segments.arrays import HEADER_BYTES
from kvcascade.tiers.nvme.segments.chains import CHAINS, HEAD_BYTES, cells_for
from kvcascade.tiers.nvme.segments.format import PAGE_BYTES
from kvcascade.tiers.policies import ORDERS, EvictionOrder, order_class
from kvcascade.tiers.policies.parts.usage import SlotUsage
from kvcascade.tiers.policies.prefix import PrefixOrder

POLICIES = [*ORDERS, path_of(SoundPrefix)]
SLOTS = [1, 400, 10_000, 32_770, 100_000, 932_067, 1_048_577, 2_097_154, 3_750_000]
"""Some are just beyond those at which a table of ghosts doubles."""


def made_bytes(policy: str, slots: int) -> int:
    """Bytes of all files that hold the arrays of a namespace."""
    sizes: list[int] = []

    def arrays(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        sizes.append(HEADER_BYTES + length * np.dtype(dtype).itemsize)
        return np.zeros(length, dtype)

    order_class(policy)(slots, arrays)
    SlotUsage(slots, arrays)
    arrays(CHAINS, cells_for(slots), np.uint64)
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)


def on_disk(rig: PathRig, slots: int) -> int:
    """Bytes in a path with one namespace; the rig keeps its index elsewhere."""
    return rig.fs.used_bytes(ROOT) + block_table_bytes(slots)


def fill(node: RigNode, blocks: int) -> list[int]:
    """Store blocks in steps of eight, and end a request. Return those that are held."""
    for first in range(0, blocks, 8):
        node.store(list(range(first, first + 8)), steps=200)
    node.rig.send(node.client, Chain(key_of(0)[:HEAD_BYTES], 0, 16))
    node.rig.step(4, seconds=1.0)
    return node.held(range(blocks))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", SLOTS)
def test_arrays_take_no_more_than_is_planned(policy: str, slots: int) -> None:
    assert made_bytes(policy, slots) <= state_bytes(slots, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_tier_takes_no_more_than_its_capacity(policy: str) -> None:
    rig = PathRig(50, policy=policy)
    assert len(fill(RigNode(rig), 400)) == 400
    assert on_disk(rig, 400) <= rig.options.capacity_bytes


def test_a_capacity_is_planned_with_its_policy() -> None:
    capacity = capacity_of(2, 8, BLOCK_BYTES)
    lru = PathOptions(capacity, segment_bytes=8 * BLOCK_BYTES)
    assert plan_namespace(lru, BLOCK_BYTES, 1).segments == 2
    prefix = PathOptions(capacity, segment_bytes=8 * BLOCK_BYTES, policy="prefix")
    with pytest.raises(ConfigError, match="at least") as refused:
        plan_namespace(prefix, BLOCK_BYTES, 1)
    assert str(capacity_of(1, 8, BLOCK_BYTES, policy="prefix")) in str(refused.value)


@pytest.mark.parametrize("blocks", [24, 960], ids=["nearly empty", "full"])
def test_a_namespace_of_a_former_plan_is_opened_and_keeps_what_fits(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as former:
        for name in ("state_bytes", "state_bytes_per_slot"):
            former.setattr(PrefixOrder, name, getattr(EvictionOrder, name))
        rig = PathRig(120, policy="prefix")
        assert len(fill(RigNode(rig), blocks)) == blocks
        rig.close()
    capacity = rig.options.capacity_bytes
    rig.start()
    node = RigNode(rig)
    rig.step(300, seconds=0.01)
    assert node.welcome is not None
    held, room = node.held(range(blocks)), capacity - state_bytes(960, "prefix")
    assert on_disk(rig, node.welcome.slots) <= capacity
    assert len(held) == blocks or 8 * 8 <= len(held) < room // BLOCK_BYTES
    assert node.store([5000], steps=200) and node.held([5000])


def test_a_policy_whose_package_is_not_installed_is_counted_as_others() -> None:
    """A tool may lack the package that the engines have."""
    assert state_bytes(1000, "absent.package:Order") == state_bytes(1000, "lru")
