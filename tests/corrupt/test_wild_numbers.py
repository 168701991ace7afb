"""Numbers of damaged files that no type can hold: the file is refused or ignored, by its own error.

One byte is enough. "107374182400" and "1e7374182400" differ in one, and the second is infinite.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cache_rig import call
from support.path_cache import fill_path, of_version_2

from kvcascade.config.machine import Machine
from kvcascade.errors import CorruptionError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_capacity import UNKNOWN_INDEX_BYTES, growth_bytes
from kvcascade.tiers.nvme.path.writer.path_options import (
    PATH_FILE,
    PATH_FOLDER,
    PathRecord,
    load_record,
    save_record,
)
from kvcascade.tiers.nvme.path.writer.path_plan import SMALL_FILES_BYTES
from kvcascade.tiers.nvme.path.writer_note import WRITER_FILE
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_files import load_note

FS = RealFileSystem()
DEEP = "[" * 100_000
NO_INTEGERS = ["1e7374182400", "Infinity", "NaN", "1" + "0" * 5000, DEEP]


def numbers(*found: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("number", found, ids=lambda number: str(number)[:12])


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@numbers(*NO_INTEGERS, "-1", "1" + "0" * 30)
@pytest.mark.parametrize("old", ["111222", "333444", "555666", "777888"])
def test_a_record_of_a_path_with_such_a_number_is_damaged(
    old: str, number: str, tmp_path: Path
) -> None:
    options = PathOptions(111222, write_budget_bytes=333444)
    record = PathRecord((str(tmp_path),), options, {"model": 555666}, {"model": 777888})
    save_record(FS, tmp_path, record)
    assert load_record(FS, tmp_path) == record
    replace_in(tmp_path / PATH_FOLDER / PATH_FILE, old, number)
    with pytest.raises(CorruptionError, match="path.json is damaged"):
        load_record(FS, tmp_path)


def test_a_record_of_a_path_with_a_deep_field_of_a_later_version_is_damaged(tmp_path: Path) -> None:
    save_record(FS, tmp_path, PathRecord((str(tmp_path),), PathOptions(111222)))
    later = f'"later": {DEEP}{DEEP.replace("[", "]")}, "version"'
    replace_in(tmp_path / PATH_FOLDER / PATH_FILE, '"version"', later)
    with pytest.raises(CorruptionError, match="path.json is damaged"):
        load_record(FS, tmp_path)


@numbers(*NO_INTEGERS)
def test_a_recorded_capacity_with_such_a_number_is_none(number: str, tmp_path: Path) -> None:
    save_record(FS, tmp_path, PathRecord((str(tmp_path),), PathOptions(111222)))
    assert Machine().recorded_capacity(tmp_path) == 111222
    replace_in(tmp_path / PATH_FOLDER / PATH_FILE, "111222", number)
    assert Machine().recorded_capacity(tmp_path) == 0


@numbers(*NO_INTEGERS)
def test_an_index_of_an_older_version_with_such_a_size_has_the_smallest(
    number: str, tmp_path: Path
) -> None:
    folder = of_version_2(tmp_path)
    replace_in(folder / "namespace.json", str(1 << 20), number)
    assert growth_bytes(FS, folder) == SMALL_FILES_BYTES + UNKNOWN_INDEX_BYTES


@numbers("1e20", "1e300", "-1e20", "NaN", DEEP)
def test_a_note_of_a_writer_with_such_a_time_names_nobody(number: str, tmp_path: Path) -> None:
    fill_path(tmp_path)
    note = tmp_path / PATH_FOLDER / WRITER_FILE
    assert load_note(FS, tmp_path) is not None
    since = json.loads(note.read_text())["since_s"]
    replace_in(note, str(since), number)
    assert load_note(FS, tmp_path) is None


@pytest.mark.parametrize("name", ["part", "parts"])
@numbers("1e999", "NaN", "[0]", "null", "1000000000000", "-1")
def test_a_description_with_such_a_part_is_damaged(name: str, number: str, tmp_path: Path) -> None:
    description = fill_path(tmp_path) / "namespace.json"
    replace_in(description, f'"{name}": {int(name == "parts")}', f'"{name}": {number}')
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert "namespace.json has no valid part" in answer.one["problem"]
