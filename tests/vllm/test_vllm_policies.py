"""Our orders as policies of vLLM's CPU manager, driven through that manager."""

from __future__ import annotations

import random

import pytest
from support.cascade import key
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvcascade import vllm_policies
from kvcascade.vllm.cpu_policies import POLICIES

CHUNKS = 16
NAMES = sorted(POLICIES)


def manager_with(name: str) -> CPUOffloadingManager:
    return CPUOffloadingManager(
        CHUNKS, cache_policy=name, cache_policy_module_path=vllm_policies.__name__
    )


def offload_key(number: int) -> OffloadKey:
    return OffloadKey(key(number))


def test_every_order_has_its_policy() -> None:
    from kvcascade.tiers.policies import ORDERS

    assert len(NAMES) == len(ORDERS)


@pytest.mark.parametrize("name", NAMES)
def test_random_requests_under_their_manager(name: str) -> None:
    """No chunk is lost or handed out twice, and what is pinned stays."""
    rng = random.Random(7)
    manager = manager_with(name)
    held: dict[OffloadKey, int] = {}
    pinned: list[tuple[list[OffloadKey], ReqContext]] = []
    for number in range(400):
        context = ReqContext(req_id=str(number))
        manager.on_new_request(context)
        first = rng.randrange(30)
        keys = [offload_key(first + i) for i in range(rng.randint(1, 5))]
        ready = [k for k in keys if k in held]
        if ready and rng.random() < 0.5:
            manager.prepare_load(ready, context)
            pinned.append((ready, context))
        output = manager.prepare_store(keys, context)
        if output is not None:
            for gone in output.evicted_keys:
                assert not any(gone in keys for keys, _ in pinned), "a pinned chunk left"
                del held[gone]
            ids = output.store_spec.chunk_ids.tolist()  # type: ignore[attr-defined]
            held.update(zip(output.keys_to_store, ids, strict=True))
            assert len(set(held.values())) == len(held) <= CHUNKS
            manager.complete_store(output.keys_to_store, context)
        if pinned and rng.random() < 0.6:
            loaded, its_context = pinned.pop(0)
            manager.complete_load(loaded, its_context)
        if not any(context is other for _, other in pinned):
            manager.on_request_finished(context)
    assert len(held) == CHUNKS


def test_lru_keeps_what_was_used() -> None:
    manager = manager_with("LruPolicy")
    context = ReqContext(req_id="a")
    manager.on_new_request(context)
    keys = [offload_key(i) for i in range(CHUNKS)]
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    manager.on_request_finished(context)
    later = ReqContext(req_id="b")
    manager.on_new_request(later)
    manager.prepare_load(keys[8:], later)
    manager.complete_load(keys[8:], later)
    manager.on_request_finished(later)
    last = ReqContext(req_id="c")
    manager.on_new_request(last)
    output = manager.prepare_store([offload_key(100 + i) for i in range(8)], last)
    assert output is not None and set(output.evicted_keys) == set(keys[:8])
