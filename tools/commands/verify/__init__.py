"""`kvcascade verify`: options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import FormatError, KVCascadeError
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

if TYPE_CHECKING:
    from ..block_scan import Throttle
    from ..path_blocks import OpenPath
    from ..path_folders import NamespaceFolder
    from .verify_report import VerifyReport

RepairOption = Annotated[
    bool,
    typer.Option("--repair", help="Drop damaged blocks, and nothing else."),
]
LimitOption = Annotated[
    str | None,
    typer.Option("--bwlimit", metavar="SIZE", help="Maximum to read per second: 200MiB, 1GB."),
]


def verify(
    path: PathArgument,
    also: AlsoOption = None,
    namespace: NamespaceOption = None,
    repair: RepairOption = False,
    bwlimit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every block against its checksum, and check the index.

    It works while engines run. Without --repair it drops no damaged block. If no process writes the
    path, opening it corrects segment files and drops blocks of missing ones; both are reported.
    A lost index is an empty cache.

    Examples:

        kvcascade verify /mnt/nvme/kv --bwlimit 500MB

        kvcascade verify /mnt/nvme/kv --repair
    """
    with answering(as_json):
        from ..block_scan import Throttle
        from ..path_blocks import open_path
        from ..path_folders import chosen_of
        from .verify_report import VerifyReport
        from .verify_view import print_verified

        throttle = Throttle(size_of("--bwlimit", bwlimit))
        reports: list[VerifyReport] = []
        with open_path(path, also) as opened:
            chosen = chosen_of(opened.folders(path), namespace)
            for one in chosen:
                try:
                    report = _verify_one(opened, one, repair, throttle, as_json)
                except KVCascadeError as error:
                    if len(chosen) == 1:
                        raise
                    report = VerifyReport(one.name, False, problem=str(error))
                reports.append(report)
                if not as_json:
                    print_verified(report)
        if as_json:
            emit("verify", {"namespaces": [each.as_json() for each in reports]})
    finish(ExitCode.OK if all(each.is_clean for each in reports) else ExitCode.PROBLEMS)


def _verify_one(
    opened: OpenPath, one: NamespaceFolder, repair: bool, throttle: Throttle, as_json: bool
) -> VerifyReport:
    from time import perf_counter

    from ..progress import progress_of
    from .verify_path import segments_damaged, verify_namespace

    if not one.is_readable:
        raise FormatError(one.reason)
    found = opened.namespace(one.name)
    began = perf_counter()
    # The first question for its facts opens a namespace that no engine has open, and corrects it.
    before = {} if opened.was_open(one.name) else segments_damaged(found)
    total = opened.facts(one.name)["blocks"]
    with progress_of(one.name, total, found.block_bytes, as_json) as advance:
        report = verify_namespace(opened, found, throttle, advance, may_repair=repair)
    report.segments_damaged = before | report.segments_damaged
    report.seconds = perf_counter() - began
    return report


def size_of(option: str, text: str | None) -> int | None:
    """Parse an option's size in bytes. Raises `CommandError`."""
    from ....config.sizes import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text).count
    except ValueError as error:
        raise CommandError(f'{option}: "{text}" {error}', ExitCode.USAGE) from None
