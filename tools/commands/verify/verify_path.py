"""`kvcascade verify`: check each payload against its checksum.

It runs beside engines. The writer names the blocks, and removes those that are damaged if nothing
has changed about them.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from ....errors import PROCESS_ERRNOS, TierIOError, os_errors
from ....tiers.nvme.disk.transfers import read_all
from ....tiers.nvme.segments.format import SegmentLayout
from ..block_scan import DAMAGED, BlockFinding, NamedBlock, Throttle, scan_blocks
from ..path_blocks import OpenPath
from ..path_files import open_read_only
from ..path_folders import NamespaceFolder
from ..progress import Advance
from .verify_report import BlockProblem, VerifyReport


def verify_namespace(
    path: OpenPath,
    namespace: NamespaceFolder,
    throttle: Throttle,
    progress: Advance,
    *,
    may_repair: bool,
) -> VerifyReport:
    """Read all blocks of a namespace; with `may_repair` remove the damaged ones.

    Raises a `KVCascadeError`.
    """
    name = namespace.name
    report = VerifyReport(name, path.is_live(name))
    facts = path.facts(name)
    slots = int(facts["slots"])
    if not path.was_open(name):
        report.dropped_at_opening = int(facts.get("dropped_at_opening", 0))
    damaged: list[NamedBlock] = []
    named = list(path.blocks(name))
    slots = max(slots, int(path.facts(name)["slots"]))  # a new writer may have more of them
    report.blocks = len(named)
    inside = [each for each in named if 0 <= each.slot < slots]
    for each in named:
        if not 0 <= each.slot < slots:
            report.problems.append(BlockProblem(each.key.hex(), each.slot, BlockFinding.ENTRY))
            damaged.append(each)
    with path.source(namespace) as source:
        for findings in scan_blocks(source, inside, throttle):
            for block, finding in findings:
                if finding in DAMAGED:
                    report.problems.append(BlockProblem(block.key.hex(), block.slot, finding))
                    damaged.append(block)
                report.changed += finding is BlockFinding.CHANGED
            report.bytes_read += len(findings) * namespace.block_bytes
            progress(len(findings))
    report.ok = report.blocks - report.changed - len(report.problems)
    report.segments_damaged = segments_damaged(namespace)
    _check_space(path, report, named)
    if may_repair and damaged:
        report.dropped = path.drop(name, damaged)
    return report


def _check_space(path: OpenPath, report: VerifyReport, named: list[NamedBlock]) -> None:
    """Check that every block has a slot of its own, and that the writer counts as many."""
    name, facts = report.name, path.facts(report.name)
    report.is_live = report.is_live or bool(facts["engines"])  # one may have come since
    if report.is_live or report.changed:
        report.space = "unknown: engines are using the namespace"
        return
    if facts["blocks"] != len(named):  # another tool, or a lack of room, may have removed some
        named = list(path.blocks(name))
        if path.facts(name)["blocks"] != facts["blocks"]:
            report.space = "unknown: blocks are being removed"
            return
    twice = sum(count - 1 for count in Counter(each.slot for each in named).values())
    report.space_adds_up = not twice and facts["blocks"] == len(named)
    report.space = (
        f"{len(named)} blocks in {facts['slots']} slots"
        if report.space_adds_up
        else f"{twice} slots are used twice; the index names {len(named)} blocks, and the presence "
        f"table {facts['blocks']}"
    )


def segments_damaged(namespace: NamespaceFolder) -> dict[str, str]:
    """Return the damaged segment files, each with the reason. Raises as `damaged_segments`."""
    files = namespace.segment_files()
    damage = damaged_segments(files, namespace.layout)
    return {str(files[number]): problem for number, problem in damage}


def damaged_segments(files: Mapping[int, Path], layout: SegmentLayout) -> Iterator[tuple[int, str]]:
    """Yield the numbers of segment files whose header or size is wrong, with the reason.

    The next writer that opens the namespace corrects them. Raises a `KVCascadeError` if this
    process lacks descriptors or memory.
    """
    for number, path in files.items():
        problem = _problem_of(path, layout.header(number), layout.file_bytes)
        if problem:
            yield number, problem


def _problem_of(path: Path, header: bytes, file_bytes: int) -> str:
    try:
        with os_errors(f"reading {path}"):
            with closing(open_read_only(path)) as file:
                found = memoryview(bytearray(len(header)))
                if file.size() < file_bytes:
                    return f"it has {file.size()} of {file_bytes} bytes"
                read_all(file, [found], 0)
    except TierIOError as error:
        if error.errno in PROCESS_ERRNOS:
            raise
        return "" if error.errno == errno.ENOENT else str(error)  # it was just deleted
    return "" if bytes(found) == header else "its header is damaged"
