"""Run an eviction policy over a sequence of blocks, and count the hits.

python run_policy.py lru
"""

import random
import sys

from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies import create

SLOTS = 100
policy, hits = create(sys.argv[1], SLOTS), 0
free = [BlockStatus(0, slot) for slot in range(SLOTS)]
rng = random.Random(0)
for _ in range(10_000):
    key = b"block %d" % min(rng.randrange(1000), rng.randrange(1000))
    if policy.get(key) is not None:
        hits += 1
        policy.touch([key])
        continue
    if not free:
        free += [status for _, status in policy.evict(1, protected=())]
    policy.insert(key, free.pop())
print(f"{sys.argv[1]}: {hits / 10_000:.3f} of all blocks were found")
