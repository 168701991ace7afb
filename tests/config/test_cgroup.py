"""What a container leaves its processes, by the files of both generations of control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcascade.config import machine as early
from kvcascade.config.cgroup import NO_LIMIT, GroupMemory, group_memory
from kvcascade.config.machine import Machine, cpu_capacity
from kvcascade.config.schema import parse
from kvcascade.errors import ConfigError
from kvcascade.tiers.cpu.arena_limits import check_capacity, probe_machine

GIB = 1 << 30
MIB = 1 << 20
NOTHING = GroupMemory()
V1_UNLIMITED = 9223372036854771712


def group(folder: Path, limit: int | str, used: int, **stat: int) -> None:
    """A group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    lines = {"anon": used, "shmem": 5 * GIB} | stat
    (folder / "memory.stat").write_text("".join(f"{k} {n}\n" for k, n in lines.items()))


def group_v1(folder: Path, limit: int, used: int, **stat: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {n}\n" for k, n in stat.items()))


def member(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_page_cache_is_free_whichever_list_it_is_on(tmp_path: Path) -> None:
    """Weights that two ranks have mapped are active; an arena is `shmem`, and is not free."""
    cache = {"inactive_file": 30 * GIB, "active_file": 100 * GIB, "slab_reclaimable": GIB}
    group(tmp_path / "tree", 256 * GIB, 143 * GIB, **cache)
    found = group_memory(tmp_path / "tree", member(tmp_path, "0::/"))
    assert found == GroupMemory(256 * GIB, (256 - 143 + 131) * GIB)


def test_every_group_above_counts(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    group(tree / "pod", 64 * GIB, 60 * GIB)
    group(tree / "pod" / "engine", 100 * GIB, GIB)
    group(tree / "pod" / "engine" / "worker", "max", GIB)
    group(tree / "other", GIB, GIB)
    found = group_memory(tree, member(tmp_path, "0::/pod/engine/worker"))
    assert found == GroupMemory(64 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("limit", "high", "lowest"),
    [("max", 8 * GIB, 8), (64 * GIB, 8 * GIB, 8), (8 * GIB, 64 * GIB, 8), (8 * GIB, "max", 8)],
)
def test_the_lower_one_of_both_limits_counts(
    tmp_path: Path, limit: int | str, high: int | str, lowest: int
) -> None:
    """Docker and Kubernetes set `memory.max`, systemd's `MemoryHigh` the other one."""
    group(tmp_path / "tree" / "pod", limit, GIB)
    (tmp_path / "tree" / "pod" / "memory.high").write_text(f"{high}\n")
    group(tmp_path / "tree" / "pod" / "engine", 32 * GIB, GIB)
    found = group_memory(tmp_path / "tree", member(tmp_path, "0::/pod/engine"))
    assert found == GroupMemory(lowest * GIB, (lowest - 1) * GIB)


@pytest.mark.parametrize("path", ["/docker/0123", "/../../kubepods/pod1", "/"])
def test_a_container_whose_path_is_the_hosts(tmp_path: Path, path: str) -> None:
    """It sees its own group as the root, whatever the path says."""
    group(tmp_path / "tree", 8 * GIB, GIB)
    found = group_memory(tmp_path / "tree", member(tmp_path, f"0::{path}"))
    assert found == GroupMemory(8 * GIB, 7 * GIB)


def test_the_first_generation(tmp_path: Path) -> None:
    memory = tmp_path / "tree" / "memory"
    group_v1(memory, V1_UNLIMITED, GIB)
    cache = {"total_active_file": 3 * GIB, "active_file": GIB, "total_inactive_file": 2 * GIB}
    group_v1(memory / "engine", 16 * GIB, 10 * GIB, **cache)
    lines = ("9:name=systemd:/", "4:hugetlb,memory:/engine", "1:cpu:/", "0::/")
    found = group_memory(tmp_path / "tree", member(tmp_path, *lines))
    assert found == GroupMemory(16 * GIB, 11 * GIB)


def test_where_there_is_no_limit(tmp_path: Path) -> None:
    assert group_memory(tmp_path / "none", tmp_path / "none") == NOTHING
    assert group_memory(tmp_path / "none", member(tmp_path, "0::/a/b", "nonsense", "")) == NOTHING
    group(tmp_path / "tree", "max", GIB)
    assert group_memory(tmp_path / "tree", member(tmp_path, "0::/")).limit == NO_LIMIT
    (tmp_path / "tree" / "memory.stat").write_text("torn")
    assert group_memory(tmp_path / "tree", member(tmp_path, "0::/")) == NOTHING


def test_more_in_use_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    group(tmp_path / "tree", GIB, 2 * GIB)
    assert group_memory(tmp_path / "tree", member(tmp_path, "0::/")).available == 0


def test_both_checks_know_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The early one before the model loads, the late one before memory is taken."""
    host = SimpleNamespace(total=1024 * GIB, available=900 * GIB)
    limits = GroupMemory(64 * MIB, 20 * MIB)
    monkeypatch.setattr(early, "group_memory", lambda: limits)
    monkeypatch.setattr("psutil.virtual_memory", lambda: host)
    memory = Machine().memory()
    assert (memory.total, memory.available) == (64 * MIB, 20 * MIB)
    config = parse({"tiers": [{"type": "cpu", "capacity": "25%", "arena_dir": str(tmp_path)}]})
    assert cpu_capacity(config.cpu, Machine()) == 16 * MIB, "a share is of the container"
    early.check_machine(config, Machine())
    config = parse({"tiers": [{"type": "cpu", "capacity": "21MiB", "arena_dir": str(tmp_path)}]})
    with pytest.raises(ConfigError, match="20.0 MiB available"):
        early.check_machine(config, Machine())
    probed = probe_machine(str(tmp_path))
    assert probed.available_bytes == 20 * MIB
    with pytest.raises(ConfigError, match="20.0 MiB of memory is available"):
        check_capacity(21 * MIB, str(tmp_path), probed)
