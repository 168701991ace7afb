"""`kvcascade export` and `kvcascade import`: options."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ..command_line import (
    AlsoOption,
    CommandError,
    ExitCode,
    JsonOption,
    NamespaceOption,
    PathArgument,
    answering,
    check_is_file,
    emit,
    finish,
)
from ..verify import LimitOption, size_of

STANDARD_OUTPUT = Path("-")

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.", readable=False)
]
InArgument = Annotated[
    Path,
    typer.Argument(metavar="IN.safetensors", help="A file of `kvcascade export`.", readable=False),
]
PrefixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prefix",
        metavar="HASH",
        help="Hash of a prompt's last block; adds it and all blocks before it (repeatable).",
    ),
]
HashOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hash", metavar="HEX", help="Blocks whose hash begins with these digits (repeatable)."
    ),
]
HashesOption = Annotated[
    Path | None,
    typer.Option(
        "--hashes",
        metavar="FILE",
        help="Blocks listed in a file, one hash per line.",
        readable=False,
    ),
]
HotOption = Annotated[
    str | None,
    typer.Option("--hot", metavar="SIZE", help="The most recently used blocks, up to this size."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
MakeRoomOption = Annotated[
    bool,
    typer.Option(
        "--make-room",
        help="Evict the coldest blocks if there is no room.",
    ),
]
CreateOption = Annotated[
    bool, typer.Option("--create", help="Create the namespace if it does not exist.")
]


def export(
    path: PathArgument,
    out: OutArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    prefix: PrefixOption = None,
    hash_: HashOption = None,
    hashes: HashesOption = None,
    hot: HotOption = None,
    force: ForceOption = False,
    bwlimit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write blocks of a cache to one portable safetensors file.

    Works on a live cache and on a closed one. Every block is verified.

    Examples:

        kvcascade export /mnt/nvme/kv warm.safetensors --hot 10GiB

        kvcascade export /mnt/nvme/kv -n llama all.safetensors --bwlimit 500MB

        kvcascade export /mnt/nvme/kv prompt.safetensors --prefix 5f3c9a17
    """
    with answering(as_json):
        from ....config.sizes import human
        from ..block_scan import Throttle
        from ..path_blocks import open_path
        from ..path_folders import parse_hash
        from ..progress import progress_of
        from .export_path import export_namespace
        from .export_writer import Choice

        if out == STANDARD_OUTPUT:
            raise CommandError("OUT: give the name of a file, not -", ExitCode.USAGE)
        if hashes is not None:
            check_is_file("--hashes", hashes)
        starts = map(parse_hash, [*(hash_ or ()), *(_lines(hashes) if hashes else ())])
        choice = Choice(tuple(prefix or ()), tuple(starts), size_of("--hot", hot))
        throttle = Throttle(size_of("--bwlimit", bwlimit))
        with open_path(path, also) as opened:
            found = opened.namespace(opened.only(namespace, path))
            with progress_of("export", None, found.block_bytes, as_json) as advance:
                report = export_namespace(
                    opened,
                    found,
                    choice,
                    out,
                    may_replace=force,
                    throttle=throttle,
                    progress=advance,
                )
        if as_json:
            emit("export", report)
        else:
            skipped = f", {report.skipped} skipped (damaged, or removed meanwhile)"
            missing = f", {report.missing} that were asked for are not stored"
            print(
                f"{report.blocks} blocks of {report.namespace} in {out} "
                f"({human(report.file_bytes)})"
                f"{skipped if report.skipped else ''}{missing if report.missing else ''}"
            )
    finish(ExitCode.PROBLEMS if report.skipped or report.missing else ExitCode.OK)


def import_(
    path: PathArgument,
    file: InArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    create: CreateOption = False,
    make_room: MakeRoomOption = False,
    as_json: JsonOption = False,
) -> None:
    """Import the blocks of an export file into their namespace.

    Works on a live cache and on a closed one: a running engine finds new blocks at once. The import
    is refused if any field of the fingerprint differs. Existing blocks stay unchanged, and none is
    evicted unless --make-room is given.

    Examples:

        kvcascade import /mnt/nvme/kv warm.safetensors

        kvcascade import /mnt/nvme/kv warm.safetensors --make-room

        kvcascade import /mnt/nvme/kv warm.safetensors --create
    """
    with answering(as_json):
        from ..progress import progress_of
        from .carried import CarriedReader
        from .import_path import import_into_path
        from .import_report import DifferentNamespaceError

        check_is_file("IN", file)
        with closing(CarriedReader(file)) as carried:
            head = carried.head
            with progress_of("import", head.blocks, head.block_bytes, as_json) as advance:
                try:
                    report = import_into_path(
                        [path, *(also or ())],
                        namespace,
                        carried,
                        may_create=create,
                        may_evict=make_room,
                        progress=advance,
                    )
                except DifferentNamespaceError as error:
                    raise CommandError(str(error), ExitCode.DIFFERENT) from None
        if as_json:
            emit("import", report)
        else:
            print(
                f"{report.imported} of {report.blocks} blocks imported into {report.namespace}, "
                f"{report.already_there} were present, {report.damaged} damaged, "
                f"{report.failed} failed"
            )
            if report.reason is not None:
                left_out = f"kvcascade: {report.failed} blocks were not imported"
                print(f"{left_out}: {report.reason}", file=sys.stderr)
    if report.was_given_up:
        finish(ExitCode.CANNOT_OPEN)
    if report.failed:
        finish(ExitCode.NO_SPACE)
    finish(ExitCode.PROBLEMS if report.damaged else ExitCode.OK)


def _lines(path: Path) -> list[str]:
    try:
        found = [line.strip() for line in path.read_text("ascii").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--hashes: {path} cannot be read ({error})", ExitCode.USAGE) from None
    if not found:
        raise CommandError(f"--hashes: {path} lists no hash; write one per line", ExitCode.USAGE)
    return found
