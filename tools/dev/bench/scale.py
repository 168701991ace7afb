"""Sizes of the measurements: full, or under two minutes."""

from __future__ import annotations

from dataclasses import dataclass

from ...commands.bench.bench_results import GIB, KIB, MIB
from ..server import BLOCK_TOKENS

SUFFIX_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class EngineScale:
    """Model and requests of the engine. Prompts are whole blocks and a few tokens."""

    layers: int = 6
    hidden: int = 512
    prefixes: int = 8
    prefix_blocks: int = 60
    fresh: int = 6
    """Number of prompts without repetition per round."""
    fresh_rounds: int = 12
    fresh_rounds_an_engine: int = 4
    """Rounds after which a new engine replaces the old one."""
    cpu_share: float = 0.3
    """Size of the CPU tier, as a share of all data that a pass stores."""

    @property
    def prompt_tokens_max(self) -> int:
        """Return the largest length of a prompt with its answer."""
        return (self.prefix_blocks + SUFFIX_BLOCKS + 2) * BLOCK_TOKENS

    @property
    def pass_blocks(self) -> int:
        """Return the number of distinct blocks of a pass."""
        return self.prefixes * (self.prefix_blocks + 2 * SUFFIX_BLOCKS)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block over all layers: keys and values in float32, half as many KV
        heads as heads."""
        return 2 * 4 * BLOCK_TOKENS * self.layers * self.hidden // 2


@dataclass(frozen=True, slots=True)
class RestartScale:
    """Model, and documents that are requested before and after a restart."""

    layers: int = 12
    hidden: int = 512
    documents: int = 12
    document_blocks: int = 59
    requests: int = 36
    device_documents: int = 4
    """Number of documents that fit on the device."""
    clients: tuple[int, ...] = (4, 8, 16, 32)
    small_cpu_bytes: int = 128 * MIB
    large_cpu_bytes: int = 2 * GIB

    @property
    def prompt_tokens_max(self) -> int:
        """Return the largest length of a prompt with its answer."""
        return (self.document_blocks + 2) * BLOCK_TOKENS

    @property
    def document_bytes(self) -> int:
        """Return the bytes of a document: keys and values in float32, half as many KV heads as
        heads."""
        return self.document_blocks * 2 * 4 * BLOCK_TOKENS * self.layers * self.hidden // 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all measurements."""

    repeats: int
    """Number of runs of each contender of each case."""
    manager_blocks: tuple[int, ...]
    """Capacities of the CPU tier, in blocks."""
    index_blocks: tuple[int, ...]
    """Numbers of blocks in the index of the NVMe tier, for lookups and reopening."""
    reopen_blocks: tuple[int, ...]
    path_blocks: tuple[int, ...]
    """Numbers of blocks in the tables of a path."""
    questions: int
    """Number of blocks in a lookup measurement."""
    block_sizes: tuple[int, ...]
    """Block sizes of transfers, in bytes."""
    transfer_bytes: int
    """Bytes of a transfer, in each direction."""
    busy_block_size: int
    busy_bytes: int
    burst_blocks: int
    """Number of blocks of the lookup that measures a busy scheduler."""
    quiet_bursts: int
    """Number of lookups that are timed without transfers."""
    engine: EngineScale = EngineScale()
    restart: RestartScale = RestartScale()
    engine_repeats: int = 1
    is_whole: bool = False
    """True if the engine, which takes minutes, is measured without being asked for by name."""


FULL = Scale(
    repeats=5,
    manager_blocks=(32 << 10, 256 << 10, 1 << 20),
    index_blocks=(1_000_000, 4_000_000),
    reopen_blocks=(100_000, 1_000_000, 4_000_000),
    path_blocks=(1_000_000, 4_000_000, 16_000_000),
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
    path_blocks=(100_000,),
    questions=5_000,
    block_sizes=(64 * KIB, 512 * KIB),
    transfer_bytes=128 * MIB,
    busy_block_size=512 * KIB,
    busy_bytes=256 * MIB,
    burst_blocks=1000,
    quiet_bursts=300,
)
