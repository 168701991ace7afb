"""vLLM's `obj` tier and a remote tier of ours on the same S3 server.

It needs moto, obstore and `nixl`, but no GPU.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from importlib.util import find_spec

from ...commands.bench.bench_results import KIB, OURS, VLLM, Goal, Quantity, size_label
from ..remote_server import s3_server
from .measurement import Case, Measurement, MeasurementSetup

NEEDED = ("obstore", "moto", "nixl")
BLOCKS, BLOCK_BYTES = 1000, 512 * KIB
THREADS = 8
"""Threads of each contender."""
LOOKUP, LOAD, BOTH = "lookup", "load", "lookup and load"
GOALS = {LOOKUP: 10.0, LOAD: 1.0, BOTH: 1.3}


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the only case; the server is started here."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        setup.note(f"vLLM's obj tier is not measured: not installed: {', '.join(missing)}")
        return
    from .peers.vllm_obj import Turns

    blocks = max(1, min(BLOCKS, setup.scale.transfer_bytes // BLOCK_BYTES))
    with s3_server() as endpoint, closing(Turns(endpoint, BLOCK_BYTES, blocks, THREADS)) as turns:
        contenders = {OURS: turns.ours, VLLM: turns.theirs}
        yield Case(f"{blocks:,} blocks of {size_label(BLOCK_BYTES)}", contenders)


MEASUREMENT = Measurement(
    "remote_obj",
    "Remote tier: beside vLLM's obj tier on S3 (moto)",
    "Both find out whether all blocks are there, then read them into memory that stands for the "
    "arena. Theirs asks for every block; ours bisects the chain, and asks for about ten. Ours "
    "verifies every block; theirs has no checksums.",
    tuple(
        Quantity(name, "blocks/s", (Goal(least, VLLM, is_least=True),), is_more_better=True)
        for name, least in GOALS.items()
    ),
    cases,
)
