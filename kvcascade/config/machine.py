"""Check that a configuration fits this machine, before anything is allocated or created.

`check_machine` compares a parsed configuration with the memory, disks and folders of a `Machine`.
It raises a `ConfigError` of one sentence for the first option that does not fit. It leaves nothing
behind. Tests pass a twin of `Machine`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import psutil

from ..errors import ConfigError, file_mode
from .cgroup import group_memory
from .options import At, noting
from .schema import CascadeConfig, CpuTierOptions, NvmeTierOptions, WriteMode
from .sizes import MAX_RECORD_BYTES, AnySize, Bytes, DeviceShare, FreeShare, Share, human

KEPT_ARENAS = "kvcascade-kept-*"
"""Pattern of the arenas that outlived their engines, in the folder of arenas."""
HUGETLBFS = "hugetlbfs"
"""File system of reserved huge pages, which are not part of the available memory."""
MEMORY_FILE_SYSTEMS = frozenset({HUGETLBFS, "tmpfs", "ramfs"})
MIN_CAPACITY_BYTES = 8192
"""Smallest capacity that can hold a block: a header and a page."""
BACK_RATIO = 2
"""Ratio of NVMe to CPU capacity from which on the NVMe tier can copy all of the CPU tier."""
DEVICES_IF_NONE = 8
"""Number of engines for which the default share of memory is divided on a machine without GPUs."""
GPU_FOLDERS = (Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes"))
"""Folders with one entry per GPU of the machine, in containers too. The second one, of AMD, also
lists processors, whose `simd_count` is 0."""
FREE_ATTEMPTS = 10
FREE_POLL_S = 0.005
"""Number of attempts to lock an arena, and seconds between two. Workers of one engine look at the
same moment, and each locks it for microseconds."""
NAMESPACE_FILE = "namespace.json"
"""A folder that holds this file is a namespace of an NVMe tier."""
RECORD_FILE = Path(".kvcascade", "path.json")
"""File in the first folder of a path with the options that are in force."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine, or of its container if that has less, in bytes."""

    total: int
    """All there is."""
    available: int
    """Memory that can be allocated without swapping."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system, in bytes."""

    device: int
    """Number that identifies the file system."""
    total: int = field(compare=False)
    """All there is."""
    free: int = field(compare=False)
    """Space that this user may still write."""


class PathKind(Enum):
    """What is at a path."""

    MISSING = "missing"
    FOLDER = "folder"
    OTHER = "other"


class Machine:
    """The machine that this process runs on; tests pass a twin.

    Methods raise `OSError` if the machine cannot answer.
    """

    def memory(self) -> Memory:
        """Return the current memory. Raises `ConfigError` if /proc does not say."""
        try:
            found, group = psutil.virtual_memory(), group_memory()
        except OSError as error:
            problem = f"the memory of this machine is not known ({error})"
            raise ConfigError(f"{problem}; mount /proc") from None
        total = min(found.total, group.limit)
        return Memory(total=total, available=min(found.available, group.available, total))

    def kind(self, path: Path) -> PathKind:
        """Return the kind of `path`, following links."""
        mode = file_mode(path)
        if mode:
            return PathKind.FOLDER if stat.S_ISDIR(mode) else PathKind.OTHER
        if os.path.lexists(path):
            problem = f"{path} is a link to nothing"
            raise FileNotFoundError(errno.ENOENT, problem, str(path))
        return PathKind.MISSING

    def identity(self, path: Path) -> object:
        """Return a value that is equal for paths that lead to one folder, existing or not."""
        real = Path(os.path.realpath(path))
        nearest = nearest_existing(real, self)
        found = nearest.stat()  # a folder that is mounted twice has two real paths
        return found.st_dev, found.st_ino, real.relative_to(nearest)

    def file_system(self, folder: Path) -> str:
        """Return the type of the file system that holds a folder, such as "tmpfs"."""
        return file_system_of(str(folder))

    def kept_by_arenas(self, folder: Path) -> int:
        """Return the bytes of a folder's arenas that outlived their engines.

        Those that a live engine holds do not count: no other engine takes them over.
        """
        found = [path for path in folder.glob(KEPT_ARENAS) if is_free(path)]
        return sum(path.lstat().st_blocks * 512 for path in found)

    def writable(self, folder: Path) -> bool:
        """Return whether this process may create files in an existing folder.

        It makes a file without a name, where there are such: a file system that became read-only
        after an error still grants access.
        """
        if not os.access(folder, os.W_OK | os.X_OK):
            return False
        try:
            os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            return error.errno != errno.EROFS
        return True

    def disk(self, folder: Path) -> Disk:
        """Return the file system that holds an existing folder."""
        found = os.statvfs(folder)
        return Disk(
            device=os.stat(folder).st_dev,
            total=found.f_blocks * found.f_frsize,
            free=found.f_bavail * found.f_frsize,
        )

    def devices(self) -> int:
        """Return the number of GPUs of the machine; 0 if there is none, or none can be counted."""
        nvidia, amd = GPU_FOLDERS
        if os.path.isdir(nvidia):
            return len(list(nvidia.iterdir()))
        return sum(map(_has_compute_units, amd.glob("*/properties")))

    def used_by_namespaces(self, folder: Path) -> int:
        """Return the bytes of all namespaces in a folder; 0 if the folder does not exist."""
        namespaces = [found.parent for found in folder.glob(f"*/{NAMESPACE_FILE}")]
        return sum(_bytes_below(namespace) for namespace in namespaces)

    def recorded_capacity(self, folder: Path) -> int:
        """Return the capacity that is recorded with a path in its first folder; 0 if none is."""
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            fd = os.open(folder / RECORD_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:  # a pipe must not block, nor a huge file take memory
                return int(json.loads(file.read(MAX_RECORD_BYTES))["options"]["capacity_bytes"])
        return 0


def settled(config: CascadeConfig, machine: Machine, workers: int) -> CascadeConfig:
    """Return the configuration with the default share of memory for an engine of `workers`.

    Every process of an engine gets the same result, because only constant facts of the machine
    count: its memory (or that of its container) and its devices. A configuration whose first tier
    could not be parsed stays as it is.
    """
    first = config.tiers[0] if config.tiers else None
    if not isinstance(first, CpuTierOptions) or not isinstance(first.capacity, DeviceShare):
        return config
    present = max(workers, machine.devices() or DEVICES_IF_NONE)
    share = replace(first.capacity, used=workers, present=present)
    return replace(config, tiers=(replace(first, capacity=share), *config.tiers[1:]))


def nvme_disk_bytes(tier: NvmeTierOptions, machine: Machine) -> int:
    """Return the total size of the tier's disks in bytes."""
    return sum(disk.total for disk in disks_of(tier, machine))


def check_machine(
    config: CascadeConfig, machine: Machine, noted: list[str] | None = None, engines: int = 1
) -> None:
    """Raise `ConfigError` for the first option that does not fit the machine, or collect all.

    `engines`: number of engines that each make a CPU tier. They share the other tiers.
    """
    for tier in config.tiers[:1]:
        # With `noted`, a tier that could not be parsed is absent.
        if isinstance(tier, CpuTierOptions):
            at = At(f"{tier.key}.arena_dir")
            with noting(noted), _looking_at(at, tier.arena_dir):
                _check_cpu(tier, machine, engines)
    check_nvme(config, machine, noted)
    if config.record is not None:
        with noting(noted):
            _check_folder(At("record"), config.record, machine)


def check_nvme(config: CascadeConfig, machine: Machine, noted: list[str] | None = None) -> None:
    """Do as `check_machine`, for the NVMe tiers only."""
    owners: dict[object, Path] = {}
    for tier in config.nvme:
        at = At(f"{tier.key}.path")
        for path in tier.path:
            with noting(noted):
                _check_path(at, path, machine, owners)
        with noting(noted), _looking_at(at, *tier.path):
            _check_disks(tier, machine)


def _check_path(at: At, path: Path, machine: Machine, owners: dict[object, Path]) -> None:
    """Check a tier's folder, and that no other path is the same; `owners`: paths by identity."""
    _check_folder(at, path, machine)
    refuse_namespace(at, path, machine)
    with _looking_at(at, path):
        owner = owners.setdefault(machine.identity(path), path)
    if owner is not path:
        raise at.wrong(str(path), f"is the same folder as {owner}; give every folder once")


def warnings_of(config: CascadeConfig, machine: Machine) -> list[str]:
    """Return warnings about options that work but are probably not intended."""
    found = [
        _room_warning(tier, machine) or _unequal_warning(tier, machine) for tier in config.nvme
    ]
    lacks = [str(lack) for lack in found if lack is not None]
    return lacks + small_tier_warnings(config, machine) + _arena_warnings(config, machine)


def small_tier_warnings(config: CascadeConfig, machine: Machine) -> list[str]:
    """Return warnings if every NVMe tier is smaller than the CPU tier.

    They evict blocks that the CPU tier still has, so that these must be written again.
    """
    cpu_bytes = cpu_capacity(config.cpu, machine)
    sized = [(tier, nvme_capacity(tier, machine)) for tier in config.nvme]
    if any(size >= cpu_bytes for _, size in sized):
        return []
    remedy = f"so blocks are written again and again; raise it, or lower {config.cpu.key}.capacity"
    problem = f"is smaller than the CPU tier ({human(cpu_bytes)}), {remedy}"
    return [
        str(At(f"{tier.key}.capacity").wrong(_written(tier.capacity, size), problem))
        for tier, size in sized
    ]


def _room_warning(tier: NvmeTierOptions, machine: Machine) -> ConfigError | None:
    """Return why a capacity that the path has already does not fit now; None if it does."""
    recorded = machine.recorded_capacity(tier.path[0])
    if not recorded:
        return None
    room = _disk_room(tier, machine)
    capacity = _capacity(tier, machine, room)
    return _lack_of_room(tier, capacity, room) if capacity <= recorded else None


def _unequal_warning(tier: NvmeTierOptions, machine: Machine) -> ConfigError | None:
    """Return why folders on unequal disks hold less than the capacity; None if they hold it."""
    capacity = nvme_capacity(tier, machine)
    held = sum(part for _, part in nvme_held_bytes(tier, machine))
    each = capacity // len(tier.path)
    if held >= each * len(tier.path):
        return None
    part = f"each of {len(tier.path)} folders gets {human(each)}"
    problem = f"is more than {human(held)}, which these disks hold: {part}"
    at, remedy = At(f"{tier.key}.capacity"), "free space on the smaller disk, or lower it"
    return at.wrong(_written(tier.capacity, capacity), f"{problem}; {remedy}")


def _arena_warnings(config: CascadeConfig, machine: Machine) -> list[str]:
    folder = config.cpu.arena_dir
    kind = machine.file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        return []
    problem = f"is on {kind or 'an unknown file system'}, so that the arena is also written"
    remedy = "to a disk; give a folder in shared memory, such as /dev/shm"
    return [str(At(f"{config.cpu.key}.arena_dir").wrong(str(folder), f"{problem} {remedy}"))]


@dataclass(frozen=True, slots=True)
class Writing:
    """The write mode, and the loss if an engine stops without notice."""

    mode: WriteMode
    why: str
    """Clause with the reason for the mode."""
    may_lose: str
    """Clause with the blocks that a stop without notice loses."""

    def __str__(self) -> str:
        return f'write_mode is "{self.mode}" ({self.why}); {self.may_lose}'


def writing(config: CascadeConfig, machine: Machine) -> Writing | None:
    """Return the write mode of a configuration on a machine; None if there is only one tier.

    If none is configured, blocks are written back early if that causes no more writes. Each block
    is written once in either mode, unless the tier below is so small that it evicts blocks that are
    still in the tier above.
    """
    mode, why = config.write_mode, "as configured"
    if not config.below:
        return None
    if mode is None and not config.nvme:
        mode, why = WriteMode.THROUGH, f"{config.tiers[-1].key} keeps what others may read"
    if mode is None:
        mode = write_mode_for(
            cpu_capacity(config.cpu, machine), nvme_capacity(config.nvme[0], machine)
        )
        than = "at least" if mode is WriteMode.BACK else "less than"
        why = f"{config.nvme[0].key} is {than} {BACK_RATIO} times as large as {config.cpu.key}"
    may_lose = {
        WriteMode.DEMOTE: "an engine that is killed loses all that is in the CPU tier only",
        WriteMode.BACK: "an engine that is killed loses what was stored in its last "
        f"{config.dirty_age_s:g} s",
        WriteMode.THROUGH: "an engine that is killed loses what was not written yet",
    }[mode]
    return Writing(mode, why, may_lose)


def write_mode_for(cpu_bytes: int, nvme_bytes: int) -> WriteMode:
    """Return the write mode if none is configured."""
    return WriteMode.BACK if nvme_bytes >= BACK_RATIO * cpu_bytes else WriteMode.DEMOTE


def cpu_capacity(tier: CpuTierOptions, machine: Machine) -> int:
    """Return the tier's capacity in bytes."""
    return tier.capacity.of(machine.memory().total)


def nvme_capacity(tier: NvmeTierOptions, machine: Machine) -> int:
    """Return the tier's capacity in bytes, over all its paths."""
    if not isinstance(tier.capacity, FreeShare):
        return tier.capacity.of(nvme_disk_bytes(tier, machine))
    return _capacity(tier, machine, _disk_room(tier, machine))


def nvme_held_bytes(tier: NvmeTierOptions, machine: Machine) -> list[tuple[list[Path], int]]:
    """Return the part of the capacity that each disk of the tier has room for, with its paths.

    Each folder gets an equal part of the capacity, so the room of a larger disk is not all used.
    """
    disks, each = disks_of(tier, machine), nvme_capacity(tier, machine) // len(tier.path)
    reserve = min(tier.min_free.of(disk.total) for disk in disks)  # kept on each of them
    return [
        (paths, min(each * len(paths), _usable_bytes(disk, paths, machine, reserve)))
        for disk, paths in disks.items()
    ]


def _usable_bytes(disk: Disk, paths: Sequence[Path], machine: Machine, reserve: int) -> int:
    """Return the bytes of a disk for the folders of a tier, with those that they take already."""
    return max(0, disk.free + sum(map(machine.used_by_namespaces, paths)) - reserve)


def _capacity(tier: NvmeTierOptions, machine: Machine, room: _DiskRoom) -> int:
    if not isinstance(tier.capacity, FreeShare):
        return tier.capacity.of(nvme_disk_bytes(tier, machine))
    # Other files may have filled the disk: a restart leaves the tier what it holds.
    kept = min(machine.recorded_capacity(tier.path[0]), room.own + room.reserve)
    return max(tier.capacity.of(max(0, room.total - room.reserve)), kept)


@dataclass(frozen=True, slots=True)
class _DiskRoom:
    """Bytes on the disks of a tier. To count its own ones, all its files are looked at."""

    total: int
    """Free bytes, and those of the tier's namespaces."""
    own: int
    """Bytes of the tier's namespaces."""
    reserve: int
    """Bytes that stay free."""


def _disk_room(tier: NvmeTierOptions, machine: Machine) -> _DiskRoom:
    disks = disks_of(tier, machine)
    own = sum(machine.used_by_namespaces(path) for path in tier.path)
    reserve = sum(tier.min_free.of(disk.total) for disk in disks)
    return _DiskRoom(sum(disk.free for disk in disks) + own, own, reserve)


def file_system_of(directory: str) -> str:
    """Return the type of the file system that holds a directory; "" if /proc does not say."""
    real = os.path.realpath(directory)
    best, kind = "", ""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return ""
    for mount in mounts:
        point = mount.mountpoint
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, mount.fstype
    return kind


def _check_cpu(tier: CpuTierOptions, machine: Machine, engines: int) -> None:
    at, arena = At(f"{tier.key}.capacity"), At(f"{tier.key}.arena_dir")
    folder = tier.arena_dir
    if machine.kind(folder) is not PathKind.FOLDER:
        raise arena.wrong(str(folder), "is not a folder that exists; give one in shared memory")
    if not machine.writable(folder):
        raise arena.wrong(str(folder), "cannot be written by this user; give one that can")
    kind = machine.file_system(folder)
    if tier.persist and kind and kind not in MEMORY_FILE_SYSTEMS:
        problem = f"is on {kind}, where a crash of the machine may leave torn blocks"
        raise arena.wrong(str(folder), f"{problem}; persist needs a folder in shared memory")
    capacity, available = cpu_capacity(tier, machine), machine.memory().available
    kept = machine.kept_by_arenas(folder) if tier.persist else 0  # this engine takes it over
    available += kept
    _check_enough(at, tier.capacity, capacity, "this machine")
    needed, among = capacity * engines, f" for {engines} engines" if engines > 1 else ""
    if needed > available and kind != HUGETLBFS:
        problem = f"is more memory than there is ({human(available)} available{among}); lower it"
        raise at.wrong(_written(tier.capacity, capacity), problem)
    free = machine.disk(folder).free + kept
    if needed > free:
        remedy = f"lower it, enlarge that file system, or set {arena.key} to another"
        problem = f"is more than {folder} has free ({human(free)}{among}); {remedy}"
        raise at.wrong(_written(tier.capacity, capacity), problem)


def _check_enough(at: At, size: AnySize, count: int, where: str) -> None:
    if not count:
        raise at.wrong(str(size), f"is 0 bytes on {where}; raise it")
    if count < MIN_CAPACITY_BYTES:
        problem = 'is too small for a block; give a size with its unit, such as "64GiB"'
        raise at.wrong(_written(size, count), problem)


def _check_folder(at: At, path: Path, machine: Machine) -> None:
    """Check that a folder is writable, or can be created."""
    with _looking_at(at, path):
        nearest = nearest_existing(path, machine)
        kind = machine.kind(nearest)
    if kind is PathKind.OTHER and nearest == path:
        raise at.wrong(str(path), "is a file, not a folder; give a folder")
    if kind is PathKind.OTHER:
        raise at.wrong(str(path), f"lies below {nearest}, which is a file; give another folder")
    if machine.writable(nearest):
        return
    if nearest == path:
        raise at.wrong(str(path), "cannot be written by this user; change its permissions or mount")
    problem = f"cannot be created, because {nearest} cannot be written by this user"
    raise at.wrong(str(path), f"{problem}; create it, or give another folder")


def refuse_namespace(at: At, path: Path, machine: Machine) -> None:
    """Raise `ConfigError` if a folder is a namespace of a tier: it would become one itself."""
    with _looking_at(at, path):
        is_namespace = machine.kind(path / NAMESPACE_FILE) is not PathKind.MISSING
    if is_namespace:
        problem = f"is a namespace of the tier in {path.parent}; give {path.parent}"
        raise at.wrong(str(path), problem)


def _check_disks(tier: NvmeTierOptions, machine: Machine) -> None:
    at = At(f"{tier.key}.capacity")
    room, total = _disk_room(tier, machine), nvme_disk_bytes(tier, machine)
    capacity = _capacity(tier, machine, room)
    where = " and ".join(str(path) for path in tier.path)
    spare, shown = At(f"{tier.key}.min_free"), _written(tier.min_free, room.reserve)
    if room.reserve >= total:
        raise spare.wrong(shown, f"is all of the disk ({human(total)} on {where}); lower it")
    if isinstance(tier.capacity, FreeShare) and room.reserve >= room.total and not capacity:
        problem = f"leaves nothing of {human(room.total)} for this tier on {where}"
        raise spare.wrong(shown, f"{problem}; free space there, or lower it")
    _check_enough(at, tier.capacity, capacity, where)
    for name in ("segment_size", "min_share"):
        part: Bytes | None = getattr(tier, name)
        if part is not None and part.count > capacity:
            problem = f'is more than all of {at.key} "{tier.capacity}"; lower it, or leave it out'
            raise At(f"{tier.key}.{name}").wrong(str(part), problem)
    lack = _lack_of_room(tier, capacity, room)
    if lack is not None and capacity > machine.recorded_capacity(tier.path[0]):
        raise lack


def _lack_of_room(tier: NvmeTierOptions, capacity: int, room: _DiskRoom) -> ConfigError | None:
    """Return why the capacity does not fit the disks now; None if it does.

    A path that was used with this capacity is used all the same: other files have filled its disks
    since. It keeps the reserve, and grows once there is room.
    """
    at, shown_room = At(f"{tier.key}.capacity"), human(room.total)
    where = " and ".join(str(path) for path in tier.path)
    if capacity > room.total:
        problem = f"is more disk than there is ({shown_room} for this tier on {where}); lower it"
        return at.wrong(_written(tier.capacity, capacity), problem)
    if capacity + room.reserve > room.total:
        problem = f'does not fit beside {at.key} "{tier.capacity}" in {shown_room} on {where}'
        shown = _written(tier.min_free, room.reserve)
        return At(f"{tier.key}.min_free").wrong(shown, f"{problem}; lower one of the two")
    return None


@contextmanager
def _looking_at(at: At, *paths: Path) -> Iterator[None]:
    """Turn an `OSError` about a path, or the first of several, into a `ConfigError` of its key."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); give a folder that this user may enter"
        below = [path for path in paths if path.is_relative_to(error.filename or path)]
        raise at.wrong(str((below or paths)[0]), problem) from None


def disks_of(tier: NvmeTierOptions, machine: Machine) -> dict[Disk, list[Path]]:
    """Return the file systems of a tier's paths, each with its paths. Raises `OSError`."""
    found: dict[Disk, list[Path]] = {}
    for path in tier.path:
        found.setdefault(machine.disk(nearest_existing(path, machine)), []).append(path)
    return found


def nearest_existing(path: Path, machine: Machine) -> Path:
    """Return the path itself, or its closest parent that exists."""
    while machine.kind(path) is PathKind.MISSING and path != path.parent:
        path = path.parent
    return path


def _written(size: AnySize, count: int) -> str:
    """Return a size as the user wrote it; a share also in bytes."""
    is_share = isinstance(size, Share | DeviceShare | FreeShare)
    return f"{size} = {human(count)}" if is_share else str(size)


def is_free(arena: Path, wait: Callable[[float], None] = time.sleep) -> bool:
    """Return True if no live process holds an arena of this user. Locks it for a moment.

    `wait` waits for a number of seconds. The lock may be held by another process that asks this.
    """
    try:
        fd = os.open(arena, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        for attempt in range(FREE_ATTEMPTS):
            if attempt:
                wait(FREE_POLL_S)
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _has_compute_units(properties: Path) -> bool:
    """Return True if a node of AMD's topology is a GPU."""
    try:
        lines = properties.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("simd_count ") and not line.endswith(" 0") for line in lines)


def _bytes_below(folder: Path) -> int:
    """Return the bytes on disk of files below a folder; unreadable or vanished files count 0."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
            except OSError:
                continue
    return total
