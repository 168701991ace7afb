"""`kvcascade check`: does a configuration fit this machine, and what will each tier hold?"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from ....assembly.named import checked
from ....assembly.nvme_parts import slots_of_segment
from ....config.machine import Machine, ThisMachine, cpu_capacity, doubts, nvme_capacity, writing
from ....config.options import noting
from ....config.schema import CascadeConfig, NvmeTierOptions
from ....errors import os_errors
from ....tiers.cpu import ArenaGeometry
from ....tiers.cpu.arena_limits import probe_machine
from ....tiers.cpu.huge_pages import address_of, gather, map_file
from ....tiers.cpu.prefault import prefault
from ....tiers.nvme.segments.format import PAGE_BYTES
from ....tiers.nvme.writer.capacity import plan_capacity
from ....vllm.scheduler_side import seconds_to_flush
from .. import show
from .transfer_config import Given, read_tiering

PROBE_BYTES = 128 << 20
"""Memory that is made and touched to measure how fast that goes."""
MAX_PROBE_SHARE = 8
"""At most one in so many bytes of what is free."""
PROBE_PIECES = 4
SCAN_S_PER_ENTRY = 4.0 / 4_000_000
"""After a crash every index entry is read once: measured at 4 million entries
(docs/decisions/opening.md)."""
OPEN_S = 0.21
"""Opening an NVMe tier after a clean close: measured at 4 million entries, the slowest of three
sizes (docs/decisions/opening.md)."""
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
    problems: list[str] = field(default_factory=list)
    """What does not fit, each with what to do."""
    doubts: list[str] = field(default_factory=list)
    """What fits and is hardly meant."""
    tiers: list[TierReport] = field(default_factory=list)
    write_mode: str | None = None
    """When a block is written to the tier below, as chosen; None: there is no tier below."""
    write_mode_reason: str | None = None
    """Why it was chosen."""
    stop_may_lose: str | None = None
    """What a stop without time loses."""
    shutdown_timeout_s: int | None = None
    """The `--shutdown-timeout` that an engine needs to write what is dirty at a stop; None: it
    writes nothing then."""
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
        return {"problem": self.problem, **asdict(self)}

    @property
    def problem(self) -> str | None:
        """The first of the problems."""
        return self.problems[0] if self.problems else None


def check(
    given: Given,
    shape: BlockShape | None,
    model: str | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
) -> CheckReport:
    """Validate and work out; a configuration that does not fit is a report with `problems`."""
    machine = ThisMachine() if machine is None else machine
    report = CheckReport(given.source, model=model)
    report.problems, report.doubts = list(given.problems), list(given.doubts)
    if given.is_tiering:
        with noting(report.problems):
            _check_tiering(report, given.extra, machine, shape)
        return report
    if not given.extra:
        return report
    with noting(report.problems):
        settings = checked(given.extra, machine, report.problems)
        if not report.problems:
            report.doubts += doubts(settings, machine)
            _fill(report, settings, machine, shape)
            _tell_of_stops(report, settings, machine)
            _expect_start(report, settings, measure or memory_rate)
    return report


def tokens_in_config(given: Given, block_size: int) -> int:
    """Tokens of one of our blocks, for vLLM blocks of `block_size` tokens."""
    chunk, size = given.extra.get("blocks_per_chunk"), given.extra.get("block_size")
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
    capacity, arena = cpu_capacity(settings.cpu, machine), None
    if shape is not None:
        arena = ArenaGeometry.fit(
            capacity, shape.rank_bytes, shape.world_size, kept=settings.cpu.persist
        )
        report.block_bytes = arena.slot_bytes
        report.tokens_per_block, report.bytes_per_token = shape.tokens, shape.bytes_per_token
    report.pinned_bytes = capacity
    blocks = None if arena is None else arena.slots
    where = str(settings.cpu.arena_dir)
    report.tiers.append(
        TierReport("cpu", where, capacity, settings.cpu.policy, blocks, _tokens(blocks, shape))
    )
    report.tiers += [_nvme(tier, machine, report.block_bytes, shape) for tier in settings.nvme]


def _tell_of_stops(report: CheckReport, settings: CascadeConfig, machine: Machine) -> None:
    chosen = writing(settings, machine)
    if chosen is None:
        return
    report.write_mode, report.write_mode_reason = str(chosen.mode), chosen.why
    report.stop_may_lose = chosen.may_lose
    report.shutdown_timeout_s = seconds_to_flush(settings)


def _check_tiering(
    report: CheckReport, extra: Mapping[str, object], machine: Machine, shape: BlockShape | None
) -> None:
    """Our NVMe tier and policies inside vLLM's own tiering; how it starts is vLLM's affair."""
    tiering = read_tiering(extra, machine, report.problems, report.doubts)
    if report.problems:
        return
    capacity, blocks = tiering.cpu_bytes, None
    if shape is not None:
        row = shape.rank_bytes * shape.world_size
        report.block_bytes = -(-row // PAGE_BYTES) * PAGE_BYTES
        report.tokens_per_block, report.bytes_per_token = shape.tokens, shape.bytes_per_token
        blocks = capacity // report.block_bytes
    report.pinned_bytes = capacity
    report.tiers.append(
        TierReport("cpu", "vLLM's", capacity, tiering.policy, blocks, _tokens(blocks, shape))
    )
    report.tiers += [_nvme(tier, machine, report.block_bytes, shape) for tier in tiering.nvme]


def _nvme(
    tier: NvmeTierOptions, machine: Machine, block_bytes: int | None, shape: BlockShape | None
) -> TierReport:
    blocks: int | None = None
    segments: int | None = None
    where, capacity = ", ".join(map(str, tier.path)), nvme_capacity(tier, machine)
    if block_bytes is not None:
        slots = slots_of_segment(tier, block_bytes)
        plan = plan_capacity(capacity, block_bytes, len(tier.path), slots)
        blocks, segments = plan.slots, plan.segments
    tokens = _tokens(blocks, shape)
    return TierReport(tier.type, where, capacity, tier.policy, blocks, tokens, segments)


def _tokens(blocks: int | None, shape: BlockShape | None) -> int | None:
    return None if blocks is None or shape is None else blocks * shape.tokens


def _expect_start(report: CheckReport, settings: CascadeConfig, measure: Measure) -> None:
    rate = measure(settings.cpu.arena_dir, settings.cpu.prefault)
    report.prefault_bytes_per_s = rate
    if rate is None:
        return
    report.start_s = report.pinned_bytes / rate + OPEN_S * len(settings.nvme)
    entries = [tier.blocks for tier in report.tiers[1:] if tier.blocks is not None]
    if len(entries) == len(settings.nvme):
        report.start_after_crash_s = report.start_s + sum(entries) * SCAN_S_PER_ENTRY


def print_checked(report: CheckReport) -> None:
    """Print what each tier holds, or the problems of the configuration."""
    console = show.console()
    if report.problems:
        for problem in report.problems:
            console.print(Text(problem, style="red"))
        for doubt in report.doubts:
            console.print(Text(f"  {doubt}", style="yellow"))
        return
    numbers = ["capacity", "blocks", "tokens", "files"]
    table = show.columns("Tiers", "tier", "where", "policy", *numbers, right=numbers)
    for tier in report.tiers:
        counts = (tier.blocks, tier.tokens, tier.segments)
        shown = [show.NOTHING if count is None else f"{count:,}" for count in counts]
        table.add_row(tier.tier, tier.where, tier.policy, show.size(tier.capacity_bytes), *shown)
    console.print(table)
    rows = [("pinned memory", show.size(report.pinned_bytes))]
    if report.block_bytes is not None:
        rows.insert(0, ("block", f"{report.tokens_per_block} tokens, {report.block_bytes:,} bytes"))
        rows.insert(0, ("KV per token", f"{report.bytes_per_token:,} bytes"))
    else:
        rows.insert(0, ("blocks and tokens", "give --model or --kv-bytes-per-token to see them"))
    if report.model is not None:
        rows.insert(0, ("model", report.model))
    if report.write_mode is not None:
        rows.append(("write mode", f"{report.write_mode} ({report.write_mode_reason})"))
        rows.append(("a stop may lose", f"{report.stop_may_lose}"))
        rows.append(("time to write at a stop", _time_to_stop(report.shutdown_timeout_s)))
    if report.prefault_bytes_per_s is not None:
        rate = f"{show.size(report.prefault_bytes_per_s)}/s"
        rows.append(("getting memory", f"{rate} (measured now)"))
    if report.start_s is not None:
        rows.append(("start, about", show.duration(report.start_s)))
    if report.start_after_crash_s is not None:
        rows.append(("after a crash, at most", show.duration(report.start_after_crash_s)))
    console.print(show.facts("", rows))
    for doubt in report.doubts:
        console.print(Text(f"  {doubt}", style="yellow"))
    console.print(Text("  The configuration fits this machine.", style="green"))


def _time_to_stop(needed_s: int | None) -> str:
    if needed_s is None:
        return "not wanted: shutdown_flush_s is 0"
    return (
        "none with vLLM's default --shutdown-timeout 0 (0.32 and later): it kills an engine as "
        f"soon as that is asked to stop; start it with --shutdown-timeout {needed_s}"
    )
