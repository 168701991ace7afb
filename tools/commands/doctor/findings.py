"""Judge the facts about a machine and a configuration: `Facts` to `Finding`s. Print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from ....config.machine import HUGETLBFS, MEMORY_FILE_SYSTEMS
from ....config.sizes import human
from .. import show

UNKNOWN, MOUNT_PROC = "is on a file system that /proc does not name", "mount /proc"
MIB, GIB = 1 << 20, 1 << 30
MIN_OPEN_FILES = 4096
"""Open files that an engine with large NVMe tiers needs beside those of vLLM: one per segment."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.glusterfs"}
)
LAYERED_FILE_SYSTEMS = frozenset({"overlay", "aufs"})


class Severity(StrEnum):
    """Weight of a finding."""

    OK = "ok"
    ADVICE = "advice"
    """It works; the remedy makes it faster or safer."""
    PROBLEM = "problem"
    """The engine does not start, or the cache is of no use."""


STYLES = {Severity.OK: "green", Severity.ADVICE: "yellow", Severity.PROBLEM: "red"}
MARKS = {Severity.OK: "ok", Severity.ADVICE: "advice", Severity.PROBLEM: "PROBLEM"}
MARK_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, judged."""

    subject: str
    level: Severity
    found: str
    """Fact as a clause."""
    remedy: str = ""
    """Remedy as a clause; empty if nothing is to be done."""


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Facts about one folder of an NVMe tier."""

    path: str
    file_system: str
    """Type of the file system of the folder, or of its nearest parent that exists."""
    free_bytes: int
    has_direct_io: bool | None
    """Whether files may bypass the page cache; None if that could not be tried."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine and a configuration, as far as they could be found."""

    vllm: str | None
    """Version of the installed vLLM; None if there is none."""
    vllm_problem: str | None
    """Reason why the installed vLLM is not supported."""
    hash_seed_is_needed: bool
    """True if block hashes change with every start of this vLLM, as the environment is now."""
    gpus: int
    gpu_driver: str | None
    locked_memory_bytes: int | None
    """Limit of locked memory; None means no limit."""
    open_files: int
    """Highest number of open files that a process may have."""
    arena_dir: str
    arena_file_system: str
    arena_free_bytes: int
    has_shared_huge_pages: bool
    pinned_bytes: int | None = None
    """Size of the CPU tier; None without a configuration."""
    paths: tuple[PathFacts, ...] = ()
    problems: tuple[str, ...] = ()
    """Problems of the configuration, as `kvcascade check` finds them."""
    warnings: tuple[str, ...] = ()
    kept_arenas: int = 0
    """Arenas in shared memory whose engines have ended."""


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which they should be read."""
    found = [
        *_configuration(facts),
        *_vllm(facts),
        *_device(facts),
        *_memory(facts),
        *_limits(facts),
    ]
    for path in facts.paths:
        found += _disk(path)
    return found


def _configuration(facts: Facts) -> Iterator[Finding]:
    for problem in facts.problems:
        yield Finding("configuration", Severity.PROBLEM, problem)
    for warning in facts.warnings:
        yield Finding("configuration", Severity.ADVICE, warning)
    if facts.pinned_bytes is None and not facts.problems:
        remedy = "give its file, or make one with `kvcascade config`"
        yield Finding("configuration", Severity.ADVICE, "none was given", remedy)
    elif not facts.problems:
        yield Finding("configuration", Severity.OK, "fits this machine")


def _vllm(facts: Facts) -> Iterator[Finding]:
    if facts.vllm is None:
        remedy = "install vllm into the environment of kvcascade"
        yield Finding("vLLM", Severity.PROBLEM, "is not installed here", remedy)
        return
    if facts.vllm_problem is not None:
        yield Finding("vLLM", Severity.PROBLEM, f"{facts.vllm}: {facts.vllm_problem}")
        return
    yield Finding("vLLM", Severity.OK, f"{facts.vllm} is supported")
    if facts.hash_seed_is_needed:
        found = "this vLLM draws a new seed of block hashes at every start: no block is found again"
        remedy = "set the environment variable PYTHONHASHSEED=0 for the engine"
        yield Finding("block hashes", Severity.PROBLEM, found, remedy)
    else:
        yield Finding("block hashes", Severity.OK, "are the same at every start")


def _device(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.gpu_driver is None:
        found = f"{facts.gpus} GPUs, but their driver does not answer"
        remedy = "start the container with the GPUs (docker: --gpus all), or load the driver"
        yield Finding("GPU", Severity.PROBLEM, found, remedy)
    elif facts.gpus:
        yield Finding("GPU", Severity.OK, f"{facts.gpus}, driver {facts.gpu_driver}")
    else:
        yield Finding("GPU", Severity.OK, "none; blocks are copied by the CPU")
    limit = facts.locked_memory_bytes
    pinned = facts.pinned_bytes or 0
    if facts.gpus and limit is not None and limit < max(pinned, 1):
        found = f"limited to {human(limit)}, and the CPU tier is pinned for the GPU"
        remedy = "raise it: `ulimit -l unlimited`, or docker --ulimit memlock=-1"
        yield Finding("locked memory", Severity.ADVICE, found, remedy)
    else:
        shown = "no limit" if limit is None else f"limit {human(limit)}"
        yield Finding("locked memory", Severity.OK, shown)


def _memory(facts: Facts) -> Iterator[Finding]:
    free, folder = human(facts.arena_free_bytes), facts.arena_dir
    pinned = facts.pinned_bytes
    if pinned is not None and pinned > facts.arena_free_bytes:
        size = _larger_size(pinned)
        remedy = f"docker: --shm-size={size}, or `mount -o remount,size=` so much more than now"
        found = f"{folder} has {free} free, and the CPU tier takes {human(pinned)}"
        yield Finding("shared memory", Severity.PROBLEM, found, remedy)
    elif not facts.arena_file_system:
        yield Finding("shared memory", Severity.ADVICE, f"{folder} {UNKNOWN}", MOUNT_PROC)
    elif facts.arena_file_system not in MEMORY_FILE_SYSTEMS:
        found = f"{folder} is on {facts.arena_file_system}, so memory is also written to a disk"
        remedy = "set arena_dir to a folder in shared memory"
        yield Finding("shared memory", Severity.ADVICE, found, remedy)
    else:
        yield Finding("shared memory", Severity.OK, f"{folder} has {free} free")
    if facts.has_shared_huge_pages or facts.arena_file_system == HUGETLBFS:
        yield Finding("huge pages", Severity.OK, "shared memory may use them")
    else:
        found = "the kernel gives none for shared memory, which makes direct I/O slower"
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield Finding("huge pages", Severity.ADVICE, found, remedy)
    if facts.kept_arenas:
        found = f"{facts.kept_arenas} arenas of ended engines hold memory"
        remedy = "`kvcascade shm ls` lists them, `kvcascade shm drop` frees them"
        yield Finding("kept arenas", Severity.ADVICE, found, remedy)


def _larger_size(count: int) -> str:
    """Return the next larger number of GiB or MiB, as docker and mount read it."""
    return f"{count // GIB + 1}g" if count >= GIB else f"{count // MIB + 1}m"


def _limits(facts: Facts) -> Iterator[Finding]:
    if facts.open_files < MIN_OPEN_FILES:
        remedy = f"raise it: `ulimit -n {MIN_OPEN_FILES * 4}`, docker --ulimit nofile="
        found = f"a process may open {facts.open_files} files"
        yield Finding("open files", Severity.ADVICE, found, f"{remedy}{MIN_OPEN_FILES * 4}")
    else:
        yield Finding("open files", Severity.OK, f"limit {facts.open_files}")


def _disk(path: PathFacts) -> Iterator[Finding]:
    subject, kind = f"path {path.path}", path.file_system
    if not kind:
        yield Finding(subject, Severity.ADVICE, UNKNOWN, MOUNT_PROC)
    elif kind in MEMORY_FILE_SYSTEMS:
        found = f"is on {kind}: it takes memory, and is lost at a reboot"
        yield Finding(subject, Severity.ADVICE, found, "give a folder on an NVMe device")
    elif kind in LAYERED_FILE_SYSTEMS:
        found = f"is on {kind}, the container's own layer: it is lost with the container"
        yield Finding(subject, Severity.ADVICE, found, "mount a volume, and give a folder in it")
    elif kind in NETWORK_FILE_SYSTEMS:
        found = f"is on {kind}: a tier on a network disk is slow, and one host only may use it"
        yield Finding(subject, Severity.ADVICE, found, "give a folder on a local NVMe device")
    elif not path.has_direct_io and path.has_direct_io is not None:
        found = f"{kind} has no direct I/O: blocks also fill the page cache"
        yield Finding(subject, Severity.ADVICE, found, "use ext4 or xfs on a local NVMe device")
    else:
        yield Finding(subject, Severity.OK, f"{kind}, {human(path.free_bytes)} free")


def print_findings(found: Sequence[Finding]) -> None:
    """Print one line for each finding, its remedy below it, and a summary."""
    console = show.console()
    for each in found:
        line = Text(MARKS[each.level].ljust(MARK_WIDTH), style=STYLES[each.level])
        line.append(f"{each.subject}: {each.found}", style="default")
        console.print(line)
        if each.remedy:
            console.print(Text(f"{' ' * MARK_WIDTH}→ {each.remedy}"))
    problems = sum(each.level is Severity.PROBLEM for each in found)
    advice = sum(each.level is Severity.ADVICE for each in found)
    console.print(Text(f"\nproblems: {problems}, advice: {advice}"))
