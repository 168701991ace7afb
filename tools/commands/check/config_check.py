"""`kvcascade check`: validate a configuration against this machine, and compute what each tier
holds."""

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
from ....assembly.path_parts import path_options
from ....config.machine import Machine, cpu_capacity, nvme_held_bytes, warnings_of, writing
from ....config.options import noting
from ....config.remote import RemoteTierOptions
from ....config.schema import CascadeConfig, NvmeTierOptions
from ....config.sizes import share_of
from ....errors import os_errors
from ....tiers.cpu.arena_limits import probe_machine
from ....tiers.cpu.header import ArenaGeometry
from ....tiers.cpu.huge_pages import address_of, gather, map_file
from ....tiers.cpu.prefault import prefault
from ....tiers.nvme.path.writer.path_plan import SegmentPlan, fixed_bytes, plan_namespace
from ....tiers.nvme.segments.format import PAGE_BYTES, SegmentLayout
from ....tiers.remote.base import RemoteEngine
from ....tiers.remote.engines.opened_folder import folder_of_url
from ....tiers.remote.remote_options import open_remote_engine
from ....tiers.remote.remote_probe import finding_of, without_new_folders
from .. import show
from .transfer_config import Given, read_tiering

PROBE_BYTES = 128 << 20
"""Size of the memory that is created and touched to measure the rate."""
MAX_PROBE_SHARE = 8
"""Divisor of the free memory that gives the largest probe."""
PROBE_PIECES = 4
SCAN_S_PER_ENTRY = 3.6 / 4_000_000
"""Seconds per index entry of the scan after a loss of power, which checks and reads each entry
once; measured at 4 million entries (docs/decisions/opening.md)."""
OPEN_S = 0.22
"""Seconds to open an NVMe tier, its process included (docs/decisions/opening.md)."""
Measure = Callable[[Path, bool], float | None]
"""Function that measures the rate of creating (and, if asked, touching) memory in a folder, in
bytes per second: `memory_rate`."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Size of one block in tokens and bytes."""

    tokens: int
    """Tokens per block, `blocks_per_chunk` included."""
    bytes_per_token: int
    """Bytes of a token over all ranks, replicated data included."""
    world_size: int = 1

    @property
    def rank_bytes(self) -> int:
        """Return the bytes of a block on one worker."""
        return -(-self.tokens * self.bytes_per_token // self.world_size)


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier as configured; sizes in bytes, None if they are unknown without a model."""

    tier: str
    where: str
    capacity_bytes: int | None
    """None for a server, whose capacity is its own."""
    policy: str
    """Eviction policy; for a server, when blocks are written."""
    blocks: int | None = None
    tokens: int | None = None
    segments: int | None = None
    share: str | None = None
    """Share of the machine that a default capacity takes; None if the capacity was given."""


@dataclass(slots=True)
class CheckReport:
    """Result of checking a configuration on this machine."""

    config: str
    problems: list[str] = field(default_factory=list)
    """Errors in the configuration, each with a remedy."""
    doubts: list[str] = field(default_factory=list)
    """Warnings: settings that are valid and probably unintended."""
    tiers: list[TierReport] = field(default_factory=list)
    write_mode: str | None = None
    """Time at which blocks are written to the tier below, as chosen; None without a tier below."""
    write_mode_reason: str | None = None
    """Reason for the choice of the write mode."""
    stop_may_lose: str | None = None
    """Data that a stop without a grace period loses."""
    shutdown_timeout_s: int | None = None
    """`--shutdown-timeout` that an engine needs to write its dirty blocks at a stop; None if it
    writes none."""
    block_bytes: int | None = None
    tokens_per_block: int | None = None
    bytes_per_token: int | None = None
    model: str | None = None
    pinned_bytes: int = 0
    """Memory of the CPU tier that is locked for the device."""
    prefault_bytes_per_s: float | None = None
    """Rate at which the CPU tier's memory is created, and touched unless `prefault` is off;
    measured now with a part of it."""
    start_s: float | None = None
    """Expected seconds of a start: creating (and touching) the CPU tier's memory, and opening the
    NVMe tiers."""
    start_after_crash_s: float | None = None
    """Expected seconds of a start after a crash of the machine, with one pass over a full index."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"problem": self.problem, **asdict(self)}

    @property
    def problem(self) -> str | None:
        """Return the first problem."""
        return self.problems[0] if self.problems else None


def check(
    given: Given,
    shape: BlockShape | None,
    model: str | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
) -> CheckReport:
    """Validate a configuration and compute its effects; errors are reported in `problems`."""
    machine = Machine() if machine is None else machine
    report = CheckReport(given.source, model=model)
    report.problems, report.doubts = list(given.problems), list(given.warnings)
    if given.is_tiering:
        with noting(report.problems):
            _check_tiering(report, given.extra, machine, shape)
        return report
    if not given.extra:
        return report
    with noting(report.problems):
        workers = 1 if shape is None else shape.world_size
        settings = checked(given.extra, machine, report.problems, workers)
        if not report.problems:
            report.doubts += warnings_of(settings, machine)
            _fill(report, settings, machine, shape)
            _probe(report, settings)
            _tell_of_stops(report, settings, machine)
            _expect_start(report, settings, measure or memory_rate)
    return report


def tokens_in_config(given: Given, block_size: int) -> int:
    """Return the tokens per offloaded block, for vLLM blocks of `block_size` tokens."""
    chunk, size = given.extra.get("blocks_per_chunk"), given.extra.get("block_size")
    if isinstance(size, int) and size > 0:
        return size
    return block_size * chunk if isinstance(chunk, int) and chunk > 0 else block_size


def memory_rate(folder: Path, is_touched: bool) -> float | None:
    """Return the rate, in bytes per second, at which memory of a folder is allocated as for a CPU
    tier.

    Returns None if the folder has no room. With `is_touched`, threads also touch the memory
    (`prefault`). Raises a `KVCascadeError`.
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
        TierReport(
            "cpu",
            where,
            capacity,
            settings.cpu.policy,
            blocks,
            _tokens(blocks, shape),
            share=share_of(settings.cpu.capacity),
        )
    )
    report.tiers += [_nvme(tier, machine, report.block_bytes, shape) for tier in settings.nvme]


def _probe(report: CheckReport, settings: CascadeConfig) -> None:
    """Ask the server of the remote tier. An engine starts without it, so that is no error."""
    tier = settings.remote
    if tier is None:
        return
    report.tiers.append(TierReport(tier.type, tier.url, None, f"writes: {tier.writes}"))
    ask_server(tier, report.problems, report.doubts)


def ask_server(tier: RemoteTierOptions, problems: list[str], warnings: list[str]) -> None:
    """Ask the server of a remote tier: a fault of it is a warning, a missing secret a problem.

    It takes a few deadlines of the tier.
    """
    with noting(problems):
        said = probe_remote(tier, os.environ)
        if said is not None:
            warnings.append(said)


def probe_remote(options: RemoteTierOptions, environment: Mapping[str, str]) -> str | None:
    """Return a sentence about why the tier cannot be used as configured; None if it can.

    Blocks for a few deadlines of the tier. Raises `ConfigError` if a package or a secret is
    missing.
    """
    with without_new_folders(folder_of_url(options.url)):
        engine, _ = open_remote_engine(options, environment)
        try:
            return problem_of(engine, options)
        finally:
            engine.close()


def problem_of(engine: RemoteEngine, options: RemoteTierOptions) -> str | None:
    """Return the sentence of `finding_of`."""
    found = finding_of(engine, options)
    return None if found is None else found.text


def _tell_of_stops(report: CheckReport, settings: CascadeConfig, machine: Machine) -> None:
    chosen = writing(settings, machine)
    if chosen is None:
        return
    report.write_mode, report.write_mode_reason = str(chosen.mode), chosen.why
    report.stop_may_lose = chosen.may_lose
    report.shutdown_timeout_s = settings.shutdown_timeout_s


def _check_tiering(
    report: CheckReport, extra: Mapping[str, object], machine: Machine, shape: BlockShape | None
) -> None:
    """Check our NVMe tier and policies inside vLLM's own tiering; vLLM decides how it starts."""
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
    where, asked = ", ".join(map(str, tier.path)), path_options(tier, machine)
    capacity = asked.capacity_bytes
    if block_bytes is not None:
        plan = plan_namespace(asked, block_bytes, len(tier.path))
        segments = plan.segments
        if len(tier.path) > 1:
            segments = _held_segments(tier, machine, plan, block_bytes)
        blocks = segments * plan.slots_per_segment
    tokens = _tokens(blocks, shape)
    share = share_of(tier.capacity)
    return TierReport(tier.type, where, capacity, tier.policy, blocks, tokens, segments, share)


def _held_segments(
    tier: NvmeTierOptions, machine: Machine, plan: SegmentPlan, block_bytes: int
) -> int:
    """Return the number of segments of a plan that the disks of a tier have room for."""
    file_bytes = SegmentLayout(block_bytes, plan.slots_per_segment, "0" * 64).file_bytes
    total, each = 0, plan.segments // len(tier.path)
    for paths, held in nvme_held_bytes(tier, machine):
        numbers = map(tier.path.index, paths)
        tables = sum(fixed_bytes(plan.slots, number, tier.policy) for number in numbers)
        total += min(each * len(paths), max(0, held - tables) // file_bytes)
    return total


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
    """Print the contents of each tier, or the problems of the configuration."""
    console = show.console()
    if report.problems:
        for problem in report.problems:
            console.print(Text(problem, style="red"))
        for warning in report.doubts:
            console.print(Text(f"  {warning}", style="yellow"))
        return
    numbers = ["capacity", "blocks", "tokens", "files"]
    table = show.columns("Tiers", "tier", "where", "policy", *numbers, right=numbers)
    for tier in report.tiers:
        counts = (tier.blocks, tier.tokens, tier.segments)
        shown = [show.NOTHING if count is None else f"{count:,}" for count in counts]
        size = show.NOTHING if tier.capacity_bytes is None else show.size(tier.capacity_bytes)
        table.add_row(tier.tier, tier.where, tier.policy, size, *shown)
    console.print(table)
    rows = [(f"{tier.tier} takes", tier.share) for tier in report.tiers if tier.share is not None]
    rows.append(("pinned memory", show.size(report.pinned_bytes)))
    if report.block_bytes is not None:
        rows.insert(0, ("block", f"{report.tokens_per_block} tokens, {report.block_bytes:,} bytes"))
        rows.insert(0, ("KV per token", f"{report.bytes_per_token:,} bytes"))
    else:
        rows.insert(0, ("blocks and tokens", "give --model or --kv-bytes-per-token to see them"))
    if report.model is not None:
        rows.insert(0, ("model", report.model))
    if report.write_mode is not None:
        rows.append(("write mode", f"{report.write_mode} ({report.write_mode_reason})"))
        rows.append(("lost by a stop", f"{report.stop_may_lose}"))
        rows.append(("time to write at a stop", _time_to_stop(report.shutdown_timeout_s)))
    if report.prefault_bytes_per_s is not None:
        rate = f"{show.size(report.prefault_bytes_per_s)}/s"
        rows.append(("memory allocation", f"{rate} (measured now)"))
    if report.start_s is not None:
        rows.append(("start, about", show.duration(report.start_s)))
    if report.start_after_crash_s is not None:
        rows.append(("after a crash, at most", show.duration(report.start_after_crash_s)))
    console.print(show.facts("", rows))
    for warning in report.doubts:
        console.print(Text(f"  {warning}", style="yellow"))
    console.print(Text("  The configuration fits this machine.", style="green"))


def _time_to_stop(needed_s: int | None) -> str:
    if needed_s is None:
        return "disabled: shutdown_flush_s is 0"
    return (
        "none with vLLM's default --shutdown-timeout 0 (5 s with 0.18 and 0.19): it then kills an "
        f"engine that is asked to stop; start it with --shutdown-timeout {needed_s}"
    )
