"""A user's order that fails is replaced: no exception, no wrong slot, and no block is forgotten."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from contract.policy_contract import Make, PolicyContract
from support.arrays import KeptArrays
from support.failing_orders import (
    FAILING,
    CannotBeMade,
    FailsAtTouch,
    FailsAtVictims,
    ReturnsAnArray,
    Sound,
    path_of,
)
from support.path_rig import PathRig, RigNode, key_of

from kvcascade.errors import ConfigError
from kvcascade.tiers.nvme.path.path_messages import Touch
from kvcascade.tiers.policies import EvictionOrder, create, order_class
from kvcascade.tiers.policies.lru import LruOrder


def always(slot: int) -> bool:
    return True


@pytest.mark.parametrize("order", [Sound, ReturnsAnArray])
class TestSound(PolicyContract):
    @pytest.fixture
    def make(self, order: type[LruOrder]) -> Make:
        return lambda capacity: create(path_of(order), capacity)


@pytest.mark.parametrize("order", FAILING)
class TestFailing(PolicyContract):
    @pytest.fixture
    def make(self, order: type[LruOrder]) -> Make:
        return lambda capacity: create(path_of(order), capacity)


def order_of(
    user: type[LruOrder], arrays: KeptArrays | None = None, slots: int = 8
) -> EvictionOrder:
    made = order_class(path_of(user))
    return made(slots) if arrays is None else made(slots, arrays)


def test_the_fault_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    order = order_of(FailsAtTouch)
    order.insert(range(4), [])
    for slot in range(4):
        order.touch([slot])
    (record,) = caplog.records
    assert "FailsAtTouch" in record.getMessage() and record.exc_info is not None


def test_a_fault_of_the_question_is_no_fault_of_the_order() -> None:
    order = order_of(Sound)
    order.insert(range(4), [])

    def ask(slot: int) -> bool:
        raise KeyError(slot)

    with pytest.raises(KeyError):
        order.victims(1, ask)
    order.touch([0])
    assert order.victims(1, always) == [1], "it still decides"


def test_after_a_restart_it_begins_with_the_blocks_that_are_held() -> None:
    arrays = KeptArrays()
    order = order_of(FailsAtVictims, arrays)
    order.insert(range(4), [])
    assert order.victims(1, always) == [0]
    order.evicted([0], [])
    order.insert([6], [])
    mended = order_of(Sound, arrays)
    held = mended.victims(8, always)
    assert sorted(held) == [1, 2, 3, 6]
    mended.touch(held[:1])
    assert order_of(Sound, arrays).victims(8, always) == [*held[1:], held[0]], "mended, it is exact"


def test_damaged_arrays_cost_the_order_and_nothing_else() -> None:
    arrays = KeptArrays()
    order_of(Sound, arrays)
    arrays("guarded_last_use", 8, np.uint64)[:] = np.iinfo(np.uint64).max
    order = order_of(Sound, arrays)
    order.reconcile(np.arange(4))
    order.touch([0])
    assert order.victims(8, always)[-1] == 0


@pytest.mark.parametrize("user", [FailsAtTouch, FailsAtVictims])
def test_a_builtin_policy_after_a_fault_knows_every_block(user: type[LruOrder]) -> None:
    """The arrays of the failed order are of before the fault, and were closed cleanly."""
    rig = PathRig(segments=2, slots_per_segment=4, policy=path_of(user))
    node = RigNode(rig)
    for start in range(0, 16, 4):
        node.store(range(start, start + 4))
        rig.send(node.client, Touch([key_of(start)]))
        rig.step()
    rig.close()
    rig.start(msgspec.structs.replace(rig.options, policy="lru"))
    node = RigNode(rig)
    for start in range(100, 140, 4):
        node.store(range(start, start + 4))
    assert node.held(range(16)) == [], "every block leaves in its turn"
    rig.close()


def test_an_order_that_cannot_be_made_is_bad_configuration() -> None:
    with pytest.raises(ConfigError, match="CannotBeMade.*ZeroDivisionError.*mend it"):
        create(path_of(CannotBeMade), 8)


@pytest.mark.parametrize("user", FAILING)
def test_a_writer_goes_on(user: type[LruOrder]) -> None:
    rig = PathRig(segments=2, slots_per_segment=4, policy=path_of(user))
    node = RigNode(rig)
    for start in range(0, 40, 4):
        node.store(range(start, start + 4))
        rig.send(node.client, Touch([key_of(start)]))
        rig.step()
    held = node.held(range(40))
    assert len(held) <= 8 and set(range(36, 40)) <= set(held)
    rig.close()
    rig.start()
    assert set(RigNode(rig).held(range(40))) == set(held)
    rig.close()
