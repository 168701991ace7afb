"""`kvcascade export` and `import`: what comes out is bit for bit what went in, or is refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.cache_rig import (
    PER_SEGMENT,
    UsageRig,
    call,
    call_outside,
    config_of,
    fill,
    flip,
    payload_offset,
    right_blocks,
    segment,
)
from support.nvme_peer import Peer
from support.nvme_rig import BLOCK, config_for, content, key

from kvcascade.errors import InUseError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFile
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.offline.reader import read_description
from kvcascade.tiers.nvme.segments.format import block_checksum, parse_record
from kvcascade.tiers.nvme.segments.store import Durability
from kvcascade.tools.commands.cache_access import locations, opened
from kvcascade.tools.commands.carry import export_file as export_module
from kvcascade.tools.commands.carry.carried import CarriedReader
from kvcascade.tools.commands.carry.export_file import export
from kvcascade.tools.commands.carry.export_writer import Choice
from kvcascade.tools.commands.carry.import_file import import_file
from kvcascade.tools.commands.carry.visitor import Visitor, WantedNamespace
from kvcascade.tools.commands.command_line import ExitCode

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


def test_what_was_imported_survives_a_loss_of_power(tmp_path: Path) -> None:
    folder = fill(tmp_path, 0)
    description = read_description(locations(folder)[0])
    key_of_it = NamespaceKey(description.label, description.fields)
    visitor = Visitor([tmp_path], description, WantedNamespace(key_of_it, description.layout, 1))
    assert visitor._tier.store.durability is Durability.POWER
    assert visitor._tier.index._env.flags()["sync"]
    visitor.close()


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


def test_a_running_engine_finds_what_was_imported(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    config = replace(config_for([root], slots=80, per_segment=PER_SEGMENT), ready_bytes=0)
    with Peer(config) as engine:
        engine.store([0, 1, 40])
        own = engine.ask("own")
        answer = call("import", root, file, "--json")
        assert answer.code == ExitCode.OK, answer
        found = answer.document
        assert (found["imported"], found["already_there"]) == (BLOCKS - 2, 2)
        assert engine.hits(range(BLOCKS)) == BLOCKS, "every one of them right"
        assert set(own) <= set(engine.ask("own"))
        engine.store(range(50, 58))
        engine.ask("check_sums")
        assert engine.hits([*range(BLOCKS), 40, *range(50, 58)]) == BLOCKS + 9
        assert call("import", root, file, "--json").document["already_there"] == BLOCKS
    rig = UsageRig(config)
    assert all(rig.check(key(i)) for i in [*range(BLOCKS), 40, *range(50, 58)])
    rig.close()


def test_what_finds_no_room_beside_a_running_engine_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    with Peer(config_of(tmp_path / "to")) as engine:  # it makes all of a small tier ready
        engine.store(range(100, 124))
        answer = call("import", tmp_path / "to", file)
        assert answer.code == ExitCode.NO_SPACE
        assert f"0 of {BLOCKS} blocks imported" in answer.out
        assert "belong to the running engine" in answer.err and "--make-room" in answer.err
        assert engine.hits(range(100, 124)) == 24


def test_a_running_engine_hands_segments_over(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    with Peer(config_of(root)) as engine, CarriedReader(file) as carried:
        engine.store(range(100, 132))
        assert len(engine.ask("own")) == 4
        found = import_file(
            [root], None, carried, may_evict=True, pause=lambda s: engine.maintain(1)
        )
        assert found.imported == 2 * PER_SEGMENT, "an engine keeps its share of the segments"
        assert found.reason is not None and "gave no more segments" in found.reason
        assert engine.hits(range(BLOCKS)) == 2 * PER_SEGMENT
        assert engine.hits(range(100, 132)) == 2 * PER_SEGMENT
        engine.ask("check_sums")
    assert call("verify", root).code == ExitCode.OK


def test_a_full_tier_takes_more_only_on_request(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    rig = UsageRig(config_of(root))
    rig.store([key(i) for i in range(100, 132)])
    rig.policy.touch([key(i) for i in range(100, 108)])
    rig.close()
    answer = call("import", root, file, "--json")
    assert answer.code == ExitCode.NO_SPACE and answer.document["failed"] == BLOCKS
    assert "--make-room" in answer.document["reason"]
    answer = call("import", root, file, "--make-room", "--json")
    assert answer.code == ExitCode.OK and answer.document["imported"] == BLOCKS
    rig = UsageRig(config_of(root))
    assert all(rig.check(key(i)) for i in [*range(BLOCKS), *range(100, 108)]), "the coldest left"
    rig.close()


def test_an_import_leaves_the_recency_of_the_engine(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    rig = UsageRig(config_of(root))
    rig.store([key(i) for i in range(100, 104)])
    rig.policy.touch([key(102)])
    rig.close()
    assert call("import", root, file, "--json").document["imported"] == BLOCKS
    rig = UsageRig(config_of(root))
    coldest = [h for h, _ in rig.policy.coldest(4)]
    assert set(coldest[:3]) == {key(100), key(101), key(103)} and coldest[3] == key(102)
    rig.close()


def test_a_reset_in_the_middle_ends_an_import(tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    config = config_of(root)
    with Peer(replace(config, ready_bytes=0)) as engine:
        (location,) = locations(root)
        description = read_description(location)
        wanted = WantedNamespace(config.key, description.layout, 4)
        visitor = Visitor([root], description, wanted)
        assert visitor.store({key(1): memoryview(content(key(1)))}) == [BlockOutcome.OK]
        engine.ask("reset")
        with pytest.raises(InUseError, match="was reset meanwhile"):
            visitor.store({key(2): memoryview(content(key(2)))})
        visitor.close()
        assert engine.hits([1, 2]) == 0
        engine.ask("check_sums")


def test_an_import_that_waits_for_an_engine_keeps_none_of_its_pages(tmp_path: Path) -> None:
    """What the engine commits meanwhile would find none, and be dropped."""
    root = tmp_path / "to"
    root.mkdir()
    config = config_of(root)
    with Peer(config) as engine:
        (location,) = locations(root)
        description = read_description(location)
        wanted = WantedNamespace(config.key, description.layout, 4)
        was_released: list[bool] = []

        def pause(_: float) -> None:
            was_released.append(visitor._tier.directory._is_released)
            engine.maintain(1)

        visitor = Visitor([root], description, wanted, may_evict=True, pause=pause)
        assert visitor.store({key(1): memoryview(content(key(1)))}) == [BlockOutcome.OK]
        visitor.close()
        assert was_released and all(was_released)
        assert engine.hits([1]) == 1


def test_export_works_beside_an_engine(tmp_path: Path) -> None:
    fill(tmp_path / "from", BLOCKS)
    with Peer(config_of(tmp_path / "from")) as engine:
        engine.store([50])
        answer = call("export", tmp_path / "from", tmp_path / "live.safetensors", "--json")
        assert answer.code == ExitCode.OK and answer.document["blocks"] == BLOCKS + 1
        assert engine.hits([*range(BLOCKS), 50]) == BLOCKS + 1


def test_nothing_is_imported_beside_engines_that_were_reset(tmp_path: Path) -> None:
    """The file is of the weights on disk, and theirs may be others."""
    root = tmp_path / "to"
    root.mkdir()
    config = config_of(root)
    with Peer(replace(config, ready_bytes=0)) as engine:
        engine.ask("reset")
        (location,) = locations(root)
        description = read_description(location)
        with pytest.raises(InUseError, match="were reset"):
            Visitor([root], description, WantedNamespace(config.key, description.layout, 4))
        engine.ask("check_sums")


def test_after_a_reset_nothing_is_exported(tmp_path: Path) -> None:
    """The blocks may be of weights that were updated in place; elsewhere nobody would know."""
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(0)])
    rig.reset()
    rig.store([key(1)])
    for _ in range(2):  # beside the engine, and after it
        answer = call_outside("export", tmp_path, tmp_path / "warm.safetensors", "--json")
        assert answer.code == ExitCode.USAGE and "were reset" in answer.document["message"]
        rig.close()
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(2)])
    rig.close()
    answer = call("export", tmp_path, tmp_path / "warm.safetensors", "--json")
    assert answer.code == ExitCode.OK and answer.document["blocks"] == 1


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
    found = call("export", tmp_path / "from", path, "--hash", key(4).hex()[:8], "--json")
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


@pytest.mark.timeout(60)
def test_a_device_that_takes_no_byte_ends_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a", BLOCKS)
    monkeypatch.setattr(RealFile, "pwritev", lambda file, buffers, offset: 0)
    answer = call("export", tmp_path / "a", tmp_path / "out.safetensors")
    assert answer.code == ExitCode.CANNOT_OPEN and "writing less" in " ".join(answer.err.split())
    assert not list(tmp_path.glob("out*")), "nothing half done is left"


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


def test_memory_grows_as_slowly_as_export_says(tmp_path: Path) -> None:
    """Blocks of 4 KiB here: what a block takes is a fraction of its payload."""
    peaks: list[int] = []
    counts = (1024, 4096)
    for count in counts:
        root = tmp_path / str(count)
        root.mkdir()
        rig = UsageRig(config_for([root], slots=count, per_segment=256))
        rig.store([key(i) for i in range(count)])
        rig.close()
        with opened(locations(root)[0]) as cache:
            tracemalloc.start()
            export(cache, Choice(), root / "warm.safetensors")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    said = re.search(r"by about ([0-9]+) bytes\s+each", export_module.__doc__ or "")
    assert said is not None
    per_block = (peaks[1] - peaks[0]) / (counts[1] - counts[0])
    assert per_block < 1.2 * int(said[1])
