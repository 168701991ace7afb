"""A start that runs out of descriptors: one sentence with the remedy, and no block is dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.children import environment

_STARTS = """
import os, resource, sys
from pathlib import Path
from support.executors import InlineExecutor
from support.nvme_rig import Rig, config_for, key
from kvcascade.tiers.nvme.opening import open_nvme_tier
from kvcascade.errors import TierIOError

SLOTS = 64
config = config_for([Path(sys.argv[1])], slots=SLOTS, per_segment=4)
rig = Rig(config)
rig.store_bit_by_bit([key(i) for i in range(SLOTS)])
needed = len(os.listdir("/proc/self/fd"))
rig.close()
first = len(os.listdir("/proc/self/fd"))
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
refused = opened = 0
for limit in range(first, needed + 4):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    tier = None
    try:
        tier = open_nvme_tier(config, InlineExecutor())
        opened += 1
    except TierIOError as error:
        assert "ulimit -n" in str(error), error
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if tier is not None:
        assert tier.index.count() == SLOTS, limit
        tier.close()
rig = Rig(config)
assert all(rig.check(key(i)) for i in range(SLOTS))
rig.check_sums()
rig.close()
print(refused, opened)
"""


def test_a_start_that_runs_out_of_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, opened = map(int, done.stdout.split())
    assert refused > 20 and opened > 0
