"""Storms of requests at random: whatever waits, is held or fits, every request is served in time.

The scheduler has too few device blocks, and stops at the first request that does not fit: from vLLM
0.31 on after those that hold device blocks, up to 0.30 before them.
"""

from __future__ import annotations

import random

import pytest
from support.storm import Asker, Machine, Storm, prompt

SEEDS = 60
BLOCK_BYTES = 1 << 20


def machine(choose: random.Random, longest: int) -> Machine:
    """A machine whose device holds the longest prompt, and its first tier perhaps not."""
    return Machine(
        block_bytes=BLOCK_BYTES,
        tokens_per_block=16.0,
        cpu_bytes=choose.choice([16, 40, 120]) * BLOCK_BYTES,
        disk_bytes_per_s=choose.choice([20e6, 200e6, 2e9]),
        device_bytes_per_s=10e9,
        prefill_tokens_per_s=choose.choice([200.0, 2000.0, 20_000.0]),
        device_blocks=longest + choose.choice([0, 5, 60, 1000]),
        decode_s=choose.choice([0.0, 0.1, 12.0]),
        budget_slots=choose.choice([None, None, 8]),
        holders_come_first=choose.random() < 0.5,
    )


def askers(choose: random.Random) -> list[Asker]:
    """Requests for a few documents; some go on after them."""
    documents = [prompt(choose.randint(1, 50)) for _ in range(choose.randint(1, 8))]
    requests = []
    for _ in range(choose.randint(2, 24)):
        document = choose.choice(documents)
        below = choose.randint(0, len(document)) if choose.random() < 0.3 else len(document)
        more = prompt(choose.choice([0, 0, 1, 9]))
        arrives_s = choose.choice([0.0, choose.uniform(0.0, 5.0)])
        requests.append(Asker(arrives_s, document + more, below))
    return requests


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_is_served_in_time(seed: int) -> None:
    choose = random.Random(seed)
    requests = askers(choose)
    rules = machine(choose, max(len(asker.hashes) for asker in requests))
    storm = Storm(rules, requests)
    storm.run()
    blocks = sum(len(asker.hashes) for asker in requests)
    compute_s = blocks * rules.tokens_per_block / rules.prefill_tokens_per_s
    read_s = blocks * BLOCK_BYTES / rules.disk_bytes_per_s
    decode_s = len(requests) * rules.decode_s
    last_s = max(asker.served_s for asker in requests if asker.served_s is not None)
    assert last_s <= 5.0 + 2 * read_s + compute_s + decode_s, "the queues are not served in turn"
    manager = storm.manager
    assert not manager.waiting_requests and not manager.has_pending_work()
    assert not manager._claims._holds.users and not manager._workers.is_busy
    if manager._claims.choice.worth is not None:
        assert manager._claims.choice.worth.backlog.tokens == pytest.approx(0.0)
