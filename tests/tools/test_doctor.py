"""`kvcascade doctor`: what it finds on machines that are wrong in one way, and on this one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.cache_rig import call
from support.users import unprivileged

from kvcascade.config.machine import MEMORY_FILE_SYSTEMS, file_system_of
from kvcascade.tools.commands.doctor.doctor_facts import has_direct_io
from kvcascade.tools.commands.doctor.findings import Facts, PathFacts, Severity, findings

GIB = 2**30
GOOD = Facts(
    vllm="0.32.0",
    vllm_problem=None,
    hash_seed_is_needed=False,
    gpus=8,
    gpu_driver="NVRM 580",
    locked_memory_bytes=None,
    open_files=65536,
    arena_dir="/dev/shm",
    arena_file_system="tmpfs",
    arena_free_bytes=100 * GIB,
    has_shared_huge_pages=True,
    pinned_bytes=64 * GIB,
    paths=(PathFacts("/mnt/nvme/kv", "xfs", 900 * GIB, True),),
)


def worst(facts: Facts) -> dict[str, Severity]:
    return {each.subject: each.level for each in findings(facts) if each.level is not Severity.OK}


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert worst(GOOD) == {}
    assert {each.remedy for each in findings(GOOD)} == {""}


@pytest.mark.parametrize(
    ("change", "subject", "severity"),
    [
        ({"vllm": None}, "vLLM", Severity.PROBLEM),
        ({"vllm_problem": "is too old"}, "vLLM", Severity.PROBLEM),
        ({"hash_seed_is_needed": True}, "block hashes", Severity.PROBLEM),
        ({"gpu_driver": None}, "GPU", Severity.PROBLEM),
        ({"locked_memory_bytes": 8 << 20}, "locked memory", Severity.ADVICE),
        ({"arena_free_bytes": 64 << 20}, "shared memory", Severity.PROBLEM),
        ({"arena_file_system": "ext4"}, "shared memory", Severity.ADVICE),
        ({"arena_file_system": ""}, "shared memory", Severity.ADVICE),
        ({"has_shared_huge_pages": False}, "huge pages", Severity.ADVICE),
        ({"open_files": 1024}, "open files", Severity.ADVICE),
        ({"kept_arenas": 2}, "kept arenas", Severity.ADVICE),
        ({"problems": ("tiers is missing.",)}, "configuration", Severity.PROBLEM),
        ({"warnings": ("odd.",)}, "configuration", Severity.ADVICE),
        ({"pinned_bytes": None, "paths": ()}, "configuration", Severity.ADVICE),
    ],
)
def test_one_thing_is_wrong(change: dict[str, object], subject: str, severity: Severity) -> None:
    facts = replace(GOOD, **change)  # type: ignore[arg-type]
    assert worst(facts) == {subject: severity}
    for each in findings(facts):
        if each.level is not Severity.OK and each.subject not in ("configuration", "vLLM"):
            assert each.remedy, "a finding says what to do"


@pytest.mark.parametrize(
    ("pinned", "said"),
    [((64 << 30) + (40 << 20), "65g"), (64 << 30, "65g"), ((200 << 20) + 1, "201m")],
)
def test_the_size_of_shared_memory_is_rounded_up(pinned: int, said: str) -> None:
    """It was rounded to the next tenth: too small by up to 51 MiB."""
    facts = replace(GOOD, pinned_bytes=pinned, arena_free_bytes=64 << 20)
    (found,) = [each for each in findings(facts) if each.subject == "shared memory"]
    assert f"--shm-size={said}," in found.remedy


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4", ""])
def test_a_path_in_the_wrong_place(kind: str) -> None:
    path = replace(GOOD.paths[0], file_system=kind)
    assert worst(replace(GOOD, paths=(path,))) == {"path /mnt/nvme/kv": Severity.ADVICE}


def test_a_path_without_direct_io() -> None:
    path = replace(GOOD.paths[0], has_direct_io=False)
    assert worst(replace(GOOD, paths=(path,))) == {"path /mnt/nvme/kv": Severity.ADVICE}
    unknown = replace(GOOD.paths[0], has_direct_io=None)
    assert worst(replace(GOOD, paths=(unknown,))) == {}


def test_a_limit_of_locked_memory_does_not_matter_without_a_gpu() -> None:
    assert worst(replace(GOOD, gpus=0, gpu_driver=None, locked_memory_bytes=8 << 20)) == {}


def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    assert has_direct_io(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []
    assert has_direct_io(tmp_path / "nowhere") is None


def test_this_machine_with_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    extra = {
        "spec_name": "CascadeOffloadingSpec",
        "tiers": [
            {"type": "cpu", "capacity": "16MiB"},
            {"type": "nvme", "capacity": "64MiB", "path": str(tmp_path / "kv"), "min_free": 0},
        ],
    }
    document = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    path.write_text(json.dumps({**document, "kv_connector_extra_config": extra}))
    answer = call("doctor", str(path), "--json")
    found = json.loads(answer.out)["findings"]
    assert {"configuration", "vLLM", "GPU", "shared memory"} <= {each["subject"] for each in found}
    assert any(each["subject"] == f"path {tmp_path / 'kv'}" for each in found)
    assert not (tmp_path / "kv").exists(), "nothing was created"


def test_a_wrong_configuration_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    path.write_text('{"kv_connector_extra_config": {"tiers": []}}')
    answer = call("doctor", str(path), "--json")
    found = json.loads(answer.out)["findings"]
    assert answer.code == 1
    assert any(e["subject"] == "configuration" and e["level"] == "problem" for e in found)


def test_a_vllm_that_cannot_be_loaded_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_installed(options: object) -> None:
        raise AttributeError("partially initialized module")

    monkeypatch.setattr("kvcascade.vllm.precheck.check_spec", half_installed)
    answer = call("doctor", "--json")
    (found,) = [e for e in json.loads(answer.out)["findings"] if e["subject"] == "vLLM"]
    assert answer.code == 1 and "AttributeError: partially" in found["found"]


def test_a_misspelt_variable_is_named_if_there_is_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCASCADE_PATHS", "/mnt/nvme/kv")
    said = call("doctor").out
    assert "KVCASCADE_PATHS is not known; if KVCASCADE_PATH is meant" in " ".join(said.split())


def test_a_first_tier_of_an_unknown_type_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    disk = {"type": "nvme", "path": str(tmp_path / "kv")}
    path.write_text(json.dumps({"tiers": [{"type": "ssd"}, disk]}))
    for command in ("doctor", "check"):
        answer = call(command, str(path), "--json")
        assert answer.code == 1 and "tiers[0].type" in answer.out


def test_our_tier_inside_the_tiering_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    tier: dict[str, object] = {"type": "KVCascadeTier", "module_path": "kvcascade.vllm_tier"}
    tier |= {"path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 24}
    path.write_text(json.dumps({**extra, "secondary_tiers": [tier]}))
    found = json.loads(call("doctor", str(path), "--json").out)["findings"]
    assert any(each["subject"] == f"path {tmp_path / 'kv'}" for each in found)
    assert not any("tiers is missing" in each["found"] for each in found)


def test_an_arena_on_a_disk_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    arena = {"type": "cpu", "capacity": "16MiB", "arena_dir": str(tmp_path)}
    path.write_text(json.dumps({"spec_name": "CascadeOffloadingSpec", "tiers": [arena]}))
    found = json.loads(call("doctor", str(path), "--json").out)["findings"]
    said = [each for each in found if "written to a disk" in each["found"]]
    is_on_disk = file_system_of(str(tmp_path)) not in {*MEMORY_FILE_SYSTEMS, ""}
    assert len(said) == int(is_on_disk)


def test_a_machine_without_proc_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "transfer.json", str(tmp_path)
    disk = {"type": "nvme", "path": folder, "capacity": "1MiB", "min_free": 0}
    tiers = [{"type": "cpu", "capacity": "16MiB"}, disk]
    path.write_text(json.dumps({"spec_name": "CascadeOffloadingSpec", "tiers": tiers}))
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "nowhere"))
    answer = call("doctor", path, "--json")
    said = {e["subject"]: e for e in answer.document["findings"] if "/proc" in e["remedy"]}
    assert answer.code == 1 and said.keys() == {"shared memory", f"path {folder}"}
    (problem,) = call("check", path, "--json").document["problems"]
    assert problem in [each["found"] for each in answer.document["findings"]]
    assert "nowhere/meminfo" in problem and "/proc" in problem


@pytest.mark.parametrize("key", ["path", "arena_dir"])
def test_a_path_in_a_locked_folder_is_said_as_check_says_it(key: str) -> None:
    with TemporaryDirectory() as text:
        folder, file = Path(text), Path(text) / "transfer.json"
        folder.chmod(0o777)
        (folder / "locked").mkdir(mode=0)
        cpu = {"type": "cpu", "capacity": "16MiB"}
        disk = {"type": "nvme", "path": str(folder / "kv"), "capacity": "1MiB", "min_free": 0}
        (cpu if key == "arena_dir" else disk)[key] = str(folder / "locked" / "kv")
        file.write_text(json.dumps({"spec_name": "CascadeOffloadingSpec", "tiers": [cpu, disk]}))
        for command in ("doctor", "check"):
            call(command, file)  # what is imported late may be where only root can read
        with unprivileged():
            (problem,) = call("check", file, "--json").document["problems"]
            answer = call("doctor", file, "--json")
    assert answer.code == 1
    said = [e["found"] for e in answer.document["findings"] if e["subject"] == "configuration"]
    assert said == [problem] and "cannot be read (Permission denied)" in problem
