"""Read the blocks of a segment file with plain safetensors, without kvcascade.

python read_segment.py /mnt/nvme/kv/examples-0123456789ab/segments/000000.safetensors
"""

import sys

from safetensors import safe_open

with safe_open(sys.argv[1], "numpy") as segment:
    blocks = segment.get_tensor("blocks")
    print("segment", segment.metadata()["segment"], "of", segment.metadata()["fingerprint"][:12])
print(f"{blocks.shape[0]} slots of {blocks.shape[1]} bytes, {blocks.any(axis=1).sum()} in use")
