"""`kvcascade verify` of a path with one writer, closed and beside engines."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import Answer, call, flip
from support.keys import key
from support.path_cache import (
    BLOCK,
    HEADER,
    PER_SEGMENT,
    engine_on,
    fill_path,
    fill_two,
    folder_in,
    held_in,
    of_version_2,
    running_engine,
    segment,
)
from support.path_engine import PathEngine
from support.thread_limit import Limited

import kvcascade
from kvcascade.errors import KVCascadeError, NoSpaceError, TierIOError
from kvcascade.tiers.nvme.disk.filesystem import File, RealFile, RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles
from kvcascade.tiers.nvme.path.presence_file import map_presence
from kvcascade.tiers.nvme.path.writer.messages import held_messages
from kvcascade.tiers.nvme.path.writer.path_options import load_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.segments.format import SegmentLayout
from kvcascade.tools.commands.block_scan import (
    BlockFinding,
    NamedBlock,
    ScanSource,
    Throttle,
    scan_blocks,
)
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_blocks import OpenPath, open_path
from kvcascade.tools.commands.verify import verify_path
from kvcascade.tools.commands.verify.verify_path import damaged_segments, verify_namespace

BLOCKS = 20


def problems(answer: Answer) -> dict[str, str]:
    """Hash to problem."""
    return {each["hash"]: each["problem"] for each in answer.one["problems"]}


def damage(folder: Path, number: int) -> None:
    """Change one byte of a block."""
    with open_path(folder.parent) as path:
        (slot,) = (each.slot for each in path.blocks(folder.name) if each.key == key(number))
    segment, index = divmod(slot, PER_SEGMENT)
    flip(folder / "segments" / f"{segment:06d}.safetensors", HEADER + index * BLOCK + 17)


def test_nothing_wrong(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    before = load_record(RealFileSystem(), tmp_path)
    for path in (tmp_path, folder):
        answer = call("verify", path, "--json")
        assert answer.code == ExitCode.OK
        assert answer.one["ok"] == answer.one["blocks"] == BLOCKS
        assert answer.one["is_clean"] and answer.one["space_adds_up"] and not answer.one["is_live"]
        assert answer.one["bytes_read"] == BLOCKS * BLOCK
    assert load_record(RealFileSystem(), tmp_path) == before
    assert "no problems found" in call("verify", tmp_path).out
    assert held_in(tmp_path, range(BLOCKS)) == list(range(BLOCKS))


def test_a_flipped_payload_is_found_and_only_it_is_dropped(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    damage(folder, 3)
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS and problems(answer) == {key(3).hex(): "corrupt"}
    assert answer.one["ok"] == BLOCKS - 1 and answer.one["dropped"] == 0
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["dropped"] == 1
    assert call("verify", tmp_path).code == ExitCode.OK
    assert held_in(tmp_path, range(BLOCKS)) == [n for n in range(BLOCKS) if n != 3]


def test_beside_a_running_engine(tmp_path: Path) -> None:
    with running_engine(tmp_path, BLOCKS) as engine:
        damage(folder_in(tmp_path), 5)
        answer = call("verify", tmp_path, "--repair", "--json")
        assert answer.one["is_live"] and answer.one["dropped"] == 1
        assert problems(answer) == {key(5).hex(): "corrupt"}
        assert answer.one["space_adds_up"] is None
        assert engine.holds(range(BLOCKS)) == [n for n in range(BLOCKS) if n != 5]
        assert call("verify", tmp_path).code == ExitCode.OK


def test_an_engine_that_comes_meanwhile_makes_the_count_unknown(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    engines: list[PathEngine] = []

    def progress(blocks: int) -> None:
        if not engines:
            engines.append(engine_on(tmp_path))
            engines[0].store(range(100, 104))

    with open_path(tmp_path) as path:
        chosen, throttle = path.namespace(folder.name), Throttle(None)
        report = verify_namespace(path, chosen, throttle, progress, may_repair=False)
        engines[0].close()
    assert report.space_adds_up is None and report.is_clean and report.ok == BLOCKS


def test_blocks_that_another_tool_removes_meanwhile_are_no_problem(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    slots = 0

    def progress(blocks: int) -> None:
        nonlocal slots
        slots += blocks
        if slots >= BLOCKS:  # all are read
            path.drop(folder.name, [each for each in path.blocks(folder.name) if each.slot < 3])

    with open_path(tmp_path) as path:
        chosen, throttle = path.namespace(folder.name), Throttle(None)
        report = verify_namespace(path, chosen, throttle, progress, may_repair=False)
    assert report.is_clean and report.space_adds_up and report.ok == BLOCKS
    assert not report.changed


def writer_with(root: Path, segments: int) -> PathEngine:
    """An engine that writes a path of so many segments."""
    options = PathOptions(
        capacity_of(segments, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK
    )
    return PathEngine([root], options, is_thread=True, capacity=64).open()


def test_blocks_that_a_writer_with_more_slots_replaced_are_not_corrupt(tmp_path: Path) -> None:
    first = writer_with(tmp_path, 2)
    first.store(range(2 * PER_SEGMENT))
    with open_path(tmp_path) as path:
        namespace = path.namespace(folder_in(tmp_path).name)
        named = list(path.blocks(namespace.name))
        with path.source(namespace) as source:
            first.close()
            second = writer_with(tmp_path, 3)
            try:
                assert path.drop(namespace.name, named) == len(named)
                second.store(range(100, 100 + 3 * PER_SEGMENT))
                found = findings_of(source, named)
            finally:
                second.close()
    assert found == [BlockFinding.CHANGED] * len(named)


class Grown(OpenPath):
    """A path whose namespace has fewer slots at the first question."""

    def __init__(self, path: OpenPath) -> None:
        super().__init__(RealFileSystem(), path.session, path.roots)
        self._slots = iter([PER_SEGMENT])

    def facts(self, name: str) -> dict[str, Any]:
        """Return the facts of the namespace."""
        facts = super().facts(name)
        return facts | {"slots": next(self._slots, facts["slots"])}


def test_slots_that_a_new_writer_added_meanwhile_exist(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    with open_path(tmp_path) as path:
        chosen, grown = path.namespace(folder.name), Grown(path)
        report = verify_namespace(grown, chosen, Throttle(None), print, may_repair=True)
    assert report.is_clean and report.ok == BLOCKS and report.dropped == 0


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    engine = engine_on(tmp_path)
    try:
        flip(folder / "segments" / "000000.safetensors", 20)
        answer = call("verify", tmp_path, "--json")
        assert list(answer.one["segments_damaged"].values()) == ["its header is damaged"]
        assert answer.one["ok"] == BLOCKS
    finally:
        engine.close()


def test_a_lost_segment_costs_its_blocks(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    engine = engine_on(tmp_path)
    try:
        (folder / "segments" / "000001.safetensors").unlink()
        answer = call("verify", tmp_path, "--repair", "--json")
        assert set(problems(answer).values()) == {"no_segment"}
        assert answer.one["dropped"] == len(problems(answer)) == PER_SEGMENT
    finally:
        engine.close()


@pytest.mark.parametrize("options", [[], ["--repair"]], ids=["verify", "repair"])
def test_what_the_opening_corrects_is_a_problem(tmp_path: Path, options: list[str]) -> None:
    folder = fill_path(tmp_path, 3 * PER_SEGMENT)
    flip(segment(folder, 0), 20)
    os.truncate(segment(folder, 2), HEADER + BLOCK)
    segment(folder, 1).unlink()
    answer = call("verify", tmp_path, "--json", *options)
    assert answer.code == ExitCode.PROBLEMS and not answer.one["is_clean"]
    said = answer.one["segments_damaged"]
    assert said[str(segment(folder, 0))] == "its header is damaged"
    assert f"has {HEADER + BLOCK} of" in said[str(segment(folder, 2))] and len(said) == 2
    assert answer.one["dropped_at_opening"] == PER_SEGMENT
    assert answer.one["blocks"] == 2 * PER_SEGMENT


def test_blocks_of_missing_segments_alone_are_a_problem_once(tmp_path: Path) -> None:
    segment(fill_path(tmp_path, BLOCKS), 1).unlink()
    answer = call("verify", tmp_path)
    assert answer.code == ExitCode.PROBLEMS
    assert f"{PER_SEGMENT} blocks were removed" in answer.out
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.OK and answer.one["dropped_at_opening"] == 0


def test_blocks_that_the_writer_of_another_model_drops_for_the_command_are_a_problem(
    tmp_path: Path,
) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    segment(folder, 1).unlink()
    with kvcascade.open(tmp_path, namespace="other", block_bytes=BLOCK):
        answer = call("verify", tmp_path, "-n", folder.name, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert answer.one["dropped_at_opening"] == PER_SEGMENT


def test_blocks_that_an_engine_dropped_at_its_start_are_no_problem_any_more(tmp_path: Path) -> None:
    segment(fill_path(tmp_path, BLOCKS), 1).unlink()
    engine = engine_on(tmp_path)
    try:
        answer = call("verify", tmp_path, "--json")
        assert answer.code == ExitCode.OK and answer.one["dropped_at_opening"] == 0
    finally:
        engine.close()


def test_blocks_of_a_disk_that_is_not_mounted_are_not_removed(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    fill_path(roots, BLOCKS)
    engine = engine_on(roots)
    try:
        roots[1].rename(tmp_path / "away")
        roots[1].mkdir()
        answer = call("verify", roots[0], "-n", folder_in(roots[0]).name, "--repair")
        assert answer.code == ExitCode.CANNOT_OPEN and "mount its disk" in answer.err
        roots[1].rmdir()
        (tmp_path / "away").rename(roots[1])
        assert engine.holds(range(BLOCKS)) == [*range(BLOCKS)]
        assert call("verify", roots[0], "--json").one["ok"] == BLOCKS
    finally:
        engine.close()


def test_a_folder_in_place_of_a_segment_is_named(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    engine = engine_on(tmp_path)
    try:
        segment(folder).unlink()
        segment(folder).mkdir()
        answer = call("verify", tmp_path, "-n", folder.name)
        assert answer.code == ExitCode.CANNOT_OPEN and str(segment(folder)) in answer.err
    finally:
        engine.close()


def test_a_namespace_is_chosen(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, 1)
    assert call("verify", tmp_path, "-n", "model").code == ExitCode.OK
    answer = call("verify", tmp_path, "-n", "nothing")
    assert answer.code == ExitCode.USAGE and folder.name in answer.err


def test_what_cannot_be_read_is_reported_and_the_rest_is_verified(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    old = of_version_2(tmp_path)
    (one / "namespace.json").write_text("{")
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    found = {each["name"]: each for each in answer.document["namespaces"]}
    assert found[two.name]["ok"] == 20 and found[two.name]["problem"] is None
    assert "is damaged" in found[one.name]["problem"]
    assert "--remove-namespace" in found[old.name]["problem"]
    assert call("verify", tmp_path, "-n", old.name).code == ExitCode.CANNOT_OPEN
    for name in (old.name, one.name):
        out = tmp_path / "out.safetensors"
        assert call("export", tmp_path, out, "-n", name).code == ExitCode.CANNOT_OPEN
    assert call("export", tmp_path, tmp_path / "out.safetensors", "-n", "two").code == ExitCode.OK


def test_a_damaged_index_is_no_wrong_call(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, 1)
    (folder / "blocks" / "data.mdb").write_bytes(bytes(1 << 16))
    for command in ("verify", "export"):
        out = [tmp_path / "out.safetensors"] if command == "export" else []
        answer = call(command, tmp_path, *out)
        assert answer.code == ExitCode.CANNOT_OPEN and "index" in answer.err


def test_several_folders(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    fill_path(roots, BLOCKS)
    assert call("verify", roots[0], "--json").one["ok"] == BLOCKS
    assert call("verify", roots[0], "--also", roots[1], "--json").one["ok"] == BLOCKS


class FailingFiles(RealFileSystem):
    """Files that cannot be opened."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self._code = code

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        raise OSError(self._code, os.strerror(self._code))


def findings_of(source: ScanSource, blocks: list[NamedBlock]) -> list[BlockFinding]:
    """The result of each block."""
    return [finding for batch in scan_blocks(source, blocks) for _, finding in batch]


def failing_source(
    blocks: tuple[ScanSource, list[NamedBlock]], code: int
) -> tuple[ScanSource, list[NamedBlock]]:
    """The blocks of a source, in files that cannot be read."""
    source, named = blocks
    files = PayloadFiles(FailingFiles(code), [Path("/nowhere")], source.files.layout)
    return ScanSource(files, source.map_table), named


def test_segments_that_this_process_cannot_open_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SegmentLayout(BLOCK, PER_SEGMENT, "ab" * 32)
    deleted = {0: tmp_path / "000000.safetensors"}
    assert not list(damaged_segments(deleted, layout)), "it was just deleted"

    def fail(path: Path) -> RealFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(verify_path, "open_read_only", fail)
    with pytest.raises(KVCascadeError, match="ulimit -n"):
        list(damaged_segments(deleted, layout))


class TestScan:
    @pytest.fixture
    def blocks(self, tmp_path: Path) -> tuple[ScanSource, list[NamedBlock]]:
        folder = fill_path(tmp_path, BLOCKS)
        with open_path(tmp_path) as path:
            namespace = path.namespace(folder.name)
            named = list(path.blocks(folder.name))
            slots = path.facts(folder.name)["slots"]
        fs = RealFileSystem()
        files = PayloadFiles(fs, [folder / "segments"], namespace.layout)
        return ScanSource(files, lambda: map_presence(fs, folder, slots)), named

    def test_every_valid_payload_is_given_once(
        self, blocks: tuple[ScanSource, list[NamedBlock]]
    ) -> None:
        source, named = blocks
        seen: dict[bytes, bytes] = {}
        found = scan_blocks(source, named, None, lambda b, v: seen.update({b.key: bytes(v)}))
        assert {finding for batch in found for _, finding in batch} == {BlockFinding.OK}
        assert seen.keys() == {key(n) for n in range(BLOCKS)}

    def test_what_the_path_no_longer_has_has_changed(
        self, blocks: tuple[ScanSource, list[NamedBlock]]
    ) -> None:
        source, named = blocks
        stale = [NamedBlock(each.key, each.slot, each.checksum ^ 1) for each in named]
        moved = [NamedBlock(each.key, each.slot + 10_000, each.checksum) for each in named]
        for some in (stale, moved):
            assert findings_of(source, some) == [BlockFinding.CHANGED] * BLOCKS

    def test_nothing_is_damaged_while_a_writer_builds_the_table(
        self, blocks: tuple[ScanSource, list[NamedBlock]]
    ) -> None:
        failing, named = failing_source(blocks, errno.EIO)
        building = replace(failing, map_table=lambda: None)
        assert findings_of(building, named) == [BlockFinding.CHANGED] * BLOCKS

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN])
    def test_an_error_of_the_device_is_damage(
        self, blocks: tuple[ScanSource, list[NamedBlock]], code: int
    ) -> None:
        failing, named = failing_source(blocks, code)
        assert findings_of(failing, named) == [BlockFinding.UNREADABLE] * BLOCKS

    @pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
    def test_another_error_ends_the_scan(
        self, blocks: tuple[ScanSource, list[NamedBlock]], code: int
    ) -> None:
        failing, named = failing_source(blocks, code)
        with pytest.raises(KVCascadeError, match=f"{os.strerror(code)}.*; "):
            findings_of(failing, named)

    def test_a_lack_of_memory_is_an_error_of_ours(
        self, blocks: tuple[ScanSource, list[NamedBlock]]
    ) -> None:
        """A traceback ended `verify` with the status of damage."""
        source, named = blocks
        layout = SegmentLayout(1 << 47, PER_SEGMENT, "ab" * 32)  # no process has so many addresses
        files = PayloadFiles(RealFileSystem(), [Path("/nowhere")], layout)
        with pytest.raises(NoSpaceError, match=os.strerror(errno.ENOMEM)):
            findings_of(ScanSource(files, source.map_table), named)

    def test_a_lack_of_threads_is_an_error_of_ours(
        self, blocks: tuple[ScanSource, list[NamedBlock]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A traceback ended `verify` with the status of damage."""
        Limited(monkeypatch).left = 2
        with pytest.raises(TierIOError, match="raise the limit of processes"):
            findings_of(*blocks)

    def test_it_reads_no_faster_than_the_limit(
        self, blocks: tuple[ScanSource, list[NamedBlock]]
    ) -> None:
        source, named = blocks
        waits: list[float] = []
        throttle = Throttle(BLOCK * BLOCKS, lambda: 0.0, waits.append)
        assert sum(len(batch) for batch in scan_blocks(source, named, throttle)) == BLOCKS
        assert waits and waits == sorted(waits)


@pytest.mark.parametrize("is_older", [False, True])
def test_a_writer_without_room_is_a_lack_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    """An older writer tells the sentence alone."""
    folder = fill_path(tmp_path / "kv", BLOCKS)

    def full(file: File, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RealFile, "preallocate", full)
    if is_older:
        monkeypatch.setattr(held_messages, "refusal", lambda error: {"error": str(error)})
    answer = call("verify", folder.parent, "--json")
    expected = ExitCode.CANNOT_OPEN if is_older else ExitCode.NO_SPACE
    assert answer.code == expected and answer.document["error"] == expected.name.lower()
    assert "no space" in answer.document["message"]
