"""`kvcascade replay`: options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..commands.command_line import JsonOption, answering

_MODES = ("demote", "back", "through")


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter("give a number above 0")
    return value


TraceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Mooncake JSON lines, an .npz trace, or a folder of recordings.",
        readable=False,
    ),
]
TierOption = Annotated[
    list[str],
    typer.Option(
        "--tier",
        metavar="NAME=SIZE[,POLICY][,KEY=VALUE]",
        help="A tier, top first (repeatable). Keys: read and write (bytes per second), latency "
        "(seconds a batch), admission and write_budget as in the configuration; one DWPD is SIZE.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A config.json, its folder, a hub name in the local cache, or a known name.",
    ),
]
BytesOption = Annotated[
    int | None,
    typer.Option("--kv-bytes-per-token", metavar="N", min=1, help="Instead of --model."),
]
BlockOption = Annotated[
    float | None,
    typer.Option(
        "--block-tokens", metavar="N", callback=_positive, help="Instead of the trace's value."
    ),
]
PrefillOption = Annotated[
    float | None,
    typer.Option(
        "--prefill-tokens-per-s",
        metavar="N",
        callback=_positive,
        help="Speed of your engine. Without it, TTFT is unknown, and all hits are loaded.",
    ),
]
NoChoiceOption = Annotated[
    bool, typer.Option("--no-load-or-recompute", help="Load even if computing is faster.")
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--write-mode",
        metavar="MODE",
        autocompletion=lambda: list(_MODES),
        help=f"{', '.join(_MODES)}; by default the tiers' sizes decide, as in an engine.",
    ),
]
BenchOption = Annotated[
    Path | None,
    typer.Option(
        "--bench",
        metavar="FILE",
        help="Rates of the lower tiers, from `kvcascade bench`.",
        readable=False,
    ),
]
PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path",
        metavar="FOLDER",
        help="Measure the disk of this folder for the lower tiers.",
        readable=False,
    ),
]
SpeedOption = Annotated[
    float,
    typer.Option(
        "--speed-up", metavar="N", callback=_positive, help="Replay faster than recorded."
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N requests.")
]
SweepOption = Annotated[
    str | None,
    typer.Option("--sweep", metavar="NAME=SIZE,SIZE", help="A run for each size of a tier."),
]
PoliciesOption = Annotated[
    str | None,
    typer.Option(
        "--policies", metavar="NAME,NAME", help="Also a run for each policy of that tier."
    ),
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Save the sweep as CSV.", readable=False),
]
SweepPlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="PNG", help="Draw the sweep (needs kvcascade[plot]).", readable=False
    ),
]


def replay(
    trace: TraceArgument,
    tier: TierOption,
    model: ModelOption = None,
    kv_bytes_per_token: BytesOption = None,
    block_tokens: BlockOption = None,
    prefill_tokens_per_s: PrefillOption = None,
    no_load_or_recompute: NoChoiceOption = False,
    write_mode: ModeOption = None,
    bench: BenchOption = None,
    path: PathOption = None,
    speed_up: SpeedOption = 1.0,
    limit: LimitOption = None,
    sweep: SweepOption = None,
    policies: PoliciesOption = None,
    csv: CsvOption = None,
    plot: SweepPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace: hits, wear and TTFT by size and policy.

    Requests run through the real manager. Rates of a tier come from --tier, else --bench, else a
    measurement on --path, else assumptions.

    Examples:

        kvcascade replay trace.jsonl --model llama-3.1-8b --tier cpu=64GiB

        kvcascade replay kv --model . --tier cpu=64GiB --tier nvme=1TiB,arc

        kvcascade replay t.npz --model . --tier cpu=1GiB --sweep cpu=8GiB,64GiB
    """
    with answering(as_json):
        from .replay_command import ReplayCall, run

        run(
            ReplayCall(
                trace,
                tuple(tier),
                model=model,
                kv_bytes_per_token=kv_bytes_per_token,
                block_tokens=block_tokens,
                prefill_tokens_per_s=prefill_tokens_per_s,
                load_or_recompute=not no_load_or_recompute,
                write_mode=write_mode,
                bench=bench,
                path=path,
                speed_up=speed_up,
                limit=limit,
                sweep=sweep,
                policies=policies,
                csv=csv,
                plot=plot,
                as_json=as_json,
            )
        )
