"""`kvcascade replay`: size the tiers with your own traffic, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.schema import WriteMode
from ...errors import ConfigError
from ..commands.command_line import CommandError, ExitCode, check_place, emit

if TYPE_CHECKING:
    from .rates import DiskRates
    from .rendering import SweepPoint
    from .tier_options import GivenTier, ReplayOptions
    from .traces import Trace

    OptionsOf = Callable[[Sequence[GivenTier]], ReplayOptions]


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """Arguments of the command."""

    trace: Path
    tiers: tuple[str, ...]
    """Tiers as `NAME=SIZE[,POLICY][,KEY=VALUE]...`, top first."""
    model: str | None = None
    kv_bytes_per_token: int | None = None
    block_tokens: float | None = None
    """Tokens per block; None to use the value of the trace."""
    prefill_tokens_per_s: float | None = None
    load_or_recompute: bool = True
    write_mode: str | None = None
    """Write mode; None to let the tiers' sizes decide, as in an engine."""
    bench: Path | None = None
    path: Path | None = None
    """Folder on a disk whose rates are measured."""
    speed_up: float = 1.0
    limit: int | None = None
    sweep: str | None = None
    policies: str | None = None
    csv: Path | None = None
    plot: Path | None = None
    as_json: bool = False


def run(call: ReplayCall) -> None:
    """Run the command. Raises a `KVCascadeError`, or `CommandError`."""
    from .tier_options import parse_tier
    from .traces import read_trace

    is_sweep = bool(call.sweep or call.policies)
    if (call.csv or call.plot) and not is_sweep:
        raise ConfigError("--csv and --plot save a sweep; add --sweep or --policies")
    check_place("--csv", call.csv)
    check_place("--plot", call.plot)
    if call.plot and find_spec("matplotlib") is None:  # fail before the runs
        said = "matplotlib is not installed; use pip install 'kvcascade[plot]'"
        raise CommandError(said, ExitCode.MISSING)
    trace = read_trace(call.trace, call.limit, call.block_tokens)
    given = [parse_tier(text) for text in call.tiers]
    options_of = _options(call, trace)
    if is_sweep:
        _sweep(call, trace, given, options_of)
        return
    from ..commands.progress import counting
    from .simulation import replay

    with counting("replay", "requests", total=len(trace.requests)) as advance:
        report = replay(trace, options_of(given), advance)
    if call.as_json:
        emit("replay", report.document())
        return
    from .rendering import print_report

    print_report(report)


def _options(call: ReplayCall, trace: Trace) -> OptionsOf:
    """Return the function from given tiers to the options of a run. A disk is measured once."""
    from .rates import with_rates
    from .tier_options import ReplayOptions

    per_token = _bytes_per_token(call)
    disk = _disk_rates(call, max(1, round(per_token * trace.block_tokens)))
    return lambda given: ReplayOptions(
        with_rates(given, disk),
        per_token,
        prefill_tokens_per_s=call.prefill_tokens_per_s,
        load_or_recompute=call.load_or_recompute,
        write_mode=_write_mode(call.write_mode, given),
        speed_up=call.speed_up,
    )


def _write_mode(name: str | None, tiers: Sequence[GivenTier]) -> WriteMode:
    from ...config.machine import write_mode_for

    if name is not None:
        if name not in {*WriteMode}:
            known = ", ".join(WriteMode)
            raise ConfigError(f"--write-mode: {name!r} is not known; use one of {known}.")
        return WriteMode(name)
    if len(tiers) == 1:
        return WriteMode.DEMOTE
    return write_mode_for(tiers[0].capacity_bytes, tiers[1].capacity_bytes)


def _bytes_per_token(call: ReplayCall) -> int:
    from ..commands.kv_bytes import kv_shape

    if call.kv_bytes_per_token is not None:
        return call.kv_bytes_per_token
    if call.model is None:
        raise ConfigError("the model is unknown; give --model or --kv-bytes-per-token")
    return kv_shape(call.model).bytes_per_token


def _disk_rates(call: ReplayCall, block_bytes: int) -> DiskRates:
    from .rates import DiskRates, measured_rates, rates_of_bench

    if call.bench:
        return rates_of_bench(call.bench, block_bytes)
    if not call.path:
        return DiskRates()
    return measured_rates(call.path, block_bytes)


def _sweep(
    call: ReplayCall, trace: Trace, given: Sequence[GivenTier], options_of: OptionsOf
) -> None:
    from .rendering import print_sweep, write_csv, write_png

    points = list(_points(call, trace, given, options_of))
    if call.csv:  # before all printing, so that an error is the only output
        write_csv(points, call.csv)
    if call.plot:
        write_png(points, call.plot)
    if call.as_json:
        emit("replay-sweep", {"points": [point.document() for point in points]})
    else:
        print_sweep(points)


def _points(
    call: ReplayCall, trace: Trace, given: Sequence[GivenTier], options_of: OptionsOf
) -> Iterator[SweepPoint]:
    from ..commands.progress import counting
    from .rendering import SweepPoint
    from .simulation import replay
    from .tier_options import check_policies, parse_sizes

    name, sizes = parse_sizes(call.sweep) if call.sweep else (given[0].name, [])
    tiers = {tier.name: tier for tier in given}
    if name not in tiers:
        raise ConfigError(f"--sweep: there is no tier {name!r}; name one of {', '.join(tiers)}.")
    policies = call.policies.split(",") if call.policies else [tiers[name].policy]
    runs = [
        replace(tiers[name], capacity_bytes=size, policy=policy)
        for policy in check_policies(policies)
        for size in sizes or [tiers[name].capacity_bytes]
    ]
    total = len(runs) * len(trace.requests)
    with counting("replay", "requests", total=total) as advance:
        for tier in runs:
            options = options_of([tier if one.name == name else one for one in given])
            report = replay(trace, options, advance)
            yield SweepPoint(tier.name, tier.capacity_bytes, tier.policy, report)
