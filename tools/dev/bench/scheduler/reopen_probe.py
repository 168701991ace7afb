"""A process that opens a filled tier, reports the time and its memory, and ends.

`reopening` runs it with `FOLDER BLOCKS clean|kill`; it prints one line of JSON. With `kill`, it
ends by SIGKILL while the tier is open.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import psutil

from .....manager.base import LookupState
from .....manager.request import Request
from .filled import WrittenTier, coldest_keys, key_of, open_written

SAMPLE_BLOCKS = 50_000
"""Number of blocks to look up before memory is measured again."""
COLDEST_BLOCKS = 1000
CPU_BLOCKS = 1024


def probe(folder: Path, blocks: int) -> tuple[WrittenTier, object]:
    """Open, look up, and measure; return the open tier and the results."""
    asked = [key_of(number) for number in random.sample(range(blocks), min(SAMPLE_BLOCKS, blocks))]
    expected = coldest_keys(blocks, COLDEST_BLOCKS)
    process = psutil.Process()
    before = process.memory_info()
    began = perf_counter()
    opened = open_written(folder, blocks, CPU_BLOCKS)
    opened_s = perf_counter() - began
    state = opened.manager.lookups.lookup_block(asked[0], Request())
    first_s = perf_counter() - began - opened_s
    held = opened.holds(asked)
    recency_kept = opened.share_of_victims(expected)
    after = process.memory_info()
    return opened, {
        "open_s": opened_s,
        "first_lookup_s": first_s,
        "was_found": state is LookupState.PENDING,
        "hit_rate": held / len(asked),
        "recency_kept": recency_kept,
        "resident_bytes": after.rss - before.rss,
        "anonymous_bytes": (after.rss - after.shared) - (before.rss - before.shared),
    }


def main(arguments: Sequence[str]) -> None:
    """Run the probe."""
    folder, blocks, end = arguments
    opened, found = probe(Path(folder), int(blocks))
    print(json.dumps(found), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    opened.close()


if __name__ == "__main__":
    main(sys.argv[1:])
