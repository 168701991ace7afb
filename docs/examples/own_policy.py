"""An eviction policy and an admission rule of one's own.

Configure them as "policy": "own_policy:KeepFirst" and "admission": "own_policy:third_use"; the
module must be importable in the engine's processes. Run as a program, it shows them at work.
"""

from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies import create
from kvcascade.tiers.policies.lru import LruOrder


class KeepFirst(LruOrder):
    """Evicts the most recent block first, so that the first ones stay."""

    def victims(self, limit, wanted, mask=None, window=None):
        return super().victims(self.capacity, wanted, mask, window)[::-1][:limit]


def third_use(block_hash: bytes, uses: int) -> bool:
    """Write a block to the tier below from its third use on."""
    return uses >= 3


if __name__ == "__main__":
    policy = create("own_policy:KeepFirst", 3)
    for slot, key in enumerate([b"first", b"second", b"third"]):
        policy.insert(key, BlockStatus(0, slot))
    print("evicted next:", policy.coldest(1)[0][0].decode())
    print("written at its uses:", [uses for uses in range(1, 5) if third_use(b"first", uses)])
