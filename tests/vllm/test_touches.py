"""Uses of blocks by an engine that touches all keys of a request, as vLLM 0.24 to 0.30 does."""

from __future__ import annotations

import pytest
from support.cascade import Cascade
from support.inside import demoters, first_tier
from support.keys import keys
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvcascade.manager.admission import admit_second_touch
from kvcascade.manager.first_tier import RUN_BLOCKS
from kvcascade.tools.dev.bench.peers.vllm_calls import over
from kvcascade.vllm.v0_26 import CascadeManager

PROMPT = [OffloadKey(block_hash) for block_hash in keys(0, 4)]


def admit(manager: CascadeManager, context: ReqContext) -> int:
    """Look the prompt up and touch all of it, as each step does in which a request may begin."""
    answers = [manager.lookup(key, context) for key in PROMPT]
    manager.touch(PROMPT, context)
    return answers.count(LookupResult.HIT)


def store(manager: CascadeManager, offered: list[OffloadKey], context: ReqContext) -> None:
    output = manager.prepare_store(offered, context)
    assert output is not None
    if output.keys_to_store:
        manager.touch(PROMPT, context)
    manager.on_schedule_end()
    manager.complete_store(set(output.keys_to_store), context)


def written(cascade: Cascade) -> tuple[int, int]:
    """Number of blocks that were written below and refused, once nothing is dirty."""
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    link = cascade.manager.counters.links[0]
    return link.demoted_blocks, link.demote_refused_blocks


@pytest.mark.parametrize("chunk", [4, 2, 1])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_block_is_written_at_its_second_use(chunk: int, is_preempted: bool) -> None:
    cascade = Cascade((16, 64), is_immediate=True, admission=admit_second_touch)
    manager, first, second = over(cascade.manager), ReqContext("first"), ReqContext("second")
    manager.on_new_request(first)
    assert admit(manager, first) == 0
    manager.on_schedule_end()  # the device had no room for it
    assert admit(manager, first) == 0
    for start in range(0, len(PROMPT), chunk):
        store(manager, PROMPT[start : start + chunk], first)
    if is_preempted:
        assert admit(manager, first) == 0, "it asks again one step later"
        manager.on_schedule_end()
        assert admit(manager, first) == len(PROMPT)
        manager.on_schedule_end()
    manager.on_request_finished(first)
    assert written(cascade) == (0, len(PROMPT))
    manager.on_new_request(second)
    assert admit(manager, second) == len(PROMPT)
    store(manager, PROMPT, second)
    manager.on_request_finished(second)
    assert written(cascade) == (len(PROMPT), len(PROMPT))


def test_a_block_that_two_requests_compute_at_once_is_used_twice() -> None:
    cascade = Cascade((16, 64), is_immediate=True, admission=admit_second_touch)
    manager, contexts = over(cascade.manager), [ReqContext("first"), ReqContext("second")]
    for context in contexts:
        manager.on_new_request(context)
        assert admit(manager, context) == 0
    for context in contexts:
        store(manager, PROMPT, context)
        manager.on_request_finished(context)
    assert written(cascade) == (len(PROMPT), 0)


def test_a_block_from_below_that_is_loaded_is_used_again() -> None:
    cascade = Cascade((16, 64), is_immediate=True)
    cascade.below_only(keys(0, 4))
    manager, context = over(cascade.manager), ReqContext("loads")
    manager.on_new_request(context)
    assert admit(manager, context) == 0, "they are on their way"
    cascade.run_transfers()
    assert admit(manager, context) == len(PROMPT)
    manager.prepare_load(PROMPT, context)
    manager.on_schedule_end()
    manager.complete_load(set(PROMPT), context)
    uses = first_tier(cascade.manager).uses
    slots = [status.block_id for key in keys(0, 4) if (status := cascade.policies[0].get(key))]
    assert [uses.of(slot) for slot in slots] == [1] * 4
    manager.on_request_finished(context)
    assert [uses.of(slot) for slot in slots] == [2] * 4


def test_a_stop_writes_the_heads_of_all_prompts_first() -> None:
    cascade = Cascade((512, 512))
    manager, prompts = over(cascade.manager), [keys(0, 2 * RUN_BLOCKS), keys(1000, 1000 + 256)]
    for prompt in prompts:
        context, offered = ReqContext(f"of {len(prompt)}"), [OffloadKey(h) for h in prompt]
        manager.on_new_request(context)
        manager.touch(offered, context)
        assert manager.prepare_store(offered, context) is not None
        manager.complete_store(set(offered), context)
        manager.on_request_finished(context)
    first = demoters(cascade.manager)[0].search.most_useful(2 * RUN_BLOCKS, [])
    assert set(first) == {h for prompt in prompts for h in prompt[:RUN_BLOCKS]}
