"""Which block leaves first after a request, whatever the order of its offers and transfers.

The cases follow `tests/v1/kv_offload/cpu/test_manager.py` of vLLM 0.32, for each of our policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.cascade import Cascade
from support.keys import key
from vllm.v1.kv_offload.base import (
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvcascade import vllm_policies
from kvcascade.config.schema import WriteMode
from kvcascade.manager.below.port import NoTierBelow
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.cpu.cpu_backend import CpuBackend
from kvcascade.tiers.policies import ORDERS, create
from kvcascade.tools.dev.bench.peers.vllm_calls import BLOCK_BYTES, over

Make = Callable[[int], OffloadingManager]
UNORDERED = {"s3fifo", "s3fifo_eager", "slru", "sieve", "fifo", "lirs"}
"""Policies that do not put the blocks of a reused prompt in the order of their last use."""


def ours(name: str) -> Make:
    def make(blocks: int) -> OffloadingManager:
        tier = Tier("cpu", CpuBackend(BLOCK_BYTES, blocks), create(name, blocks))
        return over(CascadingOffloadingManager(tier, NoTierBelow(), ManagerOptions()))

    return make


def under_vllm(name: str) -> Make:
    def make(blocks: int) -> OffloadingManager:
        return CPUOffloadingManager(
            blocks, cache_policy=name, cache_policy_module_path=vllm_policies.__name__
        )

    return make


THEIRS = sorted(n for n in vars(vllm_policies) if n.endswith("Policy") and n not in {"CachePolicy"})
MAKERS = {name: ours(name) for name in sorted(ORDERS)} | {
    name: under_vllm(name) for name in THEIRS if name[0] != "_"
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    """Each policy in our manager, and in vLLM's."""
    return MAKERS[request.param]


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(key(number), 0) for number in numbers]


def begin(manager: OffloadingManager, name: str) -> ReqContext:
    context = ReqContext(req_id=name)
    manager.on_new_request(context)
    return context


def offer(
    manager: OffloadingManager, keys: Sequence[OffloadKey], context: ReqContext
) -> PrepareStoreOutput:
    output = manager.prepare_store(keys, context)
    assert output is not None
    return output


def store(manager: OffloadingManager, keys: Sequence[OffloadKey], name: str) -> None:
    """A whole request."""
    context = begin(manager, name)
    offer(manager, keys, context)
    manager.complete_store(set(keys), context)
    manager.on_request_finished(context)
    manager.on_schedule_end(ScheduleEndContext((), ()))


def evicted_by(manager: OffloadingManager, blocks: int) -> list[OffloadKey]:
    """What leaves for so many new blocks."""
    new = keys_of(*range(100, 100 + blocks))
    return list(offer(manager, new, begin(manager, "evict")).evicted_keys)


@pytest.mark.parametrize("ends_first", [False, True])
def test_of_a_stored_prompt_the_tail_leaves_first(make: Make, ends_first: bool) -> None:
    manager, prompt = make(4), keys_of(1, 2, 3, 4)
    context = begin(manager, "prompt")
    offer(manager, prompt[:2], context)
    offer(manager, prompt[2:], context)
    if ends_first:
        manager.on_request_finished(context)
    manager.complete_store(set(prompt), context)
    if not ends_first:
        manager.on_request_finished(context)
    assert evicted_by(manager, 1) == prompt[3:]


@pytest.mark.parametrize("ends_first", [False, True])
@pytest.mark.parametrize("name", sorted(set(ORDERS) - UNORDERED))
def test_of_a_loaded_prompt_the_tail_leaves_first(name: str, ends_first: bool) -> None:
    manager, prompt = ours(name)(4), keys_of(1, 2, 3, 4)
    store(manager, prompt, "seed")
    context = begin(manager, "reuse")
    assert all(manager.lookup(key, context) for key in prompt)
    manager.prepare_load(prompt, context)
    manager.on_schedule_end(ScheduleEndContext((), ()))
    if ends_first:
        manager.on_request_finished(context)
    manager.complete_load(set(prompt), context)
    if not ends_first:
        manager.on_request_finished(context)
    assert evicted_by(manager, 1) == prompt[3:]


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"lirs", "LirsPolicy"}))
def test_a_late_transfer_makes_no_block_newer(name: str) -> None:  # LIRS keeps the first ones
    manager, old, new = MAKERS[name](4), keys_of(1, 2), keys_of(3, 4)
    context = begin(manager, "old")
    offer(manager, old, context)
    manager.on_request_finished(context)
    store(manager, new, "new")
    manager.complete_store(set(old), context)
    assert evicted_by(manager, 1) == old[1:]


@pytest.mark.parametrize("ends_first", [False, True])
def test_positions_count_and_not_the_order_of_offers(make: Make, ends_first: bool) -> None:
    manager, (head, middle, tail) = make(3), keys_of(1, 2, 3)
    context = begin(manager, "backfill")
    for number, block in enumerate((head, middle, tail), 1):
        context.set_offload_key_position(block, 16 * number)
    for block in (tail, head, middle):
        offer(manager, [block], context)
    if ends_first:
        manager.on_request_finished(context)
    manager.complete_store({head, middle, tail}, context)
    if not ends_first:
        manager.on_request_finished(context)
    assert evicted_by(manager, 2) == [tail, middle]


def test_tails_of_all_groups_leave_before_heads(make: Make) -> None:
    manager, context = make(4), ReqContext(req_id="groups")
    manager.on_new_request(context)
    heads = [make_offload_key(key(group), group) for group in range(2)]
    tails = [make_offload_key(key(10 + group), group) for group in range(2)]
    for blocks, end in ((heads, 16), (tails, 32)):
        for block in blocks:
            context.set_offload_key_position(block, end)
    offered = [heads[0], tails[0], heads[1], tails[1]]
    offer(manager, offered, context)
    manager.complete_store(set(offered), context)
    manager.on_request_finished(context)
    assert set(evicted_by(manager, 2)) == set(tails)


def test_a_new_head_stays_longer_than_a_reused_tail() -> None:
    manager, (head, tail) = ours("lru")(2), keys_of(1, 2)
    store(manager, [tail], "seed")
    context = begin(manager, "backfill")
    context.set_offload_key_position(head, 16)
    context.set_offload_key_position(tail, 32)
    offer(manager, [head, tail], context)
    manager.complete_store({head}, context)
    manager.on_request_finished(context)
    assert evicted_by(manager, 1) == [tail]


def test_offers_that_are_repeated_are_no_use() -> None:
    manager, prompt = ours("arc")(5), keys_of(1, 2, 3, 4)
    context = begin(manager, "seed")
    for blocks in (prompt[:2], prompt, prompt):
        output = offer(manager, blocks, context)
        manager.complete_store(set(output.keys_to_store), context)
    manager.on_request_finished(context)
    store(manager, keys_of(5), "newer")
    # Were the prompt in T2, what is newer would leave first.
    assert evicted_by(manager, 1) == prompt[3:]


def test_an_old_request_offers_blocks_that_stay() -> None:
    """What a list names is not evicted to make room for the rest of the list."""
    manager, old, more = ours("lru")(4), keys_of(1, 2, 3, 4), keys_of(5, 6)
    store(manager, old, "seed")
    output = offer(manager, [old[3], *more], begin(manager, "more"))
    assert set(output.evicted_keys) == {old[2], old[1]}


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
def test_the_tier_below_evicts_the_end_of_a_prompt_first(mode: WriteMode) -> None:
    options = ManagerOptions(write_mode=mode, dirty_age_s=1.0)
    cascade = Cascade((8, 16), options, is_immediate=True)
    prompt = [key(i) for i in range(4)]
    request = Request(positions={h: 16 * i for i, h in enumerate(prompt)})
    for offered in (prompt[2:], prompt[:2]):
        output = cascade.manager.prepare_store(offered, request)
        assert output is not None
    cascade.manager.finish_request(request)
    cascade.manager.complete_store(set(prompt), True, request)
    cascade.pass_time(2.0)
    cascade.manager.end_step()
    cascade.manager.end_step()
    assert [h for h, _ in cascade.policies[1].coldest(4, ())] == prompt[::-1]
