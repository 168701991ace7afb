"""`kvcascade check`: does a configuration fit this machine, and what will each tier hold?"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...config import CascadeConfig, CpuTier, NvmeTier
from ...errors import ConfigError, os_errors
from ...machine import Machine, ThisMachine, cpu_capacity, doubts, nvme_capacity
from ...named import CONNECTOR, SPEC_NAME, checked
from ...nvme_parts import slots_of_segment
from ...options import At
from ...tiers.cpu import ArenaGeometry
from ...tiers.cpu.huge_pages import address_of, gather, map_file
from ...tiers.cpu.machine import probe_machine
from ...tiers.cpu.prefault import prefault
from ...tiers.nvme.capacity import plan_capacity
from ...tiers.nvme.format import PAGE_BYTES

PROBE_BYTES = 128 << 20
"""Memory that is made and touched to measure how fast that goes."""
MAX_PROBE_SHARE = 8
"""At most one in so many bytes of what is free."""
PROBE_PIECES = 4
SCAN_S_PER_ENTRY = 4.0 / 4_000_000
"""After a crash every index entry is read once: measured at 4 million entries (ARCHITECTURE.md)."""
OPEN_S = 0.21
"""Opening an NVMe tier after a clean close: measured at 4 million entries, the slowest of three
sizes (ARCHITECTURE.md)."""
MAX_CONFIG_BYTES = 1 << 20
SPEC_KEY = "spec_name"
EXTRA = "kv_connector_extra_config"
Measure = Callable[[Path, bool], float | None]
"""Bytes per second at which memory of a folder is made, and touched if so: `memory_rate`."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block is."""

    tokens: int
    """Tokens of a block, `blocks_per_chunk` included."""
    bytes_per_token: int
    """Over all ranks, their copies included."""
    world_size: int = 1

    @property
    def rank_bytes(self) -> int:
        """One worker's part of a block."""
        return -(-self.tokens * self.bytes_per_token // self.world_size)


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier as configured; sizes in bytes, None: not known without a model."""

    tier: str
    where: str
    capacity_bytes: int
    policy: str
    blocks: int | None = None
    tokens: int | None = None
    segments: int | None = None


@dataclass(slots=True)
class CheckReport:
    """What a configuration comes to on this machine."""

    config: str
    problem: str | None = None
    """The first thing that does not fit, and what to do."""
    doubts: list[str] = field(default_factory=list)
    """What fits and is hardly meant."""
    tiers: list[TierReport] = field(default_factory=list)
    block_bytes: int | None = None
    tokens_per_block: int | None = None
    bytes_per_token: int | None = None
    model: str | None = None
    pinned_bytes: int = 0
    """Memory of the CPU tier, locked for the device."""
    prefault_bytes_per_s: float | None = None
    """At which the CPU tier's memory is made, and touched unless `prefault` is off: measured now,
    with a part of it."""
    start_s: float | None = None
    """Expected: making (and touching) the CPU tier's memory, and opening the NVMe tiers."""
    start_after_crash_s: float | None = None
    """The same, with one pass over a full index."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def read_config(path: Path) -> Mapping[str, object]:
    """`kv_connector_extra_config` from a file that holds it, vLLM's whole `--kv-transfer-config`,
    or an object with the latter as `kv_transfer_config`. Raises `ConfigError`, also for names under
    which vLLM would take something else."""
    document = _read_json(path)
    for name in ("kv_transfer_config", "kv-transfer-config", EXTRA):
        connector = document.get("kv_connector", CONNECTOR)
        if connector != CONNECTOR:
            raise At("kv_connector").wrong(connector, f'is another one; use "{CONNECTOR}"')
        inner = document.get(name)
        if isinstance(inner, Mapping):
            document = inner
    spec = document.get(SPEC_KEY, SPEC_NAME)
    if spec != SPEC_NAME:
        raise At(SPEC_KEY).wrong(spec, f'is another one; use "{SPEC_NAME}"')
    return document


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is too large for a configuration")
        document = json.loads(path.read_text("utf-8"), object_pairs_hook=_once_each)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error})") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} holds no JSON object")
    return document


def _once_each(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    """A JSON object; of a key that is given twice the last one alone would count."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise At(key).wrong(value, "is given beside another value; give every key once")
        found[key] = value
    return found


def check(
    path: Path,
    shape: BlockShape | None,
    model: str | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
) -> CheckReport:
    """Validate and work out; a configuration that does not fit is a report with a `problem`."""
    machine = ThisMachine() if machine is None else machine
    report = CheckReport(str(path), model=model)
    try:
        given = read_config(path)
        settings = checked(given, machine)
        report.doubts = doubts(settings, machine)
        if SPEC_KEY not in given:
            report.doubts.append(str(At(SPEC_KEY).missing(f'an engine needs "{SPEC_NAME}"')))
        _fill(report, settings, machine, shape)
    except ConfigError as error:
        report.problem = str(error)
        return report
    _expect_start(report, settings, measure or memory_rate)
    return report


def tokens_in_config(path: Path, block_size: int) -> int:
    """Tokens of one of our blocks, for vLLM blocks of `block_size` tokens."""
    try:
        document = read_config(path)
    except ConfigError:
        return block_size
    chunk, size = document.get("blocks_per_chunk"), document.get("block_size")
    if isinstance(size, int) and size > 0:
        return size
    return block_size * chunk if isinstance(chunk, int) and chunk > 0 else block_size


def memory_rate(folder: Path, is_touched: bool) -> float | None:
    """Bytes per second at which memory of a folder is had as a CPU tier has it; None if the folder
    has no room. `is_touched`: by threads that touch it, too (`prefault`). Raises one of our errors.
    """
    with os_errors(f"measuring memory in {folder}"):
        figures = os.statvfs(folder)
        size = min(PROBE_BYTES, figures.f_bavail * figures.f_frsize // MAX_PROBE_SHARE)
        size = size // PROBE_PIECES // PAGE_BYTES * PAGE_BYTES * PROBE_PIECES
        if size <= 0:
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            return size / max(1e-9, _seconds_of_memory(file.fileno(), folder, size, is_touched))


def _seconds_of_memory(fd: int, folder: Path, size: int, is_touched: bool) -> float:
    memory = probe_machine(str(folder))
    began = time.perf_counter()
    os.ftruncate(fd, size)
    if memory.may_gather and not memory.huge:
        gather(fd, size, time.monotonic)
    os.posix_fallocate(fd, 0, size)
    if is_touched:
        mapped, step = map_file(fd, size), size // PROBE_PIECES
        start = address_of(mapped)
        prefault([(start + i * step, step)] for i in range(PROBE_PIECES))
    return time.perf_counter() - began


def _fill(
    report: CheckReport, settings: CascadeConfig, machine: Machine, shape: BlockShape | None
) -> None:
    capacity = cpu_capacity(settings.cpu, machine)
    arena: ArenaGeometry | None = None
    if shape is not None:
        arena = ArenaGeometry.fit(
            capacity, shape.rank_bytes, shape.world_size, kept=settings.cpu.persist
        )
        report.block_bytes = arena.slot_bytes
        report.tokens_per_block, report.bytes_per_token = shape.tokens, shape.bytes_per_token
    report.pinned_bytes = capacity
    for tier in settings.tiers:
        report.tiers.append(_tier(tier, machine, arena, shape))


def _tier(
    tier: CpuTier | NvmeTier,
    machine: Machine,
    arena: ArenaGeometry | None,
    shape: BlockShape | None,
) -> TierReport:
    blocks: int | None = None
    segments: int | None = None
    if isinstance(tier, CpuTier):
        where, capacity = str(tier.arena_dir), cpu_capacity(tier, machine)
        blocks = None if arena is None else arena.slots
    else:
        where, capacity = ", ".join(map(str, tier.path)), nvme_capacity(tier, machine)
        if arena is not None:
            slots = slots_of_segment(tier, arena.slot_bytes)
            plan = plan_capacity(capacity, arena.slot_bytes, len(tier.path), slots)
            blocks, segments = plan.slots, plan.segments
    tokens = None if blocks is None or shape is None else blocks * shape.tokens
    return TierReport(tier.type, where, capacity, tier.policy, blocks, tokens, segments)


def _expect_start(report: CheckReport, settings: CascadeConfig, measure: Measure) -> None:
    rate = measure(settings.cpu.arena_dir, settings.cpu.prefault)
    report.prefault_bytes_per_s = rate
    if rate is None:
        return
    report.start_s = report.pinned_bytes / rate + OPEN_S * len(settings.nvme)
    entries = [tier.blocks for tier in report.tiers[1:] if tier.blocks is not None]
    if len(entries) == len(settings.nvme):
        report.start_after_crash_s = report.start_s + sum(entries) * SCAN_S_PER_ENTRY
