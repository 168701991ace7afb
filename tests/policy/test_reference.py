"""Hit counts on recorded workloads, compared with an independent library (libcachesim).

Every block of every request is one reference, in prompt order; what is missing is inserted. FIFO,
LRU, SIEVE, S3-FIFO and ARC must agree exactly in every cell; ARC may differ by a thousandth, since
the library rounds its target to whole blocks.

S3-FIFO has two warm-up rules. "s3fifo" does as the paper does, and is compared with the stored
figures `S3FIFO_paper_warmup`; the library's rule is `EagerS3FifoOrder`. Below 20 blocks the
library's S3-FIFO never hits, and is not compared.

LIRS and SLRU may differ by a hundredth, because the library departs from the papers here:

- LIRS: a hit on a block of Q that is not in the stack makes the library demote a hot block, and
  thereby evict one, so that the next new block is hot at once. Here such a hit evicts nothing.
- SLRU: the library's four segments have a quarter of the slots each, rounded down; what a use
  pushes out of the lowest is evicted, so that up to three slots stay empty. Here the segments have
  all slots between them. Both agree exactly where the size is a multiple of four, and that is how
  they are compared on prefixes; the stored sizes are what they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from support.replay import count_hits
from support.traces import FRACTIONS, LLM, block_references, capacities, reference

EAGER = "support.eager_s3fifo:EagerS3FifoOrder"
SMALL = ("classic_lirs_gli",)
CLASSIC = (
    *SMALL,
    "classic_lirs_multi3",
    "classic_lirs_2_pools",
    "classic_lirs_sprite",
    "classic_lirs_loop",
    "classic_cache2k_web12",
    "classic_cloudphysics_sample",
    "classic_corda_vault",
)
STORED = {
    "fifo": "FIFO",
    "lru": "LRU",
    "sieve": "SIEVE",
    "s3fifo": "S3FIFO_paper_warmup",
    EAGER: "S3FIFO",
    "arc": "ARC",
    "lirs": "LIRS",
    "slru": "SLRU",
}
"""Column of the stored reference by policy."""
LIBRARY = {
    "fifo": "FIFO",
    "lru": "LRU",
    "sieve": "Sieve",
    EAGER: "S3FIFO",
    "arc": "ARC",
    "lirs": "LIRS",
    "slru": "SLRU",
}
"""Class of the library by policy."""
TOLERANCE = {"arc": 0.001, "lirs": 0.01, "slru": 0.01}
"""Of the hit ratio; all others agree exactly."""
PREFIX_REFERENCES = 3_000
S3FIFO_BLOCKS_MIN = 20
SLRU_SEGMENTS = 4

whole = [
    pytest.param(trace, id=trace, marks=() if trace in SMALL else pytest.mark.soak)
    for trace in (*LLM, *CLASSIC)
]


def library_hits(class_name: str, capacity: int, references: Sequence[int]) -> int:
    """Hits of the library's policy; skips the test where the library is not installed."""
    library = pytest.importorskip(
        "libcachesim", reason="libcachesim is not installed (tools/requirements/dev.txt)"
    )
    get: Callable[[object], bool] = getattr(library, class_name)(capacity, hashpower=16).get
    request = library.Request()
    request.obj_size = 1
    hits = 0
    for time_s, block_id in enumerate(references):
        request.obj_id, request.clock_time = block_id, time_s
        hits += get(request)
    return hits


def check(policy: str, hits: int, expected: int, references: int) -> None:
    """Equal, or within the tolerance of this policy."""
    assert abs(hits - expected) <= TOLERANCE.get(policy, 0.0) * references, (hits, expected)


@pytest.mark.parametrize("policy", LIBRARY)
@pytest.mark.parametrize("trace", [*LLM, *CLASSIC])
def test_prefixes_agree_with_the_library(trace: str, policy: str) -> None:
    references = block_references(trace, PREFIX_REFERENCES)
    for capacity in capacities(trace, PREFIX_REFERENCES):
        if policy == EAGER and capacity < S3FIFO_BLOCKS_MIN:
            continue
        if policy == "slru":
            capacity = max(SLRU_SEGMENTS, capacity - capacity % SLRU_SEGMENTS)
        expected = library_hits(LIBRARY[policy], capacity, references)
        hits = count_hits(policy, capacity, references)
        if policy == "slru":
            assert hits == expected
        check(policy, hits, expected, len(references))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("trace", whole)
def test_whole_traces_agree_with_the_stored_reference(
    trace: str, policy: str, fraction: str, record_property: Callable[[str, object], None]
) -> None:
    known = reference(trace)
    ratio = known["block_hit_ratio"][STORED[policy]].get(fraction)
    if ratio is None:
        pytest.skip("the reference means nothing at this size")
    references = block_references(trace)
    assert len(references) == known["block_references"]
    start_s = time.perf_counter()
    hits = count_hits(policy, known["cache_sizes"][fraction], references)
    cost_us = (time.perf_counter() - start_s) / len(references) * 1e6
    record_property("hits", hits)
    record_property("us_per_reference", cost_us)
    # Stored ratios have six digits.
    expected = round(ratio * len(references))
    print(f"{trace} {fraction} {policy}: {hits} hits, {expected} expected, {cost_us:.1f} us each")
    if len(references) > 500_000 and abs(hits / len(references) - ratio) <= 5.1e-7:
        return
    check(policy, hits, expected, len(references))
