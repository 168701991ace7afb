"""`kvcascade export` and `kvcascade import`: options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    AlsoOption,
    CommandError,
    ExitCode,
    JsonOption,
    NamespaceOption,
    PathArgument,
    answering,
    emit,
    finish,
)
from .verify import LimitOption, size_of

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.", dir_okay=False)
]
InArgument = Annotated[
    Path, typer.Argument(metavar="IN.safetensors", help="A file of `kvcascade export`.")
]
PrefixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prefix", metavar="HEX", help="Blocks whose hash begins with these digits (repeatable)."
    ),
]
HashesOption = Annotated[
    Path | None,
    typer.Option("--hashes", metavar="FILE", help="Blocks listed in a file, one hash per line."),
]
HotOption = Annotated[
    str | None,
    typer.Option("--hot", metavar="SIZE", help="The most recently used blocks, so much at most."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
CreateOption = Annotated[
    bool, typer.Option("--create", help="Make the namespace if no engine has made it yet.")
]


def export(
    path: PathArgument,
    out: OutArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    prefix: PrefixOption = None,
    hashes: HashesOption = None,
    hot: HotOption = None,
    force: ForceOption = False,
    bwlimit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write blocks of a cache to one portable safetensors file.

    Works on a live cache and on a closed one. Every block is verified on its way.

    Examples:

        kvcascade export /mnt/nvme/kv warm.safetensors --hot 10GiB

        kvcascade export /mnt/nvme/kv -n llama all.safetensors --bwlimit 500MB
    """
    with answering(as_json):
        prefixes = [*(prefix or ()), *(_lines(hashes) if hashes else ())]
        code = _export(path, also, namespace, out, prefixes, hot, force, bwlimit, as_json)
    finish(code)


def import_(
    path: PathArgument,
    file: InArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    create: CreateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring the blocks of an export file into the cache they belong to.

    Refused if any field of the fingerprint differs. Blocks that are there already stay as they
    are, and none leaves to make room.

    Examples:

        kvcascade import /mnt/nvme/kv warm.safetensors

        kvcascade import /mnt/nvme/kv warm.safetensors --create
    """
    with answering(as_json):
        code = _import(path, also, namespace, file, create, as_json)
    finish(code)


def _export(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    out: Path,
    prefixes: list[str],
    hot: str | None,
    force: bool,
    bwlimit: str | None,
    as_json: bool,
) -> ExitCode:
    from ...sizes import human
    from ...tiers.nvme.scan import Throttle
    from ..cache import export as core
    from ..cache.opened import choose, locations, opened, parse_hash
    from ..cache.verify_view import progress_of

    choice = core.Choice(tuple(map(parse_hash, prefixes)), size_of("--hot", hot))
    throttle = Throttle(size_of("--bwlimit", bwlimit))
    with opened(choose(locations(path, also), namespace)) as cache:
        block_bytes = cache.description.block_bytes
        with progress_of("export", None, block_bytes, as_json) as advance:
            report = core.export(
                cache, choice, out, may_replace=force, throttle=throttle, progress=advance
            )
    if as_json:
        emit("export", report.as_json())
    else:
        skipped = f", {report.skipped} skipped (damaged, or gone meanwhile)"
        print(
            f"{report.blocks} blocks of {report.namespace} in {out} ({human(report.file_bytes)})"
            f"{skipped if report.skipped else ''}"
        )
    return ExitCode.PROBLEMS if report.skipped else ExitCode.OK


def _import(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    file: Path,
    create: bool,
    as_json: bool,
) -> ExitCode:
    from ..cache import import_ as core
    from ..cache.carried import CarriedReader
    from ..cache.verify_view import progress_of

    with CarriedReader(file) as carried:
        head = carried.head
        with progress_of("import", head.blocks, head.block_bytes, as_json) as advance:
            try:
                report = core.import_file(
                    [path, *(also or ())], namespace, carried, may_create=create, progress=advance
                )
            except core.DifferentNamespaceError as error:
                raise CommandError(str(error), ExitCode.DIFFERENT) from None
    if as_json:
        emit("import", report.as_json())
    else:
        print(
            f"{report.imported} of {report.blocks} blocks imported into {report.namespace}, "
            f"{report.already_there} were there, {report.damaged} damaged, {report.failed} failed"
        )
    if report.failed:
        return ExitCode.NO_SPACE
    return ExitCode.PROBLEMS if report.damaged else ExitCode.OK


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("ascii").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--hashes: {path} cannot be read ({error})", ExitCode.USAGE) from None
