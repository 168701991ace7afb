"""How much is measured: everything, what fits into two minutes, or the least that still runs."""

from __future__ import annotations

from dataclasses import dataclass

from ...commands.bench.bench_results import GIB, KIB, MIB

BLOCK_TOKENS = 32
"""The engine on CPU takes multiples of 32."""
SUFFIX_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class EngineScale:
    """The model and what it is asked. Prompts are whole blocks and a few tokens."""

    layers: int = 6
    hidden: int = 512
    prefixes: int = 8
    prefix_blocks: int = 60
    fresh: int = 6
    """Prompts that never come again, in a round."""
    fresh_rounds: int = 12
    fresh_rounds_an_engine: int = 4
    """Then another one takes over."""
    cpu_share: float = 0.3
    """The CPU tier, as a share of all that a pass stores."""

    @property
    def prompt_tokens_max(self) -> int:
        """No prompt with its answer is longer."""
        return (self.prefix_blocks + SUFFIX_BLOCKS + 2) * BLOCK_TOKENS

    @property
    def pass_blocks(self) -> int:
        """Different blocks of a pass."""
        return self.prefixes * (self.prefix_blocks + 2 * SUFFIX_BLOCKS)

    @property
    def block_bytes(self) -> int:
        """Of all layers: keys and values in float32, half as many KV heads as heads."""
        return 2 * 4 * BLOCK_TOKENS * self.layers * self.hidden // 2


@dataclass(frozen=True, slots=True)
class RestartScale:
    """The model, and documents that are asked for before and after a restart."""

    layers: int = 12
    hidden: int = 512
    documents: int = 12
    document_blocks: int = 59
    requests: int = 36
    device_documents: int = 4
    """Documents that the device holds."""
    clients: tuple[int, ...] = (4, 8, 16, 32)
    small_cpu_bytes: int = 128 * MIB
    large_cpu_bytes: int = 2 * GIB

    @property
    def prompt_tokens_max(self) -> int:
        """No prompt with its answer is longer."""
        return (self.document_blocks + 2) * BLOCK_TOKENS

    @property
    def document_bytes(self) -> int:
        """Keys and values in float32, half as many KV heads as heads."""
        return self.document_blocks * 2 * 4 * BLOCK_TOKENS * self.layers * self.hidden // 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all measurements."""

    repeats: int
    """How often each contender of each case runs."""
    manager_blocks: tuple[int, ...]
    """Capacities of the CPU tier."""
    index_blocks: tuple[int, ...]
    """Blocks in the index of the NVMe tier for lookups and reopening."""
    reopen_blocks: tuple[int, ...]
    questions: int
    """Blocks asked for in a lookup measurement."""
    block_sizes: tuple[int, ...]
    """Bytes of a block in transfers."""
    transfer_bytes: int
    """Bytes of a transfer in each direction."""
    busy_block_size: int
    busy_bytes: int
    burst_blocks: int
    """Blocks of the lookup that a busy scheduler is timed by."""
    quiet_bursts: int
    """How often that lookup is timed without transfers."""
    engine: EngineScale = EngineScale()
    restart: RestartScale = RestartScale()
    engine_repeats: int = 1
    is_whole: bool = False
    """True if the engine is started too, which takes minutes, without being asked for."""


FULL = Scale(
    repeats=5,
    manager_blocks=(32 << 10, 256 << 10, 1 << 20),
    index_blocks=(1_000_000, 4_000_000),
    reopen_blocks=(100_000, 1_000_000, 4_000_000),
    questions=20_000,
    block_sizes=(64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB),
    transfer_bytes=1 * GIB,
    busy_block_size=512 * KIB,
    busy_bytes=1 * GIB,
    burst_blocks=1000,
    quiet_bursts=1000,
    engine_repeats=3,
    is_whole=True,
)
QUICK = Scale(
    repeats=2,
    manager_blocks=(32 << 10, 128 << 10),
    index_blocks=(100_000,),
    reopen_blocks=(100_000,),
    questions=5_000,
    block_sizes=(64 * KIB, 512 * KIB),
    transfer_bytes=128 * MIB,
    busy_block_size=512 * KIB,
    busy_bytes=256 * MIB,
    burst_blocks=1000,
    quiet_bursts=300,
)
SMOKE = Scale(
    repeats=1,
    manager_blocks=(128, 256),
    index_blocks=(200,),
    reopen_blocks=(200,),
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
"""For tests: every measurement, as small as it can be."""
