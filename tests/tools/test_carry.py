"""`kvcascade export` and `import`: what comes out is bit for bit what went in, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.cache_rig import (
    UsageRig,
    call,
    call_outside,
    config_of,
    fill,
    flip,
    payload_offset,
    segment,
)
from support.nvme_rig import BLOCK, content, key

from kvcascade.tiers.nvme.format import block_checksum, parse_record
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tools.commands.common import ExitCode

BLOCKS = 20
HEADER = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An export of a cache of 20 blocks in `tmp_path / "from"`."""
    fill(tmp_path / "from", BLOCKS)
    path = tmp_path / "warm.safetensors"
    answer = call("export", tmp_path / "from", path, "--json")
    assert answer.code == ExitCode.OK and answer.document["blocks"] == BLOCKS
    return path


def right_blocks(root: Path, namespace: NamespaceKey | None = None) -> set[int]:
    """Which blocks an engine finds, each of them right."""
    rig = UsageRig(config_of(root, namespace))
    found = {i for i in range(BLOCKS) if rig.check(key(i))}
    rig.check_sums()
    rig.close()
    return found


def test_the_file_is_plain_safetensors(file: Path) -> None:
    with safe_open(str(file), "np") as opened:
        metadata, blocks = opened.metadata(), opened.get_tensor("blocks")
        records = [parse_record(row.tobytes()) for row in opened.get_tensor("slots")]
    assert metadata["format"] == "kvcascade-export"
    assert json.loads(metadata["fields"]) == {"model": "some/model", "dtype": "float16"}
    assert blocks.shape == (BLOCKS, BLOCK) and blocks.dtype == np.uint8
    for record, payload in zip(records, blocks, strict=True):
        assert record is not None
        assert record.checksum == block_checksum(record.key, memoryview(payload.tobytes()))
        assert payload.tobytes() == content(key(int.from_bytes(record.key[:4], "big")))


def test_round_trip_is_exact(file: Path, tmp_path: Path) -> None:
    fill(tmp_path / "to", 0)
    answer = call("import", tmp_path / "to", file, "--json")
    assert answer.code == ExitCode.OK and answer.document["imported"] == BLOCKS
    again = tmp_path / "again.safetensors"
    call("export", tmp_path / "to", again)
    with safe_open(str(file), "np") as one, safe_open(str(again), "np") as two:
        assert np.array_equal(one.get_tensor("blocks"), two.get_tensor("blocks"))
    assert right_blocks(tmp_path / "to") == set(range(BLOCKS))


def test_blocks_that_are_there_stay(file: Path, tmp_path: Path) -> None:
    fill(tmp_path / "to", 5)
    found = call("import", tmp_path / "to", file, "--json").document
    assert (found["imported"], found["already_there"]) == (BLOCKS - 5, 5)
    found = call("import", tmp_path / "to", file, "--json").document
    assert (found["imported"], found["already_there"]) == (0, BLOCKS)


def test_import_grows_the_tier_and_removes_nobody(file: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", 3, NamespaceKey("other", {"n": 1}))
    root = tmp_path / "to"
    rig = UsageRig(config_of(tmp_path / "from"))
    rig.close()
    fill(root, 0)
    kept = other.rename(root / other.name)
    rig = UsageRig(config_of(tmp_path / "from"))
    rig.store([key(1000 + i) for i in range(32 - BLOCKS)])
    rig.close()
    full = tmp_path / "full.safetensors"
    call("export", tmp_path / "from", full)
    assert call("import", root, full, "--json").document["imported"] == 32
    assert kept.exists() and call("verify", kept, "--json").one["ok"] == 3


def test_a_namespace_that_differs_refuses(file: Path, tmp_path: Path) -> None:
    key_ = NamespaceKey("some/model", {"model": "some/model", "dtype": "float32"})
    folder = fill(tmp_path / "to", 2, key_)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file())
    for target in (tmp_path / "to", folder):
        answer = call("import", target, file)
        assert answer.code == ExitCode.DIFFERENT and "dtype differ" in answer.err
    assert before == sorted(
        (p.name, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    )


def test_a_new_namespace_is_made_on_request(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "new"
    root.mkdir()
    answer = call("import", root, file)
    assert answer.code == ExitCode.DIFFERENT and "--create" in answer.err
    assert not list(root.iterdir())
    assert call("import", root, file, "--create", "--json").document["imported"] == BLOCKS
    assert right_blocks(root) == set(range(BLOCKS))


def test_import_needs_a_closed_cache_and_export_does_not(file: Path, tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path / "from"))
    rig.store([key(50)])
    answer = call_outside("import", tmp_path / "from", file, "--json")
    assert answer.code == ExitCode.IN_USE and "no engine runs" in answer.document["message"]
    live = tmp_path / "live.safetensors"
    answer = call_outside("export", tmp_path / "from", live, "--json")
    assert answer.code == ExitCode.OK and answer.document["blocks"] == BLOCKS + 1
    assert all(rig.check(key(i)) for i in range(BLOCKS))
    rig.close()


def test_the_hot_ones_only(tmp_path: Path) -> None:
    now = [1_000_000.0]
    (tmp_path / "from").mkdir()
    rig = UsageRig(config_of(tmp_path / "from"), lambda: now[0])
    rig.store([key(i) for i in range(BLOCKS)])
    now[0] += 60
    rig.policy.touch([key(7), key(3)])
    rig.close()
    path = tmp_path / "hot.safetensors"
    assert call("export", tmp_path / "from", path, "--hot", f"{2 * BLOCK}").code == ExitCode.OK
    with safe_open(str(path), "np") as opened:
        records = [parse_record(row.tobytes()) for row in opened.get_tensor("slots")]
    assert {record.key for record in records if record} == {key(3), key(7)}


def test_some_by_hash(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    found = call("export", tmp_path / "from", path, "--prefix", key(4).hex()[:8], "--json")
    assert found.document["blocks"] == 1
    listed = tmp_path / "hashes.txt"
    listed.write_text(f"{key(1).hex()}\n{key(2).hex()}\n")
    found = call("export", tmp_path / "from", path, "--hashes", listed, "--force", "--json")
    assert found.document["blocks"] == 2


def test_a_file_that_is_there_is_kept(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    answer = call("export", tmp_path / "from", file)
    assert answer.code == ExitCode.USAGE and "--force" in answer.err
    assert file.read_bytes() == before


def test_damaged_blocks_are_left_out_of_the_file(tmp_path: Path) -> None:
    folder = fill(tmp_path / "from", BLOCKS)
    for slot in (0, 5):
        flip(segment(folder), payload_offset(slot))
    path = tmp_path / "rest.safetensors"
    answer = call("export", tmp_path / "from", path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert (answer.document["blocks"], answer.document["skipped"]) == (BLOCKS - 2, 2)
    fill(tmp_path / "to", 0)
    assert call("import", tmp_path / "to", path).code == ExitCode.OK
    assert right_blocks(tmp_path / "to") == set(range(BLOCKS)) - {0, 5}
    assert [p.name for p in tmp_path.glob("*.partial")] == []


def test_damage_in_the_file_costs_the_block(file: Path, tmp_path: Path) -> None:
    flip(file, HEADER + 3 * BLOCK + 9)
    flip(file, HEADER + BLOCKS * BLOCK + 7 * 128 + 12)
    fill(tmp_path / "to", 0)
    answer = call("import", tmp_path / "to", file, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert (answer.document["imported"], answer.document["damaged"]) == (BLOCKS - 2, 2)
    assert right_blocks(tmp_path / "to") == set(range(BLOCKS)) - {3, 7}


@pytest.mark.parametrize("offset", [0, 3, 8, 40, 200, 900])
def test_a_damaged_head_is_refused(file: Path, tmp_path: Path, offset: int) -> None:
    fill(tmp_path / "to", 0)
    flip(file, offset)
    answer = call("import", tmp_path / "to", file)
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1


def test_strange_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    fill(tmp_path / "to", 0)
    strange = tmp_path / "strange"
    for data in (b"", b"x" * 7, b"\xff" * 100, whole[:-1], whole + b"x", whole[:5000]):
        strange.write_bytes(data)
        assert call("import", tmp_path / "to", strange).code == ExitCode.CANNOT_OPEN
    other = whole.replace(b'"format_version":"1"', b'"format_version":"9"', 1)
    strange.write_bytes(other)
    assert "format version 9" in call("import", tmp_path / "to", strange).err
    assert call("import", tmp_path / "to", segment(fill(tmp_path / "x"))).code == 3
