"""Replay a trace of requests through a cascade, and print what each tier would have served.

python replay_trace.py requests.jsonl
"""

import sys
from pathlib import Path

from kvcascade.tools.replay.simulation import replay
from kvcascade.tools.replay.tier_options import ReplayOptions, TierOptions
from kvcascade.tools.replay.traces import read_trace

trace = read_trace(Path(sys.argv[1]))
tiers = (TierOptions("cpu", 1 << 30), TierOptions("nvme", 8 << 30, "s3fifo"))
report = replay(trace, ReplayOptions(tiers, kv_bytes_per_token=128 << 10))
print(f"{len(trace.requests)} requests, {report.hit_ratio:.3f} of all tokens found")
for tier in report.tiers:
    print(tier)
