"""`kvcascade verify`: damage is found and named, exactly it is dropped, nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from support.cache_rig import (
    Answer,
    UsageRig,
    call,
    call_outside,
    config_of,
    fill,
    fill_two,
    flip,
    payload_offset,
    record_offset,
    right_blocks,
    segment,
)
from support.clock import ManualClock
from support.nvme_rig import BLOCK, key

from kvcascade.errors import NoSpaceError
from kvcascade.tiers.nvme.disk.transfers import Throttle
from kvcascade.tiers.nvme.index.clean_close import pack_saved_slots, parse_saved_slots
from kvcascade.tiers.nvme.offline.reader import Description, IndexReader
from kvcascade.tiers.nvme.segments.format import IndexEntry
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.verify import verify_blocks as core

BLOCKS = 20


def problems(answer: Answer) -> dict[str, str]:
    """Hash to problem."""
    return {each["hash"]: each["problem"] for each in answer.one["problems"]}


def change_index(
    folder: Path, change: Callable[[lmdb.Transaction[bytes]], None], table: bytes = b"blocks"
) -> None:
    env = lmdb.open(str(folder / "index"), max_dbs=4)
    with env.begin(write=True, db=env.open_db(table)) as txn:
        change(txn)
    env.close()


def snapshot_of(folder: Path) -> dict[str, bytes]:
    """Every file but LMDB's table of readers, which a reader writes to by its nature."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if p.name != "lock.mdb"}


def test_nothing_wrong(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    before = snapshot_of(folder)
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.OK
    assert answer.one["is_clean"] and answer.one["ok"] == answer.one["blocks"] == BLOCKS
    assert answer.one["space_adds_up"] is True and answer.one["bytes_read"] == BLOCKS * BLOCK
    assert snapshot_of(folder) == before, "looking changes nothing"
    assert "no problems found" in call("verify", tmp_path).out


def test_a_flipped_payload_is_found_and_only_it_is_dropped(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    flip(segment(folder), payload_offset(3) + 17)
    before = snapshot_of(folder)
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert problems(answer) == {key(3).hex(): "corrupt"}
    assert answer.one["ok"] == BLOCKS - 1
    assert snapshot_of(folder) == before
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["dropped"] == 1
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS)) - {3}


def test_a_flipped_record_is_written_anew(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    flip(segment(folder), record_offset(5) + 40)
    answer = call("verify", tmp_path, "--repair", "--json")
    assert problems(answer) == {key(5).hex(): "record"}
    assert (answer.one["dropped"], answer.one["records_written"]) == (0, 1)
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS))


def test_a_missing_segment_costs_its_blocks(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    segment(folder, 1).unlink()
    answer = call("verify", tmp_path, "--repair", "--json")
    assert problems(answer) == {key(i).hex(): "no_segment" for i in range(8, 16)}
    assert answer.one["dropped"] == 8
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS)) - set(range(8, 16))


def test_a_damaged_header_costs_nothing(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    flip(segment(folder), 20)
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS and not problems(answer)
    assert list(answer.one["segments_damaged"].values()) == ["its header is damaged"]
    assert answer.one["segments_repaired"] == 1
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS))


def test_a_truncated_segment_keeps_what_is_before_the_cut(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    with segment(folder).open("r+b") as file:
        file.truncate(payload_offset(4))
    answer = call("verify", tmp_path, "--repair", "--json")
    found = problems(answer)
    lost = {key(i).hex(): "unreadable" for i in range(4, 8)}
    assert found == lost | {key(i).hex(): "record" for i in range(4)}
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS)) - {4, 5, 6, 7}


def test_entries_that_cannot_be(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)

    def change(txn: lmdb.Transaction[bytes]) -> None:
        txn.put(key(0), b"short")
        txn.put(key(1), txn.get(key(2), b""))  # another block's entry
        txn.put(key(900), IndexEntry(2, BLOCK, 0, 1).pack(key(900)))  # an older one on slot 2
        txn.put(key(901), IndexEntry(7000, BLOCK, 0, 1).pack(key(901)))

    change_index(folder, change)
    answer = call("verify", tmp_path, "--repair", "--json")
    assert problems(answer) == {
        key(0).hex(): "entry",
        key(1).hex(): "entry",
        key(900).hex(): "shared_slot",
        key(901).hex(): "no_segment",
    }
    assert answer.one["dropped"] == 4 and answer.one["space_adds_up"] is False
    assert call("verify", tmp_path).code == ExitCode.OK
    assert right_blocks(folder.parent) == set(range(BLOCKS)) - {0, 1}


def test_an_index_for_segments_of_no_slots_has_no_list_of_free_ones(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)

    def change(txn: lmdb.Transaction[bytes]) -> None:
        txn.put(b"identity", txn.get(b"identity", b"")[:-4] + bytes(4))

    change_index(folder, change, b"meta")
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.OK and answer.one["space_adds_up"] is None


@pytest.mark.parametrize("runs", [[[0, 2_000_000_000]], [[0, 2_000_000_000]] * 1000])
def test_free_runs_beyond_all_segments_cost_no_time(tmp_path: Path, runs: list[list[int]]) -> None:
    """Looking goes over the segments that there are, however much is said to be free."""
    folder = fill(tmp_path, BLOCKS)

    def change(txn: lmdb.Transaction[bytes]) -> None:
        saved = parse_saved_slots(txn.get(b"state0"))
        assert saved is not None
        lie = replace(saved, free=np.array(runs, dtype=np.int32))
        txn.put(b"state0", pack_saved_slots(lie))
        txn.put(b"identity", txn.get(b"identity", b"")[:-4] + (1).to_bytes(4, "little"))

    change_index(folder, change, b"meta")
    with IndexReader(folder / "index") as index:
        pieces = len(index.meta().free)
    assert 0 < pieces <= 2 * len(runs) + 4
    assert call("verify", tmp_path, "--json").one["space_adds_up"] is False


def test_a_live_cache_is_read(tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(i) for i in range(BLOCKS)])
    flip(segment(rig.tier.namespace.folders[0]), payload_offset(2))
    answer = call_outside("verify", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["is_live"]
    assert problems(answer) == {key(2).hex(): "corrupt"} and answer.one["ok"] == BLOCKS - 1
    assert not rig.check(key(2)) and rig.check(key(3))
    rig.check_sums()
    rig.close()


def test_a_wrong_limit_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    assert "--bwlimit" in call("verify", tmp_path, "--bwlimit", "fast").err


@pytest.mark.parametrize("name", [b"totals", b"taken", b"boot", b"day"])
def test_tallies_may_be_anything(tmp_path: Path, name: bytes) -> None:
    folder = fill(tmp_path, BLOCKS)

    def change(txn: lmdb.Transaction[bytes]) -> None:
        txn.put(name, b"\xff" * len(txn.get(name, bytes(8))))

    change_index(folder, change, b"meta")
    rig = UsageRig(config_of(folder.parent))
    rig.store([key(1000)])
    assert rig.check(key(1000)) and rig.check(key(0))
    rig.close()


def test_damage_inside_the_index_ends_no_command_by_a_signal(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    data = folder / "index" / "data.mdb"
    whole = data.read_bytes()
    rng = random.Random(7)
    for _ in range(6):
        broken = bytearray(whole)
        start = rng.randrange(8192, len(whole) - 64)
        broken[start : start + 64] = rng.randbytes(64)
        data.write_bytes(broken)
        answer = call("verify", tmp_path, "--json")
        assert answer.code in (ExitCode.OK, ExitCode.PROBLEMS, ExitCode.CANNOT_OPEN)


def test_a_throttle_bounds_the_rate() -> None:
    clock = ManualClock()
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.advance(seconds)

    throttle = Throttle(1000.0, clock, wait)
    for _ in range(10):
        throttle.take(500)
    assert clock() == pytest.approx(1004.5) and sum(waited) == pytest.approx(4.5)
    clock.advance(100)
    throttle.take(500)
    assert sum(waited) == pytest.approx(4.5), "time that was not used is not saved up"


def test_a_repair_that_fails_hides_nothing_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = sorted(fill_two(tmp_path, {"a": "1"}, {"a": "2"}))
    for folder in folders:
        flip(segment(folder), payload_offset(3))
    repair = core.repair

    def fails_for_one(description: Description, *more: Any) -> None:
        if description.name == folders[0].name:
            raise NoSpaceError("no space for the index")
        repair(description, *more)

    monkeypatch.setattr(core, "repair", fails_for_one)
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS
    failed, mended = answer.document["namespaces"]
    assert (failed["problem"], failed["dropped"]) == ("no space for the index", 0)
    assert [each["problem"] for each in failed["problems"]] == ["corrupt"]
    assert (mended["problem"], mended["dropped"]) == (None, 1)
    shown = call("verify", tmp_path, "--repair").out
    assert "no space for the index" in shown and "problems found" in shown
    assert call("verify", folders[0], "--repair").code == ExitCode.NO_SPACE


def test_one_unreadable_namespace_hides_nothing_of_the_others(tmp_path: Path) -> None:
    """What `--repair` changed before and after it is told, and the status is that of problems."""
    folders = sorted(fill_two(tmp_path, {"a": "1"}, {"a": "2"}))
    flip(segment(folders[1]), payload_offset(3))
    (folders[0] / "index" / "data.mdb").write_bytes(bytes(8192))
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS
    broken, mended = answer.document["namespaces"]
    assert broken["name"] == folders[0].name and not broken["is_clean"]
    assert "--rebuild-index" in broken["problem"] and not broken["problem"].startswith("[")
    assert (mended["problem"], mended["dropped"]) == (None, 1)
    shown = call("verify", tmp_path)
    assert shown.code == ExitCode.PROBLEMS
    assert "--rebuild-index" in " ".join(shown.out.split()) and "no problems found" in shown.out
    assert call("verify", tmp_path, "-n", folders[0].name).code == ExitCode.CANNOT_OPEN
