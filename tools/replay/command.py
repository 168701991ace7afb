"""`kvcascade replay TRACE`: size the tiers with your own traffic, without an engine.

    kvcascade replay trace.jsonl --model llama-3.1-8b --tier cpu=64GiB,lru --tier nvme=1TiB,lru
    kvcascade replay /var/log/kv --model llama-3.1-8b --tier cpu=64GiB --tier nvme=1TiB,lru \\
        --bench out/bench.json --prefill-tokens-per-s 9000
    kvcascade replay trace.npz --model qwen3-32b --tier cpu=64GiB \\
        --sweep cpu=16GiB,32GiB,64GiB,128GiB --policies lru,arc,s3fifo --plot curve.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, KVCascadeError
from ..commands.common import ExitCode, check_place, code_of, complain, emit, sentence

if TYPE_CHECKING:
    from rich.console import Console

    from .options import ReplayOptions, TierOptions
    from .rendering import SweepPoint
    from .traces import Trace

DEFAULT_BENCH_HELP = "speeds of the lower tiers as `kvcascade bench` measured them (bench.json)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    add = parser.add_argument
    add("trace", type=Path, help="Mooncake JSON lines, an .npz trace, or a folder of recordings")
    add("--tier", action="append", required=True, metavar="NAME=SIZE[,POLICY][,read=BYTES]"
        "[,write=BYTES][,latency=SECONDS]", help="a tier, top first; rates are bytes per second, "
        "without them transfers take no time")  # fmt: skip
    add("--model", help="a model known by name, for the bytes of KV cache per token")
    add("--kv-bytes-per-token", type=_positive_int, metavar="N", help="instead of --model")
    add("--block-tokens", type=_positive, metavar="N", help="instead of what the trace says")
    add("--prefill-tokens-per-s", type=_positive, metavar="N", help="of your engine; without it "
        "nothing is said about TTFT, and everything found is loaded")  # fmt: skip
    add("--no-load-or-recompute", action="store_true", help="load even where computing is faster")
    add("--bench", type=Path, metavar="FILE", help=DEFAULT_BENCH_HELP)
    add("--speed-up", type=_positive, default=1.0, metavar="N", help="replay faster than recorded")
    add("--limit", type=_positive_int, metavar="N", help="only the first N requests")
    add("--sweep", metavar="NAME=SIZE,SIZE,...", help="a run for each size of a tier")
    add("--policies", metavar="NAME,NAME,...", help="and for each policy of that tier")
    add("--csv", type=Path, metavar="FILE", help="save the sweep")
    add("--plot", type=Path, metavar="PNG", help="draw the sweep (needs kvcascade[plot])")
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        return _run(arguments)
    except KVCascadeError as error:
        return complain(sentence(error), code_of(error), arguments.json, "replay")
    except ModuleNotFoundError as error:
        said = f"{error.name} is not installed; use pip install 'kvcascade[plot]'"
        return complain(said, ExitCode.MISSING, arguments.json, "replay")


def _run(arguments: argparse.Namespace) -> int:
    from .traces import read_trace

    is_sweep = bool(arguments.sweep or arguments.policies)
    if (arguments.csv or arguments.plot) and not is_sweep:
        raise ConfigError("--csv and --plot save a sweep; add --sweep or --policies")
    check_place("--csv", arguments.csv)
    check_place("--plot", arguments.plot)
    if arguments.plot:
        import_module("matplotlib")  # said now rather than after every run
    trace = read_trace(arguments.trace, arguments.limit, arguments.block_tokens)
    options = _options(arguments, trace)
    if is_sweep:
        return _sweep(arguments, trace, options)
    from .simulation import replay

    with progress_bar(len(trace.requests)) as advance:
        report = replay(trace, options, advance)
    if arguments.json:
        emit("replay", report.document())
        return 0
    from ..cache import show
    from .rendering import print_report

    print_report(report, show.console())
    return 0


def _options(arguments: argparse.Namespace, trace: Trace) -> ReplayOptions:
    from .models import kv_bytes_per_token
    from .options import ReplayOptions, parse_tier, with_bench

    if arguments.kv_bytes_per_token:
        per_token = arguments.kv_bytes_per_token
    else:
        per_token = kv_bytes_per_token(arguments.model or "")
    tiers = [parse_tier(text) for text in arguments.tier]
    if arguments.bench:
        tiers = with_bench(tiers, arguments.bench, max(1, round(per_token * trace.block_tokens)))
    return ReplayOptions(
        tuple(tiers),
        per_token,
        prefill_tokens_per_s=arguments.prefill_tokens_per_s,
        load_or_recompute=not arguments.no_load_or_recompute,
        speed_up=arguments.speed_up,
    )


def _sweep(arguments: argparse.Namespace, trace: Trace, options: ReplayOptions) -> int:
    points = list(_points(arguments, trace, options))
    _save(points, arguments.csv, arguments.plot)
    if arguments.json:
        emit("replay-sweep", {"points": [point.document() for point in points]})
        return 0
    from ..cache import show
    from .rendering import print_sweep

    print_sweep(points, show.console())
    return 0


def _save(points: Sequence[SweepPoint], csv: Path | None, png: Path | None) -> None:
    """Files come before anything is printed: what fails here is then all that is said."""
    from .rendering import write_csv, write_png

    if csv:
        write_csv(points, csv)
    if png:
        write_png(points, png)


def _points(
    arguments: argparse.Namespace, trace: Trace, options: ReplayOptions
) -> Iterator[SweepPoint]:
    from .options import check_policies, parse_sizes
    from .rendering import SweepPoint
    from .simulation import replay

    first = options.tiers[0]
    name, sizes = parse_sizes(arguments.sweep) if arguments.sweep else (first.name, [])
    tiers = {tier.name: tier for tier in options.tiers}
    if name not in tiers:
        raise ConfigError(f"--sweep: there is no tier {name!r}; name one of {', '.join(tiers)}.")
    policies = arguments.policies.split(",") if arguments.policies else [tiers[name].policy]
    runs = [
        replace(tiers[name], capacity_bytes=size, policy=policy)
        for policy in check_policies(policies)
        for size in sizes or [tiers[name].capacity_bytes]
    ]
    with progress_bar(len(runs) * len(trace.requests)) as advance:
        for tier in runs:
            report = replay(trace, replace(options, tiers=_with(options.tiers, tier)), advance)
            yield SweepPoint(tier.name, tier.capacity_bytes, tier.policy, report)


def _with(tiers: Sequence[TierOptions], tier: TierOptions) -> tuple[TierOptions, ...]:
    return tuple(tier if one.name == tier.name else one for one in tiers)


@contextmanager
def progress_bar(total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A bar, where the console (standard error unless told) is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = console or Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda requests: bar.advance(task, requests)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("give a number above 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give a whole number from 1 up")
    return value
