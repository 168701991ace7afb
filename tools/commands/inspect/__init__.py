"""`kvcascade inspect`: options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....errors import KVCascadeError
from ..command_line import (
    ARENA_DIR,
    AlsoOption,
    ArenaDirOption,
    CommandError,
    ExitCode,
    JsonOption,
    NamespaceOption,
    PathArgument,
    PlotOption,
    UrlOption,
    answering,
    check_place,
    emit,
    finish,
)

if TYPE_CHECKING:
    from ..path_folders import NamespaceFolder
    from .namespace_report import NamespaceReport

WhyOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--why", metavar="A B", help="Name the fingerprint fields in which two namespaces differ."
    ),
]
BlockOption = Annotated[
    str | None,
    typer.Option(
        "--block", metavar="HASH", help="One block: its hash in hexadecimal, or a unique beginning."
    ),
]


def inspect(
    path: PathArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    why: WhyOption = None,
    block: BlockOption = None,
    plot: PlotOption = None,
    url: UrlOption = None,
    arena_dir: ArenaDirOption = ARENA_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a cache, its use, and the wear of the drive.

    Works on a live cache and on a closed one, and changes no block of either.

    Examples:

        kvcascade inspect /mnt/nvme/kv

        kvcascade inspect /mnt/nvme/kv --json | jq '.namespaces[].blocks'

        kvcascade inspect /mnt/nvme/kv --why llama-3-1a2b mistral-9f

        kvcascade inspect /mnt/nvme/kv --block 5f3c

        kvcascade inspect /mnt/nvme/kv --url localhost:8000 --plot cache.png
    """
    with answering(as_json):
        if why is not None:
            code = _why(path, also, why, as_json)
        elif block is not None:
            code = _block(path, also, namespace, block, as_json)
        else:
            code = _all(path, also, namespace, plot, url, arena_dir, as_json)
    finish(code)


def _all(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    plot: Path | None,
    url: str | None,
    arena_dir: Path,
    as_json: bool,
) -> ExitCode:
    from ..path_folders import choose
    from .inspect_view import print_path, print_reports

    check_place("--plot", plot)
    chosen, reports, about = _reports(path, also, namespace, arena_dir)
    if plot is not None:
        from .inspect_plot import plot_namespace

        one = choose(chosen, None)
        plot_namespace(one, reports[0], plot)
    if url is not None:
        reports = _with_dirty_share(reports, url)
    if as_json:
        emit("inspect", {"namespaces": reports, "path": about})
    else:
        print_reports(reports)
        if about is not None:
            print_path(about)
        if plot is not None:
            print(f"Saved {plot}")
    is_bad = any(each.problem or each.segments_damaged for each in reports)
    return ExitCode.PROBLEMS if is_bad else ExitCode.OK


def _reports(
    path: Path, also: list[Path] | None, namespace: str | None, arena_dir: Path
) -> tuple[Sequence[NamespaceFolder], list[NamespaceReport], dict[str, Any] | None]:
    """Report on the chosen namespaces and the path.

    If the path cannot be opened, the reports have what the files say, and nothing is said of the
    path itself.
    """
    from ....tiers.nvme.disk.filesystem import RealFileSystem
    from ..path_blocks import open_path
    from ..path_folders import chosen_of, folders_in
    from .namespace_report import Inspector

    fs = RealFileSystem()
    chosen = chosen_of(folders_in(fs, path, also), namespace)
    problem: str | None = None
    try:
        if any(each.is_readable for each in chosen):
            with open_path(path, also) as opened:
                inspector = Inspector(fs, opened, arena_dir=arena_dir)
                reports = [inspector.report(each) for each in chosen]
                return chosen, reports, opened.about()
    except KVCascadeError as error:
        problem = str(error)
    inspector = Inspector(fs, None, problem, arena_dir=arena_dir)
    return chosen, [inspector.report(each) for each in chosen], None


def _with_dirty_share(reports: list[NamespaceReport], url: str) -> list[NamespaceReport]:
    """Add the dirty share that an engine reports to the namespace that it has open.

    That of a kept arena stays: an engine that is idle reports that of its last step.
    """
    from ..top.top_frame import read_url

    live = [each for each in reports if each.state == "live"]
    if len(live) != 1:
        remedy = "give the -n NAME that this engine has open"
        raise CommandError(f"--url: {len(live)} namespaces are live; {remedy}", ExitCode.USAGE)
    share = read_url(url).figures.get(("tier_dirty_ratio", "cpu"))
    is_asked = [each is live[0] and each.dirty_share is None for each in reports]
    return [
        replace(each, dirty_share=share) if asked else each
        for each, asked in zip(reports, is_asked, strict=True)
    ]


def _why(path: Path, also: list[Path] | None, why: tuple[str, str], as_json: bool) -> ExitCode:
    from ....tiers.nvme.disk.filesystem import RealFileSystem
    from ....tiers.nvme.namespace import differing
    from ..path_folders import choose, folders_in
    from .inspect_view import print_differences

    fs, sides = RealFileSystem(), []
    for name in why:
        is_path = os.path.isdir(name)
        found = folders_in(fs, Path(name)) if is_path else folders_in(fs, path, also)
        sides.append(choose(found, None if is_path else name))
    for side in sides:
        if side.problem:
            raise CommandError(side.problem, ExitCode.CANNOT_OPEN)
    fields = differing(sides[0].fields, sides[1].fields)
    if as_json:
        listed = [{"field": name, "a": a, "b": b} for name, (a, b) in fields.items()]
        emit("why", {"a": sides[0].name, "b": sides[1].name, "differing": listed})
    else:
        print_differences((sides[0].name, sides[1].name), fields)
    return ExitCode.PROBLEMS if fields else ExitCode.OK


def _block(
    path: Path, also: list[Path] | None, namespace: str | None, block: str, as_json: bool
) -> ExitCode:
    from ..path_blocks import open_path
    from .block_report import look, print_block

    with open_path(path, also) as opened:
        found = look(opened, opened.only(namespace, path), block)
    if as_json:
        emit("block", found)
    else:
        print_block(found)
    return ExitCode.OK if found.verdict == "ok" else ExitCode.PROBLEMS
