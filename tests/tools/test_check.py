"""`kvcascade check`: what a configuration comes to, and what is wrong with it."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import ROOT, call
from support.path_cache import fill_path
from support.users import unprivileged
from typer.testing import CliRunner

from kvcascade.assembly.named import checked
from kvcascade.config.machine import Disk, Machine
from kvcascade.errors import ConfigError, TierIOError
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.nvme.path.writer.path_plan import plan_segments
from kvcascade.tools.command_app import app
from kvcascade.tools.commands.check.config_check import (
    OPEN_S,
    SCAN_S_PER_ENTRY,
    BlockShape,
    CheckReport,
    check,
    memory_rate,
)
from kvcascade.tools.commands.check.transfer_config import EXTRA, FIELDS, read_config
from kvcascade.tools.commands.command_line import ExitCode, check_place
from kvcascade.tools.commands.kv_bytes import kv_shape

MIB = 1 << 20
DISK = {"type": "nvme", "capacity": "256MiB", "min_free": 0}
LLAMA = "llama-3.1-8b"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """64 MiB of memory above 256 MiB of disk."""
    extra = {
        "spec_name": "CascadeOffloadingSpec",
        "tiers": [
            {"type": "cpu", "capacity": "64MiB"},
            {**DISK, "path": str(tmp_path / "kv")},
        ],
    }
    path = tmp_path / "config.json"
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", EXTRA: extra}
    path.write_text(json.dumps(whole))
    return path


def change(path: Path, **options: Any) -> None:
    """Set keys of `kv_connector_extra_config`."""
    document = json.loads(path.read_text())
    document["kv_connector_extra_config"].update(options)
    path.write_text(json.dumps(document))


def test_what_tiers_hold(config: Path, tmp_path: Path) -> None:
    answer = call("check", config, "--model", LLAMA, "--world-size", "2", "--json")
    found = answer.document
    assert answer.code == ExitCode.OK and found["problem"] is None
    assert found["bytes_per_token"] == 2 * 32 * 8 * 128 * 2 == 131_072
    assert found["block_bytes"] == 16 * 131_072 and found["pinned_bytes"] == 64 * MIB
    cpu, nvme = found["tiers"]
    arena = ArenaGeometry.fit(64 * MIB, 8 * 131_072, 2)
    assert cpu["blocks"] == arena.slots and cpu["tokens"] == 16 * arena.slots
    assert nvme["blocks"] == plan_segments(256 * MIB, 16 * 131_072, 1).slots
    assert found["start_s"] > 0 and found["start_after_crash_s"] > found["start_s"]
    assert not (tmp_path / "kv").exists(), "nothing is created"
    assert "131,072 bytes" in call("check", config, "--model", LLAMA).out


class UnequalDisks(Machine):
    """The disks of folders have the MiB that their names say, others have 512."""

    def disk(self, folder: Path) -> Disk:
        mib = int(folder.name) if folder.name.isdigit() else 512
        return Disk(device=mib, total=mib * MIB, free=mib * MIB)


def checked_disks(config: Path, parent: Path, disks: list[int], capacity: int) -> CheckReport:
    paths = [parent / str(mib) for mib in disks]
    for path in paths:
        path.mkdir()
    disk = {**DISK, "capacity": capacity, "path": list(map(str, paths))}
    change(config, tiers=[{"type": "cpu", "capacity": "64MiB"}, disk])
    return check(read_config(config), BlockShape(16, 4096), machine=UnequalDisks())


@pytest.mark.parametrize(
    ("disks", "capacity", "segments"),
    [
        ([512, 64], 400 * MIB, 7 + 2),
        ([512, 511, 64], 600 * MIB + 1, 7 + 7 + 2),
        ([512, 74, 72], 600 * MIB, 7 + 2 + 2),  # a segment has 25 MiB
        ([90, 512, 513], 600 * MIB, 3 + 7 + 7),
        ([87, 512, 513], 600 * MIB, 2 + 7 + 7),  # and its tables 13
    ],
)
def test_of_unequal_disks_each_holds_at_most_its_part(
    config: Path, tmp_path: Path, disks: list[int], capacity: int, segments: int
) -> None:
    report = checked_disks(config, tmp_path, disks, capacity)
    whole = plan_segments(capacity, 65536, len(disks))
    assert not report.problems and report.tiers[1].capacity_bytes == capacity
    assert whole.segments == 7 * len(disks) and report.tiers[1].segments == segments
    assert report.tiers[1].blocks == segments * whole.slots_per_segment
    assert any(", which these disks hold" in each for each in report.doubts)


def test_disks_that_hold_their_parts_hold_all_segments(config: Path, tmp_path: Path) -> None:
    """Also of a capacity that is no multiple of the number of folders."""
    report = checked_disks(config, tmp_path, [700, 701], 400 * MIB + 1)
    assert report.tiers[1].segments == plan_segments(400 * MIB + 1, 65536, 2).segments


OTHER_FOLDERS = {
    "b": ("b", "was made as part 1 of 2"),
    "b a": ("b a", "was made as part 1 of 2"),
    "a b c": ("a b c", "this tier has the paths"),
    "a": ("a", "this tier has the paths"),
    "a bare mount point": ("a b", "mount its disk"),
}


@pytest.mark.parametrize("name", OTHER_FOLDERS)
def test_other_folders_than_the_tier_has_are_a_problem(
    config: Path, tmp_path: Path, name: str
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    fill_path(roots, 30)
    if "bare" in name:
        roots[1].rename(tmp_path / "elsewhere")
        roots[1].mkdir()
    folders, said = OTHER_FOLDERS[name]
    given = [str(tmp_path / each) for each in folders.split()]
    change(config, tiers=[{"type": "cpu", "capacity": "64MiB"}, {**DISK, "path": given}])
    answer = call("check", config, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert [each for each in answer.document["problems"] if said in each]


def test_a_record_that_is_damaged_is_no_problem_of_the_configuration(
    config: Path, tmp_path: Path
) -> None:
    """The engine names it; at `check` time the path may be another machine's."""
    fill_path(tmp_path / "kv")
    (tmp_path / "kv" / ".kvcascade" / "path.json").write_text("{")
    assert call("check", config, "--json").code == ExitCode.OK


def test_a_kept_arena_holds_its_table_too(config: Path, tmp_path: Path) -> None:
    """Each slot has a record in it: with small blocks that is room for hundreds of them."""
    tiers = json.loads(config.read_text())["kv_connector_extra_config"]["tiers"]
    change(config, tiers=[{**tiers[0], "persist": True}, {**tiers[1], "segment_size": "8MiB"}])
    cpu, nvme = looked_at(config, BlockShape(16, 256)).tiers
    kept = ArenaGeometry.fit(64 * MIB, 4096, 1, kept=True)
    assert cpu.blocks == kept.slots < ArenaGeometry.fit(64 * MIB, 4096, 1).slots
    assert nvme.segments == plan_segments(256 * MIB, 4096, 1, 2048).segments


def test_the_times_of_a_start_are_those_that_were_measured() -> None:
    opening, scan = f"{OPEN_S:g} s", f"{SCAN_S_PER_ENTRY * 4_000_000:.1f} s"
    page = (ROOT / "docs" / "decisions" / "opening.md").read_text()
    last_cells = [row.strip().strip("|").split("|")[-1].strip() for row in page.splitlines()]
    assert opening in last_cells and scan in last_cells
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.partition("\n## check\n")[2].partition("\n## ")[0]
    assert opening in section and scan in section


@pytest.mark.parametrize(
    ("model", "ranks", "rank_bytes"),
    [
        (LLAMA, 8, 2 * 32 * 1 * 128 * 2),
        (LLAMA, 16, 2 * 32 * 1 * 128 * 2),
        ("deepseek-v3", 1, 61 * 576 * 2),
        ("deepseek-v3", 8, 61 * 576 * 2),
    ],
)
def test_ranks_keep_copies_of_what_cannot_be_divided(
    config: Path, model: str, ranks: int, rank_bytes: int
) -> None:
    """As vLLM does it: `max(1, kv_heads // ranks)` heads a rank, and the latent of MLA whole."""
    answer = call("check", config, "--model", model, "--world-size", ranks, "--json")
    arena = ArenaGeometry.fit(64 * MIB, 16 * rank_bytes, ranks)
    cpu, nvme = answer.document["tiers"]
    assert answer.document["bytes_per_token"] == ranks * rank_bytes
    assert answer.document["block_bytes"] == arena.slot_bytes
    assert cpu["tokens"] == 16 * arena.slots
    assert nvme["blocks"] == plan_segments(256 * MIB, arena.slot_bytes, 1).slots


def test_without_a_model_there_are_bytes_only(config: Path) -> None:
    found = call("check", config, "--json").document
    assert [tier["blocks"] for tier in found["tiers"]] == [None, None]
    assert [tier["capacity_bytes"] for tier in found["tiers"]] == [64 * MIB, 256 * MIB]
    assert "give --model" in call("check", config).out


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, 32), ({"blocks_per_chunk": 4}, 128), ({"block_size": 64}, 64)]
)
def test_tokens_of_a_block(config: Path, options: dict[str, int], tokens: int) -> None:
    change(config, **options)
    answer = call("check", config, "--kv-bytes-per-token", 1024, "--block-size", 32, "--json")
    assert answer.document["tokens_per_block"] == tokens
    assert answer.document["block_bytes"] == tokens * 1024


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tiers": [{"type": "cpu", "capacity": "9999TiB"}]}, "more memory than there is"),
        ({"tiers": []}, "list of tiers"),
        ({"write_mod": "back"}, "write_mode"),
    ],
)
def test_what_is_wrong_is_named(config: Path, options: dict[str, Any], said: str) -> None:
    change(config, **options)
    answer = call("check", config, "--json")
    assert answer.code == ExitCode.PROBLEMS and said in answer.document["problem"]
    shown = call("check", config)
    assert shown.code == ExitCode.PROBLEMS and said in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("tier", "options"),
    [
        (0, {"policy": "no_such_package.module:Policy"}),
        (1, {"policy": "no_such_package.module:Policy"}),
        (1, {"admission": "no_such_package:rule"}),
    ],
)
def test_what_an_engine_could_not_import_is_named(
    config: Path, tier: int, options: dict[str, Any]
) -> None:
    tiers = json.loads(config.read_text())["kv_connector_extra_config"]["tiers"]
    tiers[tier].update(options)
    change(config, tiers=tiers)
    answer = call("check", config, "--json")
    assert answer.code == ExitCode.PROBLEMS and "no_such_package" in answer.document["problem"]
    with pytest.raises(ConfigError, match="no_such_package"):
        checked(read_config(config).extra, Machine())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kv_connector": "OfloadingConnector", %s}', 'use "OffloadingConnector"'),
        ('{"kv_transfer_config": {"kv_connector": 3, %s}}', 'use "OffloadingConnector"'),
        ('{"spec_name": "CascadeOfloadingSpec", %s}', "expected 'CascadeOffloadingSpec' or"),
        ('{"write_mode": "back", "write_mode": "through", %s}', "give every key once"),
    ],
)
def test_what_vllm_would_take_otherwise_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text % '"tiers": [{"type": "cpu", "capacity": "1MiB"}]')
    problems = call("check", path, "--json").document["problems"]
    assert any(said in problem for problem in problems) and "no JSON" not in str(problems)


def test_what_is_hardly_meant_is_said_and_fits(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.json"
    path.write_text('{"tiers": [{"type": "cpu", "capacity": "1MiB"}]}')
    answer = call("check", path, "--json")
    assert answer.code == ExitCode.OK and answer.document["problem"] is None
    (doubt,) = answer.document["doubts"]
    assert doubt.startswith("spec_name is missing") and "spec_name" in call("check", path).out
    assert call("check", config, "--json").document["doubts"] == []


def test_an_nvme_tier_smaller_than_the_cpu_tier_is_said_and_fits(
    config: Path, tmp_path: Path
) -> None:
    disk = {**DISK, "path": str(tmp_path / "kv"), "capacity": "32MiB"}
    change(config, tiers=[{"type": "cpu", "capacity": "64MiB"}, disk])
    answer = call("check", config, "--json")
    assert answer.code == ExitCode.OK and answer.document["problem"] is None
    (doubt,) = answer.document["doubts"]
    assert doubt.startswith('tiers[1].capacity: "32MiB" is smaller than the CPU tier')
    assert "is smaller than the CPU tier" in call("check", config).out


def looked_at(path: Path, shape: BlockShape | None, **how: Any) -> CheckReport:
    """What a file comes to."""
    return check(read_config(path), shape, **how)


def test_the_write_mode_and_what_a_stop_may_lose(config: Path) -> None:
    found = call("check", config, "--json").document
    assert found["write_mode"] == "back" and "at least 2 times" in found["write_mode_reason"]
    assert "last 5 s" in found["stop_may_lose"] and found["shutdown_timeout_s"] == 22
    shown = " ".join(call("check", config).out.split())
    for said in ("back", "at least 2 times", "last 5 s", "5 s with 0.18", "--shutdown-timeout 22"):
        assert said in shown
    change(config, write_mode="demote", shutdown_flush_s=0)
    found = call("check", config, "--json").document
    assert found["write_mode"] == "demote" and found["shutdown_timeout_s"] is None
    assert "--shutdown-timeout" not in call("check", config).out
    change(config, **CPU_ONLY)
    found = call("check", config, "--json").document
    assert found["write_mode"] is found["stop_may_lose"] is found["shutdown_timeout_s"] is None
    assert "write mode" not in call("check", config).out


WHOLE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "a"}
CPU_ONLY = {"spec_name": "CascadeOffloadingSpec", "tiers": [{"type": "cpu", "capacity": "1MiB"}]}
GONE = object()
TIERING = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 1 << 20,
    "eviction_policy": "S3FifoPolicy",
    "cache_policy_module_path": "kvcascade.vllm_policies",
}


@pytest.fixture(params=[True, False], ids=["vllm", "no vllm"])
def has_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the installed vLLM, and as if there were none: whether there is one."""
    if request.param:
        pytest.importorskip("vllm")
    else:
        for name in [name for name in sys.modules if name.startswith("vllm.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "vllm", None)
    return bool(request.param)


def problems_of(path: Path, extra: object = CPU_ONLY, **options: object) -> list[str]:
    """What `check` says of a whole `--kv-transfer-config`."""
    document = {**WHOLE, EXTRA: extra, **options}
    path.write_text(json.dumps({key: document[key] for key in document if document[key] != GONE}))
    answer = call("check", path, "--json")
    assert answer.code == (ExitCode.PROBLEMS if answer.document["problems"] else ExitCode.OK)
    return list(answer.document["problems"])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kv_role", "kv_bth", 'did you mean "kv_both"'),
        ("kv_role", GONE, 'give "kv_both"'),
        ("kv_role", None, 'use "kv_both"'),
        ("kv_connector", GONE, 'give "OffloadingConnector"'),
        ("kv_conector", "OffloadingConnector", 'did you mean "kv_connector"'),
        (EXTRA, [], "is not an object"),
        (EXTRA, GONE, "is missing"),
        ("kv_port", "high", "whole number"),
        ("kv_load_failure_policy", "ignore", 'use "recompute" or "fail"'),
        ("tiers", [], "move it there"),
    ],
)
def test_the_whole_object_is_looked_at(
    tmp_path: Path, has_vllm: bool, key: str, value: object, said: str
) -> None:
    path = tmp_path / "config.json"
    assert problems_of(path) == []
    (problem,) = problems_of(path, **{key: value})
    assert problem.startswith(key) and said in problem


def test_what_only_vllm_knows_is_its_own_to_say(tmp_path: Path) -> None:
    """Of its class in this version: a key that is gone, and a type of its choice."""
    theirs = pytest.importorskip("vllm.config").KVTransferConfig
    fields = set(inspect.signature(theirs).parameters)
    assert set(WHOLE) | {EXTRA} <= fields
    for key in FIELDS - fields:
        (problem,) = problems_of(tmp_path / "config.json", **{key: 1})
        assert problem.startswith(key)


def test_all_problems_are_told_at_once(tmp_path: Path, has_vllm: bool) -> None:
    (tmp_path / "file").touch()
    tiers = [
        {"type": "cpu", "capacity": "9999TiB"},
        {**DISK, "path": str(tmp_path / "file")},
        {"type": "ssd", "capacity": "1MiB", "path": "/a"},
    ]
    extra = {**CPU_ONLY, "tiers": tiers, "write_mod": "back"}
    found = problems_of(tmp_path / "config.json", extra, kv_role="kv_bth", kv_conector=1)
    keys = ["kv_conector", "kv_role", "write_mod", "tiers[0].capacity", "tiers[1].path"]
    assert sorted(each.split()[0].rstrip(":") for each in found) == sorted([*keys, "tiers[2].type"])
    shown = call("check", tmp_path / "config.json").out
    assert all(key in shown for key in keys) and "fits this machine" not in shown


@pytest.mark.parametrize(
    ("path", "is_loaded", "is_problem", "is_doubt"),
    [
        ("kvcascade.spec", True, False, False),
        ("kvcascade.spec", False, False, False),
        ("kvcascade.spek", True, False, True),
        ("kvcascade.spek", False, True, False),
        ("kvcascade.errors", False, True, False),
        ("no_such_package.spec", True, False, True),
        ("..", True, False, True),
        ("..", False, True, False),
        (None, True, False, False),
        (None, False, True, False),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str | None,
    is_loaded: bool,
    is_problem: bool,
    is_doubt: bool,
) -> None:
    """Where vLLM loads our plugin it never looks at the module."""
    monkeypatch.setenv("VLLM_PLUGINS", "kvcascade" if is_loaded else "lora_hf_hub_resolver")
    config = tmp_path / "config.json"
    problems = problems_of(config, {**CPU_ONLY, "spec_module_path": path})
    doubts = call("check", config, "--json").document["doubts"]
    assert [each.split(":")[0].split()[0] for each in problems] == ["spec_module_path"] * is_problem
    assert ["ignored here" in doubt for doubt in doubts] == [True] * is_doubt


def test_the_nvme_tier_in_vllms_own_tiering_fits(tmp_path: Path, has_vllm: bool) -> None:
    """As the docs have it, but for the path and the sizes."""
    text = (ROOT / "docs" / "configure.md").read_text()
    start = text.index('{"spec_name": "TieringOffloadingSpec"')
    extra = json.loads(text[start : text.index("```", start)])
    extra["cpu_bytes_to_use"] = 64 * MIB
    extra["secondary_tiers"][0].update(path=str(tmp_path / "kv"), capacity="256MiB", min_free=0)
    config = tmp_path / "config.json"
    assert problems_of(config, extra) == []
    answer = call("check", config, "--kv-bytes-per-token", 1000, "--json").document
    assert answer["doubts"] == [] and answer["block_bytes"] == 4 * 4096
    cpu, nvme = answer["tiers"]
    assert cpu["policy"] == "S3FifoPolicy" and cpu["blocks"] == 64 * MIB // (4 * 4096)
    assert nvme["blocks"] == plan_segments(256 * MIB, 4 * 4096, 1).slots
    assert not (tmp_path / "kv").exists()
    assert "fits this machine" in call("check", config).out


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"cpu_bytes_to_use": GONE}, "cpu_bytes_to_use", "is missing"),
        ({"cpu_bytes_to_use": 1 << 60}, "cpu_bytes_to_use", "more memory than there is"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use", "not a number of bytes"),
        ({"cache_policy_module_path": GONE}, "eviction_policy", "cache_policy_module_path"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk", "whole number"),
        ({"secondary_tiers": {}}, "secondary_tiers", "not a list"),
        ({"secondary_tiers": [3]}, "secondary_tiers[0]", "not a tier"),
        ({"type": GONE}, "secondary_tiers[0].type", "is missing"),
        ({"type": "KVCascadTier"}, "secondary_tiers[0].type", '"KVCascadeTier"'),
        ({"module_path": GONE}, "secondary_tiers[0].module_path", '"kvcascade.vllm_tier"'),
        ({"capacity": "9999TiB"}, "secondary_tiers[0].capacity", "more disk than there is"),
        ({"path": "kv"}, "secondary_tiers[0].path", "absolute path"),
        ({"polcy": "lru"}, "secondary_tiers[0].polcy", 'did you mean "policy"'),
        ({"policy": "no_such_package:P"}, "policy", "no_such_package"),
    ],
)
def test_what_is_wrong_in_vllms_own_tiering(
    tmp_path: Path, has_vllm: bool, options: dict[str, object], key: str, said: str
) -> None:
    tier: dict[str, object] = {"type": "KVCascadeTier", "capacity": "1MiB", "min_free": 0}
    tier |= {"module_path": "kvcascade.vllm_tier", "path": str(tmp_path / "kv")}
    is_outside = options.keys() <= {*TIERING, "blocks_per_chunk", "secondary_tiers"}
    extra = {**TIERING, "secondary_tiers": [tier if is_outside else {**tier, **options}]}
    extra = {**extra, **(options if is_outside else {})}
    extra["secondary_tiers"] = _without_gone(extra["secondary_tiers"])
    (problem,) = problems_of(tmp_path / "config.json", _without_gone(extra))
    assert problem.startswith(key) and said in problem


def _without_gone(given: Any) -> Any:
    if isinstance(given, list):
        return [_without_gone(each) for each in given]
    if isinstance(given, dict):
        return {key: value for key, value in given.items() if value is not GONE}
    return given


def test_tiers_and_policies_of_others_are_asked_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "config.json"
    fs = {"type": "fs", "root_dir": "/mnt"}
    assert problems_of(path, {**TIERING, "secondary_tiers": [fs]}) == []
    (problem,) = problems_of(path, {**TIERING, "secondary_tiers": [{"type": "sf"}]})
    assert problem.startswith("secondary_tiers[0]: vLLM finds no class")
    (problem,) = problems_of(path, {**TIERING, "eviction_policy": "S3FiloPolicy"})
    assert "eviction_policy 'S3FiloPolicy' cannot be imported" in problem
    assert problems_of(path, {**TIERING, "eviction_polcy": "lru"}) == []
    (doubt,) = call("check", path, "--json").document["doubts"]
    assert 'did you mean "eviction_policy"' in doubt and "ignored" in doubt


def test_an_unknown_spec_names_those_that_are_known(config: Path) -> None:
    change(config, spec_name="X")
    (problem,) = call("check", config, "--json").document["problems"]
    expected = "'CascadeOffloadingSpec' or 'TieringOffloadingSpec'"
    assert problem.startswith(f"unknown spec_name 'X'; expected {expected}")


def test_standard_input_is_read(config: Path) -> None:
    for text, code in ((config.read_bytes(), ExitCode.OK), (b"{", ExitCode.PROBLEMS)):
        done = CliRunner().invoke(app, ["check", "-", "--json"], input=text)
        assert done.exit_code == code
        assert json.loads(done.stdout)["config"] == "standard input"
    with os.fdopen(os.memfd_create("config"), "r+b", buffering=0) as file:
        file.write(config.read_bytes())
        answer = call("check", f"/proc/self/fd/{file.fileno()}")
        assert answer.code == ExitCode.OK, "as <(...) of a shell gives it"


@pytest.mark.parametrize(
    "words", [["check", "PATH"], ["export", "PATH", "OUT", "--hashes", "PATH"], ["import", "PATH"]]
)
def test_a_folder_in_place_of_a_file_is_called_one(tmp_path: Path, words: list[str]) -> None:
    places = {"PATH": tmp_path, "OUT": tmp_path / "out"}
    command = [places.get(word, word) for word in words]
    last = [tmp_path] if words[0] == "import" else []
    answer = call(*command, *last)
    assert answer.code == ExitCode.USAGE and f"{tmp_path} is a folder" in answer.err


def test_strange_files(tmp_path: Path) -> None:
    strange = tmp_path / "strange.json"
    for text in ("{", "[]", "3", '"a"', "[" * 100_000):
        strange.write_text(text)
        answer = call("check", strange)
        assert answer.code == ExitCode.PROBLEMS
        assert "`kvcascade config --json` prints it" in " ".join(answer.out.split())
    assert call("check", tmp_path / "nowhere.json").code == ExitCode.USAGE


@pytest.mark.parametrize("place", ["closed/config.json", "x" * 5000])
def test_files_that_cannot_be_looked_at(config: Path, tmp_path: Path, place: str) -> None:
    """In a folder that this user may not search, or longer than the system takes."""
    (tmp_path / "closed").mkdir(mode=0)
    call("check", config)  # what is imported late may be where only root can read
    with unprivileged():
        answer = call("check", tmp_path / place)
        assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1
        with pytest.raises(ConfigError, match="--model: .* cannot be read"):
            kv_shape(str(tmp_path / place))
        with pytest.raises(ConfigError, match="--csv: .* cannot be read"):
            check_place("--csv", tmp_path / place)


def test_a_tier_too_small_for_the_blocks(config: Path) -> None:
    report = check(
        read_config(config), BlockShape(16, 100 * MIB), measure=lambda folder, is_touched: 1e9
    )
    assert report.problem is not None and report.start_s is None


def test_start_is_memory_by_rate(config: Path) -> None:
    report = check(
        read_config(config), BlockShape(16, 1024), measure=lambda folder, is_touched: 32.0 * MIB
    )
    assert report.start_s == pytest.approx(2.0 + OPEN_S)
    report = check(
        read_config(config), BlockShape(16, 1024), measure=lambda folder, is_touched: None
    )
    assert report.start_s is None


@pytest.mark.parametrize(("has_prefault", "memory_s"), [(True, 2.0), (False, 0.5)])
def test_memory_that_is_not_touched_is_made_all_the_same(
    config: Path, has_prefault: bool, memory_s: float
) -> None:
    tiers = json.loads(config.read_text())["kv_connector_extra_config"]["tiers"]
    tiers[0]["prefault"] = has_prefault
    change(config, tiers=tiers)
    rates = {True: 32.0 * MIB, False: 128.0 * MIB}
    report = looked_at(config, None, measure=lambda folder, is_touched: rates[is_touched])
    assert report.start_s == pytest.approx(memory_s + OPEN_S)


@pytest.mark.parametrize("is_touched", [True, False])
def test_the_rate_is_measured_and_leaves_nothing(tmp_path: Path, is_touched: bool) -> None:
    rate = memory_rate(tmp_path, is_touched)
    assert rate is not None and rate > 0 and not list(tmp_path.iterdir())
    with pytest.raises(TierIOError, match="nowhere"):
        memory_rate(tmp_path / "nowhere", is_touched)


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, 1 << 60, "8", [], {"a": 1}, float("nan")])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_model_of_odd_numbers_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    good = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(good))
    assert kv_shape(str(tmp_path)).bytes_per_token == 2 * 32 * 4096 * 2
    (tmp_path / "config.json").write_text(json.dumps({**good, name: value}))
    with pytest.raises(ConfigError, match=f"has no {name}"):
        kv_shape(str(tmp_path))


def test_heads_without_a_size_are_refused(tmp_path: Path) -> None:
    odd = {"num_hidden_layers": 1, "num_attention_heads": 32, "hidden_size": 31}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match="has no head_dim"):
        kv_shape(str(tmp_path))


def test_models(tmp_path: Path) -> None:
    mla = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
           "num_attention_heads": 128, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mla))
    assert kv_shape(str(tmp_path)).bytes_per_token == 61 * 576 * 2
    text = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    nested = {"text_config": {**text, "head_dim": 64, "dtype": "float32"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert kv_shape(str(tmp_path / "config.json")).bytes_per_token == 2 * 32 * 8 * 64 * 4
    assert kv_shape(str(tmp_path), ranks=16).bytes_per_token == 2 * 32 * 16 * 64 * 4
    assert kv_shape(LLAMA, "fp8").bytes_per_token == 65_536
    for model, dtype in (("no/such-model", None), (LLAMA, "float7")):
        with pytest.raises(ConfigError):
            kv_shape(model, dtype)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": "many"}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        kv_shape(str(tmp_path))
