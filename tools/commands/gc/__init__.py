"""`kvcascade gc`: options."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import KVCascadeError
from ..command_line import (
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
from ..verify import size_of

if TYPE_CHECKING:
    from .collect import Wish

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d|w)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}

OlderOption = Annotated[
    str | None,
    typer.Option(
        "--older-than", metavar="AGE", help="Blocks that were not used for this time: 12h, 7d, 2w."
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="HASH",
        help="A block, and all its successors in any prompt.",
    ),
]
HashOption = Annotated[
    str | None,
    typer.Option("--hash", metavar="HEX", help="Blocks whose hash begins with these digits."),
]
MaxOption = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        help="Remove the coldest segment files until the total is at most this size: 500GiB.",
    ),
]
WholeOption = Annotated[
    bool,
    typer.Option(
        "--remove-namespace",
        help="Remove the namespace; -n needs its full name, or 12 digits of its fingerprint.",
    ),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only report what would be removed.")]


def gc(
    path: PathArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    older_than: OlderOption = None,
    prefix: PrefixOption = None,
    hash_: HashOption = None,
    max_size: MaxOption = None,
    remove_namespace: WholeOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks, files, or whole namespaces.

    With several of --older-than, --prefix and --hash, a block is removed if it meets all of them.
    A segment file that becomes empty is deleted. All but --remove-namespace works while engines
    run; that skips a namespace that an engine has open.

    Examples:

        kvcascade gc /mnt/nvme/kv --older-than 30d --dry-run

        kvcascade gc /mnt/nvme/kv -n llama --prefix 5f3c9a17

        kvcascade gc /mnt/nvme/kv --max-size 1TiB

        kvcascade gc /mnt/nvme/kv -n old-model-1a2b3c4d5e6f --remove-namespace
    """
    with answering(as_json):
        by_block = older_than or prefix or hash_
        if not (by_block or max_size or remove_namespace):
            remedy = "give --older-than, --prefix, --hash, --max-size or --remove-namespace"
            raise CommandError(f"no blocks are selected; {remedy}", ExitCode.USAGE)
        if remove_namespace and (namespace is None or by_block or max_size):
            remedy = "it goes with -n NAME, and with nothing else"
            raise CommandError(f"--remove-namespace: {remedy}", ExitCode.USAGE)
        wish = _wish(older_than, prefix, hash_, max_size, remove_namespace)
        code = _run(path, also, namespace, wish, dry_run, as_json)
    finish(code)


def _wish(
    older_than: str | None, prefix: str | None, hash_: str | None, max_size: str | None, whole: bool
) -> Wish:
    from ..path_folders import parse_hash
    from .collect import Wish

    if prefix is not None:
        parse_hash(prefix)  # fail before any namespace is opened
    return Wish(
        older_than_s=None if older_than is None else seconds_of("--older-than", older_than),
        hash_start=b"" if hash_ is None else parse_hash(hash_),
        prompt="" if prefix is None else prefix,
        max_bytes=size_of("--max-size", max_size),
        whole=whole,
    )


def _run(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    wish: Wish,
    dry_run: bool,
    as_json: bool,
) -> ExitCode:
    from ....tiers.nvme.disk.filesystem import RealFileSystem
    from ..path_blocks import open_path
    from ..path_folders import choose_for_good, chosen_of, folders_in
    from .collect import Collector, print_collected

    fs = RealFileSystem()
    found = folders_in(fs, path, also)
    chosen = (
        [choose_for_good(found, namespace)]
        if wish.whole and namespace is not None
        else chosen_of(found, namespace)
    )
    with ExitStack() as open_until_end:
        opened, problem = None, ""
        if any(each.is_readable for each in chosen):
            try:
                opened = open_until_end.enter_context(open_path(path, also))
            except KVCascadeError as error:
                if not wish.whole:
                    raise
                problem = str(error)
        collector = Collector(fs, opened, wish, problem=problem)
        reports = collector.collect(chosen, dry_run)
    if as_json:
        emit("gc", {"is_dry_run": dry_run, "namespaces": reports})
    else:
        print_collected(reports, dry_run)
    if wish.whole and any(report.skipped for report in reports):
        return ExitCode.CANNOT_OPEN if collector.has_fault else ExitCode.IN_USE
    return ExitCode.PROBLEMS if any(report.is_incomplete for report in reports) else ExitCode.OK


def seconds_of(option: str, text: str) -> float:
    """Parse an option's age in seconds. Raises `CommandError`."""
    match = _AGE.fullmatch(text)
    if not match:
        raise CommandError(
            f'{option}: "{text}" is not an age; write it as 90s, 30min, 12h, 7d or 2w',
            ExitCode.USAGE,
        )
    return float(match[1]) * _UNITS[match[2]]
