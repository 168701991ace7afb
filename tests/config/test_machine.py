"""Does it fit the machine? Asked of a twin, and of this machine without leaving a trace."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.users import unprivileged

from kvcascade.assembly.path_parts import path_options
from kvcascade.config.machine import (
    FREE_ATTEMPTS,
    RECORD_FILE,
    Disk,
    Machine,
    Memory,
    PathKind,
    check_machine,
    check_nvme,
    cpu_capacity,
    is_free,
    nvme_capacity,
    nvme_held_bytes,
    settled,
    warnings_of,
    writing,
)
from kvcascade.config.schema import CascadeConfig, parse
from kvcascade.errors import ConfigError

GIB = 2**30
SHM = Path("/dev/shm")


@dataclass
class Twin(Machine):
    """A machine of 64 GiB memory and disks of 1 TiB with 500 GiB free, one per /mnt/N."""

    folders: set[Path] = field(
        default_factory=lambda: {Path(p) for p in ("/", "/dev/shm", "/mnt", "/mnt/0", "/mnt/1")}
    )
    files: set[Path] = field(default_factory=set)
    read_only: set[Path] = field(default_factory=set)
    available: int = 48 * GIB
    shm_free: int = 40 * GIB
    disk_free: int = 500 * GIB
    used: dict[Path, int] = field(default_factory=dict)
    recorded: int = 0
    kept: int = 0
    arena_lies_on: str = "tmpfs"
    gpus: int = 0

    def memory(self) -> Memory:
        return Memory(total=64 * GIB, available=self.available)

    def kind(self, path: Path) -> PathKind:
        if path in self.folders:
            return PathKind.FOLDER
        return PathKind.OTHER if path in self.files else PathKind.MISSING

    def identity(self, path: Path) -> object:
        return path

    def writable(self, folder: Path) -> bool:
        return folder not in self.read_only

    def disk(self, folder: Path) -> Disk:
        if folder == SHM:
            return Disk(device=1, total=64 * GIB, free=self.shm_free)
        device = 2 + int(folder.name) if folder.name.isdigit() else 0
        return Disk(device=device, total=1024 * GIB, free=self.disk_free)

    def file_system(self, folder: Path) -> str:
        return self.arena_lies_on

    def kept_by_arenas(self, folder: Path) -> int:
        return self.kept

    def devices(self) -> int:
        return self.gpus

    def used_by_namespaces(self, folder: Path) -> int:
        return self.used.get(folder, 0)

    def recorded_capacity(self, folder: Path) -> int:
        return self.recorded


def configured(cpu: dict[str, Any] | None = None, **nvme: Any) -> Any:
    cpu = {"type": "cpu", "capacity": "8GiB"} | (cpu or {})
    disk = {"type": "nvme", "capacity": "100GiB", "path": "/mnt/0/kv"} | nvme
    return parse({"tiers": [cpu, disk]})


def message(config: Any, machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(config, machine)
    text = str(caught.value)
    assert text.endswith(".") and ". " not in text.replace("/.. ", "") and "\n" not in text
    assert ";" in text, f"a remedy follows the problem: {text}"
    return text


def test_an_arena_that_another_worker_looks_at_is_free(tmp_path: Path) -> None:
    """The workers of an engine check at the same moment, and each locks the arena for a moment."""
    arena = tmp_path / "kvcascade-kept-0"
    arena.touch()
    for attempts in (1, FREE_ATTEMPTS - 1, FREE_ATTEMPTS):
        waits: list[float] = []
        with arena.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)

            def wait(seconds: float, waits: list[float] = waits, n: int = attempts) -> None:
                waits.append(seconds)
                if len(waits) == n:
                    fcntl.flock(other, fcntl.LOCK_UN)

            assert is_free(arena, wait) == (attempts < FREE_ATTEMPTS)
        assert len(waits) == min(attempts, FREE_ATTEMPTS - 1)
    assert not is_free(tmp_path / "gone", waits.append)


@pytest.mark.parametrize(
    ("enough", "less"),
    [
        (Twin(available=16 * GIB), Twin(available=15 * GIB)),
        (Twin(shm_free=16 * GIB), Twin(shm_free=15 * GIB)),
    ],
)
def test_engines_that_start_together_need_room_for_a_cpu_tier_each(
    enough: Twin, less: Twin
) -> None:
    check_machine(configured(), enough, engines=2)
    with pytest.raises(ConfigError, match=r"tiers\[0\].*\(15\.0 GiB.* for 2 engines\)"):
        check_machine(configured(), less, engines=2)
    check_machine(configured(capacity="400GiB"), Twin(), engines=2)  # they share the disk


@pytest.mark.parametrize(
    ("mode", "capacity", "chosen", "why", "lost"),
    [
        (None, "16GiB", "back", "tiers[1] is at least 2 times as large as tiers[0]", "7 s"),
        (None, "15GiB", "demote", "tiers[1] is less than 2 times as large as tiers[0]", "CPU tier"),
        ("demote", "100GiB", "demote", "as configured", "CPU tier"),
        ("back", "1GiB", "back", "as configured", "7 s"),
        ("through", "1GiB", "through", "as configured", "not written yet"),
    ],
)
def test_the_write_mode_and_what_a_stop_loses(
    mode: str | None, capacity: str, chosen: str, why: str, lost: str
) -> None:
    disk = {"type": "nvme", "capacity": capacity, "path": "/mnt/0/kv"}
    tiers = [{"type": "cpu", "capacity": "8GiB"}, disk]
    found = writing(parse({"tiers": tiers, "write_mode": mode, "dirty_age_s": 7}), Twin())
    assert found is not None
    assert (found.mode, found.why) == (chosen, why) and lost in found.may_lose
    assert all(part in str(found) for part in (f'"{chosen}"', why, found.may_lose))


def test_shares_of_the_machine_count_as_what_they_come_to() -> None:
    """Of 64 GiB memory and a disk of 1 TiB: 32 GiB above, 61 and 72 GiB below."""
    for share, mode in (("6%", "demote"), ("7%", "back")):
        found = writing(configured({"capacity": "50%"}, capacity=share), Twin())
        assert found is not None and found.mode == mode


def test_of_several_tiers_below_the_next_one_counts() -> None:
    disks = [
        {"type": "nvme", "capacity": size, "path": f"/mnt/{number}/kv"}
        for number, size in enumerate(("8GiB", "100GiB"))
    ]
    config = parse({"tiers": [{"type": "cpu", "capacity": "8GiB"}, *disks]})
    found = writing(config, Twin())
    assert found is not None and found.mode == "demote"


def test_one_tier_writes_nothing_down() -> None:
    config = parse({"tiers": [{"type": "cpu", "capacity": "8GiB"}], "write_mode": "back"})
    assert writing(config, Twin()) is None


def test_a_machine_that_fits() -> None:
    twin = Twin()
    check_machine(configured(), twin)
    check_machine(configured(path=["/mnt/0/kv", "/mnt/1/kv"], capacity="800GiB"), twin)
    check_machine(configured({"capacity": "50%"}, capacity="40%"), twin)
    check_machine(configured(path="/mnt/0"), twin)


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        ({"files": {Path("/mnt/0/log")}}, "is a file, not a folder"),
        ({"read_only": {Path("/mnt/0")}}, "cannot be"),
    ],
)
def test_a_record_that_cannot_be_written(machine: dict[str, Any], problem: str) -> None:
    tiers = [{"type": "cpu", "capacity": "8GiB"}]
    config = parse({"tiers": tiers, "record": "/mnt/0/log"})
    check_machine(config, Twin())
    text = message(config, Twin(**machine))
    assert text.startswith('record: "/mnt/0/log"') and problem in text


def test_reserved_huge_pages_are_not_of_the_memory_that_is_available() -> None:
    small = Twin(available=GIB)
    assert "more memory than there is" in message(configured(), small)
    check_machine(configured(), Twin(available=GIB, arena_lies_on="hugetlbfs"))
    assert "has free" in message(configured(), Twin(shm_free=GIB, arena_lies_on="hugetlbfs"))


def test_shares_are_of_the_machine() -> None:
    config, twin = (
        configured({"capacity": "25%"}, capacity="10%", path=["/mnt/0", "/mnt/1"]),
        Twin(),
    )
    assert cpu_capacity(config.cpu, twin) == 16 * GIB
    assert nvme_capacity(config.nvme[0], twin) == 2048 * GIB // 10
    one_disk = configured(capacity="10%", path=["/mnt/0/a", "/mnt/0/b"])
    assert nvme_capacity(one_disk.nvme[0], twin) == 1024 * GIB // 10


@pytest.mark.parametrize(
    ("cpu", "nvme", "machine", "parts"),
    [
        (
            {"capacity": "49GiB"},
            {},
            {"shm_free": 60 * GIB},
            ['tiers[0].capacity: "49GiB"', "48.0 GiB available", "lower it"],
        ),
        (
            {"capacity": "90%"},
            {},
            {},
            ['tiers[0].capacity: "90% = 57.6 GiB"', "48.0 GiB available"],
        ),
        (
            {"capacity": "44GiB"},
            {},
            {},
            ['tiers[0].capacity: "44GiB"', "/dev/shm has free (40.0 GiB)", "tiers[0].arena_dir"],
        ),
        (
            {"arena_dir": "/mnt/huge"},
            {},
            {},
            ['tiers[0].arena_dir: "/mnt/huge"', "not a folder that exists"],
        ),
        ({}, {}, {"read_only": {SHM}}, ['tiers[0].arena_dir: "/dev/shm"', "cannot be written"]),
        ({"persist": True}, {}, {"arena_lies_on": "xfs"}, ["tiers[0].arena_dir", "is on xfs"]),
        (
            {},
            {"capacity": "501GiB"},
            {},
            ['tiers[1].capacity: "501GiB"', "500.0 GiB for this tier on /mnt/0/kv", "lower it"],
        ),
        ({}, {"capacity": "60%"}, {}, ['tiers[1].capacity: "60% = 614.4 GiB"']),
        (
            {},
            {"capacity": "480GiB"},
            {},
            ["tiers[1].min_free", '"5% = 51.2 GiB"', 'tiers[1].capacity "480GiB"', "lower one"],
        ),
        ({}, {"min_free": "100%"}, {}, ["tiers[1].min_free", "is all of the disk (1.0 TiB"]),
        ({}, {"min_free": "2TiB"}, {}, ['tiers[1].min_free: "2TiB"', "is all of the disk"]),
        (
            {},
            {},
            {"files": {Path("/mnt/0/kv")}},
            ['tiers[1].path: "/mnt/0/kv" is a file', "give a folder"],
        ),
        (
            {},
            {"path": "/mnt/0/kv/a/b"},
            {"files": {Path("/mnt/0/kv")}},
            ['tiers[1].path: "/mnt/0/kv/a/b"', "below /mnt/0/kv, which is a file"],
        ),
        (
            {},
            {"path": "/mnt/0"},
            {"read_only": {Path("/mnt/0")}},
            ['tiers[1].path: "/mnt/0" cannot be written', "permissions"],
        ),
        (
            {},
            {},
            {"read_only": {Path("/mnt/0")}},
            ['tiers[1].path: "/mnt/0/kv" cannot be created', "because /mnt/0 cannot be written"],
        ),
        (
            {},
            {"path": ["/mnt/0/kv", "/mnt/1/kv"]},
            {"files": {Path("/mnt/1/kv")}},
            ['tiers[1].path: "/mnt/1/kv" is a file'],
        ),
        (
            {},
            {"path": ["/mnt/0/kv", "/mnt/1/kv/one-1a2b3c4d5e6f"]},
            {"files": {Path("/mnt/1/kv/one-1a2b3c4d5e6f/namespace.json")}},
            ["is a namespace of the tier in /mnt/1/kv; give /mnt/1/kv"],
        ),
    ],
)
def test_refused(
    cpu: dict[str, Any], nvme: dict[str, Any], machine: dict[str, Any], parts: list[str]
) -> None:
    text = message(configured(cpu, **nvme), Twin(**machine))
    for part in parts:
        assert part in text


@pytest.mark.parametrize("size", ["0.0000001%", 64, "4KiB"])
def test_less_than_any_block(size: object) -> None:
    text = message(configured({"capacity": size}), Twin())
    assert text.startswith("tiers[0].capacity: ") and "is too small for a block" in text
    if size != "0.0000001%":
        text = message(configured(capacity=size), Twin())
        assert text.startswith("tiers[1].capacity: ") and "is too small for a block" in text


@pytest.mark.parametrize("name", ["segment_size", "min_share"])
def test_a_segment_or_share_that_is_more_than_the_tier(name: str) -> None:
    large: dict[str, Any] = {name: "1TiB"}
    for capacity in ("64MiB", "0.01%"):
        text = message(configured(capacity=capacity, min_free=0, **large), Twin())
        assert text.startswith(f'tiers[1].{name}: "1TiB"') and capacity in text


def test_an_arena_on_a_disk_brings_a_warning() -> None:
    for kind in ("tmpfs", "ramfs", "hugetlbfs"):
        assert warnings_of(configured(), Twin(arena_lies_on=kind)) == []
    (warning,) = warnings_of(configured(), Twin(arena_lies_on="ext4"))
    assert warning.startswith('tiers[0].arena_dir: "/dev/shm" is on ext4') and ";" in warning


def test_a_share_of_nearly_nothing() -> None:
    assert "is 0 bytes on this machine" in message(
        configured({"capacity": "0.0000000001%"}), Twin()
    )
    assert "is 0 bytes on /mnt/0/kv" in message(configured(capacity="0.00000000001%"), Twin())


@pytest.mark.parametrize(
    ("cpu", "nvme", "said"),
    [
        ("8GiB", "8GiB", None),
        ("8GiB", "9GiB", None),
        ("8GiB", "7GiB", '"7GiB" is smaller than the CPU tier (8.0 GiB)'),
        ("50%", "1%", '"1% = 10.2 GiB" is smaller than the CPU tier (32.0 GiB)'),
    ],
)
def test_an_nvme_tier_smaller_than_the_cpu_tier_brings_a_warning(
    cpu: str, nvme: str, said: str | None
) -> None:
    config = configured({"capacity": cpu}, capacity=nvme)
    remedy = "so blocks are written again and again; raise it, or lower tiers[0].capacity."
    expected = [] if said is None else [f"tiers[1].capacity: {said}, {remedy}"]
    assert warnings_of(config, Twin()) == expected


@pytest.mark.parametrize(
    ("sizes", "named"), [(("7GiB", "6GiB"), ["tiers[1]", "tiers[2]"]), (("7GiB", "100GiB"), [])]
)
def test_nvme_tiers_that_are_all_too_small_are_named(sizes: tuple[str], named: list[str]) -> None:
    """A large tier still holds what a small one evicts, so that nothing is written again."""
    disks = [
        {"type": "nvme", "capacity": size, "path": f"/mnt/{number}/kv"}
        for number, size in enumerate(sizes)
    ]
    config = parse({"tiers": [{"type": "cpu", "capacity": "8GiB"}, *disks]})
    assert [warning.split(".")[0] for warning in warnings_of(config, Twin())] == named
    assert warnings_of(parse({"tiers": [{"type": "cpu", "capacity": "8GiB"}]}), Twin()) == []


def test_what_the_tier_holds_already_is_not_missed() -> None:
    twin = Twin(disk_free=60 * GIB, used={Path("/mnt/0/kv"): 100 * GIB})
    check_machine(configured(capacity="100GiB"), twin)
    assert not warnings_of(configured(capacity="100GiB"), twin)
    full = Twin(disk_free=0, used={Path("/mnt/0/kv"): 100 * GIB}, recorded=200 * GIB)
    check_machine(configured(capacity="200GiB"), full)  # other files filled the disk: a restart
    (warning,) = warnings_of(configured(capacity="200GiB"), full)
    assert "100.0 GiB for this tier" in warning
    assert "100.0 GiB for this tier" in message(configured(capacity="201GiB"), full)
    cpu = {"type": "cpu", "capacity": "8GiB"}
    by_default = parse({"tiers": [cpu, {"type": "nvme", "path": "/mnt/0/kv"}]})
    for recorded in (100, 50):
        held = replace(full, recorded=recorded * GIB)
        check_machine(by_default, held)
        assert nvme_capacity(by_default.nvme[0], held) == recorded * GIB


class SmallerSecondDisk(Twin):
    """Its second disk has 58.8 GiB beside the reserve, the first one 448.8 GiB."""

    def disk(self, folder: Path) -> Disk:
        found = super().disk(folder)
        return replace(found, free=110 * GIB) if folder == Path("/mnt/1") else found


@pytest.mark.parametrize(
    ("paths", "capacity", "held"),
    [
        (["/mnt/0/kv", "/mnt/1/kv"], 200, 158.8),
        (["/mnt/0/kv", "/mnt/1/kv"], 117, 117),
        (["/mnt/0/a", "/mnt/0/b", "/mnt/1/kv"], 300, 258.8),
        (["/mnt/0/a", "/mnt/0/b"], 300, 300),
        (["/mnt/0/a", "/mnt/0/b", "/mnt/0/c"], 100, 100),
    ],
)
def test_of_unequal_disks_each_folder_holds_its_part(
    paths: list[str], capacity: int, held: float
) -> None:
    config, twin = configured(path=paths, capacity=f"{capacity}GiB"), SmallerSecondDisk()
    check_machine(config, twin)
    parts = nvme_held_bytes(config.nvme[0], twin)
    assert sum(part for _, part in parts) == pytest.approx(held * GIB)
    said = warnings_of(config, twin)
    assert bool(said) == (held < capacity)
    if said:
        assert f"is more than {held} GiB, which these disks hold" in said[0]


def test_two_paths_on_one_device_count_it_once() -> None:
    both = configured(path=["/mnt/0/a", "/mnt/0/b"], capacity="600GiB")
    assert "500.0 GiB for this tier" in message(both, Twin())


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every entry below a folder with its mode, change time and content."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("new/kv", {}),
        ("data", {}),
        ("data", {"capacity": "9000TiB"}),
        ("new/kv", {"capacity": "9000TiB"}),
        ("data", {"min_free": "100%"}),
        ("file", {}),
        ("file/below", {}),
        ("nowhere", {}),
    ],
)
def test_this_machine_is_left_as_it_was(tmp_path: Path, path: str, options: dict[str, Any]) -> None:
    namespace = tmp_path / "data" / "model-0123"
    (namespace / "segments").mkdir(parents=True)
    (namespace / "namespace.json").write_text("{}")
    (namespace / "segments" / "000000.safetensors").write_bytes(os.urandom(1 << 16))
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    before = snapshot(tmp_path)
    nvme = {"capacity": "1MiB", "path": str(tmp_path / path), "min_free": 0} | options
    with TemporaryDirectory(dir=SHM) as shared:  # of its own: engines beside this test use SHM
        config = configured({"capacity": "1MiB", "arena_dir": shared}, **nvme)
        if path in {"new/kv", "data"} and not options:
            check_machine(config, Machine())
        else:
            assert message(config, Machine())
        assert snapshot(tmp_path) == before
        assert os.listdir(shared) == []


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("is_one_tier", [True, False])
def test_a_folder_is_used_once_whatever_it_is_called(
    tmp_path: Path, is_there: bool, is_one_tier: bool
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    below = "." if is_there else "new/kv"
    first, second = (str(tmp_path / name / below) for name in ("disk", "link"))
    shape = {"type": "nvme", "capacity": "1MiB", "min_free": 0}
    tiers = [{**shape, "path": first}, {**shape, "path": second}]
    if is_one_tier:
        tiers = [{**shape, "path": [first, second]}]
    config = parse({"tiers": [{"type": "cpu", "capacity": "1MiB"}, *tiers]})
    text = message(config, Machine())
    assert text.startswith(f"{config.tiers[-1].key}.path: ")
    assert "is the same folder as" in text and str(tmp_path / "disk") in text


def with_folder(key: str, path: str) -> CascadeConfig:
    """Return a configuration of all kinds of folders, with this one at `key`."""
    places = {
        "tiers[0].arena_dir": "/dev/shm",
        "tiers[1].path": "/dev/shm/kvcascade-nowhere",
        "record": "/dev/shm/kvcascade-nowhere",
    } | {key: path}
    cpu = {"type": "cpu", "capacity": "1MiB", "arena_dir": places["tiers[0].arena_dir"]}
    nvme = {"type": "nvme", "capacity": "1MiB", "min_free": 0, "path": places["tiers[1].path"]}
    return parse({"tiers": [cpu, nvme], "record": places["record"]})


@pytest.mark.parametrize("key", ["tiers[0].arena_dir", "tiers[1].path", "record"])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_path_that_cannot_be_looked_at(tmp_path: Path, key: str, is_closed: bool) -> None:
    """In a folder that this user may not search, or longer than the system takes."""
    (tmp_path / "closed").mkdir(mode=0)
    path = str(tmp_path / "closed" / "kv") if is_closed else f"/{'x' * 5000}"
    config = with_folder(key, path)
    with unprivileged():
        text = message(config, Machine())
    assert text.startswith(f"{key}: ") and "cannot be read (" in text


@pytest.mark.parametrize(
    ("key", "below"),
    [
        ("tiers[0].arena_dir", "."),
        ("tiers[1].path", "."),
        ("tiers[1].path", "a/b"),
        ("record", "."),
        ("record", "a"),
    ],
)
def test_a_link_to_nothing_is_named_as_such(key: str, below: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    noted: list[str] = []
    check_machine(with_folder(key, str(link / below)), Machine(), noted)
    (text,) = noted
    assert text.startswith(f"{key}: ") and f"{link} is a link to" in text


def test_of_several_folders_only_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").symlink_to(tmp_path / "gone")
    paths, noted = [str(tmp_path / "a"), str(tmp_path / "b" / "kv")], list[str]()
    check_nvme(configured(path=paths, capacity="1MiB", min_free=0), Machine(), noted)
    (text,) = noted
    assert text.startswith(f'tiers[1].path: "{paths[1]}" cannot be read ({tmp_path / "b"} is a')


def test_this_machine(tmp_path: Path) -> None:
    machine = Machine()
    memory, disk = machine.memory(), machine.disk(tmp_path)
    assert 0 < memory.available <= memory.total
    assert 0 < disk.free <= disk.total
    assert machine.kind(tmp_path) is PathKind.FOLDER
    assert machine.kind(tmp_path / "a" / "b") is PathKind.MISSING
    assert machine.writable(tmp_path)
    tmp_path.chmod(0o555)
    assert machine.writable(tmp_path) is (os.geteuid() == 0), "permissions do not bind root"


def test_a_file_system_that_became_read_only_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of the device `access` still grants writes."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert os.access(tmp_path, os.W_OK) and not Machine().writable(tmp_path)


def test_only_namespaces_count_as_used(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.used_by_namespaces(tmp_path / "missing") == 0
    namespace, other = tmp_path / "model-01", tmp_path / "other"
    for folder in (namespace, other):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "data").write_bytes(os.urandom(1 << 20))
    (namespace / "namespace.json").write_text(json.dumps({}))
    assert 1 << 20 <= machine.used_by_namespaces(tmp_path) < 2 << 20


@pytest.mark.parametrize(
    ("gpus", "workers", "share"),
    [(8, 1, 8), (8, 8, 1), (8, 2, 4), (0, 1, 8), (1, 1, 1), (4, 8, 1)],
)
def test_the_default_share_of_memory_is_divided_by_devices(
    gpus: int, workers: int, share: int
) -> None:
    twin = Twin(gpus=gpus)
    config = settled(parse({"path": "/mnt/0/kv"}), twin, workers)
    assert cpu_capacity(config.cpu, twin) == 64 * GIB * 4 // 10 // share
    assert share * cpu_capacity(config.cpu, twin) <= twin.available, "engines on all devices fit"
    check_machine(config, twin)


def test_a_configuration_without_its_first_tier_stays_as_it_is() -> None:
    noted: list[str] = []
    config = parse({"tiers": [{"type": "ssd"}]}, noted=noted)
    assert noted and settled(config, Twin(), 1) is config


def test_a_given_capacity_does_not_depend_on_devices() -> None:
    config = configured()
    assert settled(config, Twin(gpus=8), 1) == config


def test_the_default_share_of_the_disk_leaves_room_for_what_is_there() -> None:
    twin = Twin(used={Path("/mnt/0/kv"): 100 * GIB})
    config = parse({"path": "/mnt/0/kv"})
    reserve = 1024 * GIB * 5 // 100
    assert nvme_capacity(config.nvme[0], twin) == (500 * GIB + 100 * GIB - reserve) * 8 // 10
    check_nvme(config, twin)
    full = Twin(disk_free=1 * GIB)
    assert nvme_capacity(config.nvme[0], full) == 0
    told = message(config, full)
    assert told.startswith('tiers[1].min_free: "5% = 51.2 GiB" leaves nothing of 1.0 GiB')
    assert "free space there" in told


def test_a_record_that_is_a_pipe_or_huge_is_none(tmp_path: Path) -> None:
    """The check of a start waited for a writer of the pipe without end."""
    record = tmp_path / RECORD_FILE
    record.parent.mkdir()
    os.mkfifo(record)
    assert Machine().recorded_capacity(tmp_path) == 0
    record.unlink()
    with record.open("wb") as file:
        file.truncate(1 << 40)
    assert Machine().recorded_capacity(tmp_path) == 0


def test_this_machine_counts_its_devices() -> None:
    assert Machine().devices() >= 0


def test_a_share_that_stays_free_is_that_of_the_smallest_disk() -> None:
    """It is kept on each disk of the tier."""

    class Unequal(Twin):
        def disk(self, folder: Path) -> Disk:
            found = super().disk(folder)
            return replace(found, total=found.total // 100) if folder.name == "1" else found

    config = configured(path=["/mnt/0/kv", "/mnt/1/kv"], min_free="10%")
    smallest = Unequal().disk(Path("/mnt/1")).total
    assert path_options(config.nvme[0], Unequal()).min_free_bytes == smallest // 10
