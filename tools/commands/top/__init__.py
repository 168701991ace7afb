"""`kvcascade top`: options."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..command_line import (
    AlsoOption,
    CommandError,
    ExitCode,
    JsonOption,
    UrlOption,
    answering,
    emit,
    finish,
    given_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .top_frame import Reading

MAX_INTERVAL_S = 86_400.0

PathOption = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", help="The tier's path, to show the state on disk.", parser=given_path
    ),
]
IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval",
        metavar="S",
        min=0.1,
        max=MAX_INTERVAL_S,
        help="Seconds between two refreshes.",
    ),
]
OnceOption = Annotated[
    bool, typer.Option("--once", help="Print one snapshot and exit, for scripts.")
]


def top(
    path: PathOption = None,
    also: AlsoOption = None,
    url: UrlOption = None,
    interval: IntervalOption = 2.0,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running engine, or a path: hits, rates, queues, budget.

    With --once there is one picture, without rates; --json implies it.

    Examples:

        kvcascade top --url localhost:8000

        kvcascade top /mnt/nvme/kv --interval 5

        kvcascade top --url localhost:8000 --json
    """
    with answering(as_json):
        from .. import show
        from .top_frame import frame
        from .top_view import render, run

        if (path is None) == (url is None):
            raise CommandError("give a PATH or --url, one of the two", ExitCode.USAGE)
        source, read = _source(path, also, url)
        if not (as_json or once):
            run(source, read, interval)
        picture = frame(source, read())
        if as_json:
            emit("top", picture)
        else:
            show.console().print(render(picture))
    finish(ExitCode.PROBLEMS if any(tier.problem for tier in picture.tiers) else ExitCode.OK)


def _source(
    path: Path | None, also: list[Path] | None, url: str | None
) -> tuple[str, Callable[[], Reading]]:
    from .top_frame import read_url

    if url is not None:
        return url, partial(read_url, url)
    assert path is not None
    from .path_readings import PathReadings

    return str(path), PathReadings(path, also).read
