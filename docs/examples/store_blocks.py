"""Put blocks of a numpy array into the tier of a path, and get them back.

python store_blocks.py /mnt/nvme/kv
"""

import sys

import numpy as np

import kvcascade

keys = [b"prompt 1, block %d" % number for number in range(4)]
blocks = np.arange(4 * 16384, dtype=np.float32).reshape(4, 16384)
with kvcascade.open(sys.argv[1], namespace="examples", block_bytes=65536) as cache:
    print("stored:", sum(outcome.is_there for outcome in cache.put(keys, list(blocks))))
    print("there:", cache.exists([*keys, b"prompt 2, block 0"]))
    into = np.empty_like(blocks)  # a torch tensor on the CPU works as well
    cache.get(keys, list(into))
    print("equal:", bool((into == blocks).all()))
