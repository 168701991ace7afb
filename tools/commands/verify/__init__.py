"""`kvcascade verify`: options."""

from __future__ import annotations

from pathlib import Path
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
    sentence,
)

if TYPE_CHECKING:
    from ....tiers.nvme.disk.transfers import Throttle
    from ....tiers.nvme.offline.reader import Location
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
    """Check every block against its checksum, and the index against the files.

    Without --repair it only reads. It works while engines run; the writer of the path then repairs
    files itself. A lost index is an empty cache.

    Examples:

        kvcascade verify /mnt/nvme/kv --bwlimit 500MB

        kvcascade verify /mnt/nvme/kv --repair
    """
    with answering(as_json):
        code = _run(path, also, namespace, repair, bwlimit, as_json)
    finish(code)


def _run(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    repair: bool,
    bwlimit: str | None,
    as_json: bool,
) -> ExitCode:
    from ....tiers.nvme.disk.transfers import Throttle
    from ..cache_access import chosen_of, locations
    from ..path_blocks import has_one_writer

    rate = size_of("--bwlimit", bwlimit)
    throttle = Throttle(rate)
    if has_one_writer(path):
        return _run_path(path, also, namespace, repair, throttle, as_json)
    found = locations(path, also)
    chosen = chosen_of(found, namespace)
    reports = [
        _verify_one(each, repair, throttle, as_json, is_alone=len(chosen) == 1) for each in chosen
    ]
    if as_json:
        emit("verify", {"namespaces": [each.as_json() for each in reports]})
    return ExitCode.OK if all(each.is_clean for each in reports) else ExitCode.PROBLEMS


def _run_path(
    path: Path,
    also: list[Path] | None,
    namespace: str | None,
    repair: bool,
    throttle: Throttle,
    as_json: bool,
) -> ExitCode:
    """Verify namespaces of a path with one writer."""
    from ..path_blocks import open_path
    from ..path_folders import chosen_of
    from .verify_report import VerifyReport
    from .verify_view import print_verified

    reports: list[VerifyReport] = []
    with open_path(path, also) as opened:
        chosen = chosen_of(opened.folders(path), namespace)
        for one in chosen:
            try:
                report = _verify_in_path(opened, one, repair, throttle, as_json)
            except KVCascadeError as error:
                if len(chosen) == 1:
                    raise
                report = VerifyReport(one.name, False, problem=sentence(error))
            reports.append(report)
            if not as_json:
                print_verified(report)
    if as_json:
        emit("verify", {"namespaces": [each.as_json() for each in reports]})
    return ExitCode.OK if all(each.is_clean for each in reports) else ExitCode.PROBLEMS


def _verify_in_path(
    opened: OpenPath, one: NamespaceFolder, repair: bool, throttle: Throttle, as_json: bool
) -> VerifyReport:
    from time import perf_counter

    from .verify_path import verify_namespace
    from .verify_view import progress_of

    if not one.is_readable:
        raise FormatError(one.reason)
    found = opened.namespace(one.name)
    began = perf_counter()
    total = opened.facts(one.name)["blocks"]
    with progress_of(one.name, total, found.block_bytes, as_json) as advance:
        report = verify_namespace(opened, found, throttle, advance, may_repair=repair)
    report.seconds = perf_counter() - began
    return report


def _verify_one(
    location: Location, repair: bool, throttle: Throttle, as_json: bool, is_alone: bool
) -> VerifyReport:
    """Verify a namespace; if it is unreadable, report that, or raise if it `is_alone`.

    The results for the other namespaces, and their repairs, are kept.
    """
    from ....tiers.nvme.offline.presence import owners
    from .verify_report import VerifyReport
    from .verify_view import print_verified

    try:
        report = _looked_at(location, repair, throttle, as_json, is_alone)
    except KVCascadeError as error:
        if is_alone:
            raise
        is_live = bool(owners(location.folders))
        report = VerifyReport(location.name, is_live, problem=sentence(error))
    if not as_json:
        print_verified(report)
    return report


def _looked_at(
    location: Location, repair: bool, throttle: Throttle, as_json: bool, is_alone: bool
) -> VerifyReport:
    from time import perf_counter

    from ..cache_access import opened
    from . import verify_blocks as core
    from .verify_view import progress_of

    with opened(location) as cache:
        began = perf_counter()
        total = cache.index.meta().entries
        with progress_of(location.name, total, cache.description.block_bytes, as_json) as advance:
            report, drops, records = core.verify(cache, throttle, advance)
        report.seconds = perf_counter() - began
        description = cache.description
    if repair:
        try:
            core.repair(description, report, drops, records)
        except KVCascadeError as error:
            if is_alone:
                raise
            report.problem = sentence(error)
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
