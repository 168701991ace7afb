"""Smallest sizes of every measurement."""

from __future__ import annotations

from kvcascade.tools.commands.bench.bench_results import KIB, MIB
from kvcascade.tools.dev.bench.scale import EngineScale, RestartScale, Scale

SMOKE = Scale(
    repeats=1,
    manager_blocks=(128, 256),
    index_blocks=(200,),
    reopen_blocks=(200,),
    path_blocks=(3_000,),
    questions=64,
    block_sizes=(4 * KIB,),
    transfer_bytes=256 * KIB,
    busy_block_size=4 * KIB,
    busy_bytes=256 * KIB,
    burst_blocks=16,
    quiet_bursts=8,
    engine=EngineScale(2, 256, prefixes=2, prefix_blocks=4, fresh=2, fresh_rounds=1, cpu_share=1.0),
    restart=RestartScale(
        2,
        256,
        documents=2,
        document_blocks=4,
        requests=4,
        clients=(2,),
        small_cpu_bytes=4 * MIB,
        large_cpu_bytes=8 * MIB,
    ),
)
