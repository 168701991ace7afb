"""A cache that fills on demand, one block reference at a time: what policies are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from kvcascade.tiers.base import BlockHash, BlockStatus
from kvcascade.tiers.policies import create


def hash_of(block_id: int) -> BlockHash:
    """A block hash whose 64-bit tag is spread as those of real hashes are."""
    spread = block_id * 0x9E3779B97F4A7C15 % (1 << 64)
    return BlockHash(spread.to_bytes(8, "little") + bytes(8))


def count_hits(policy_name: str, capacity: int, references: Sequence[int]) -> int:
    """Hits of a policy through the interface that the manager uses."""
    policy = create(policy_name, capacity)
    get, touch, expect, insert = policy.get, policy.touch, policy.expect, policy.insert
    hashes = {block_id: hash_of(block_id) for block_id in set(references)}
    hits = 0
    for block_id in references:
        block_hash = hashes[block_id]
        if get(block_hash) is not None:
            hits += 1
            touch((block_hash,))
            continue
        slot = len(policy)
        expect((block_hash,))
        if slot == capacity:
            evicted = policy.evict(1, ())
            assert evicted is not None, "nothing is pinned"
            slot = evicted[0][1].block_id
        insert(block_hash, BlockStatus(0, slot))
    return hits
