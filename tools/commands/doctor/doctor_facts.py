"""Collect the facts that `kvcascade doctor` judges, from this machine and a configuration."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ....assembly.named import checked, sweep_arenas
from ....config.environment import TOP, misspelt, of_tier
from ....config.machine import (
    KEPT_ARENAS,
    Machine,
    cpu_capacity,
    file_system_of,
    nearest_existing,
)
from ....config.remote import RemoteTierOptions
from ....config.schema import CpuTierOptions, NvmeTierOptions
from ....errors import ConfigError, KVCascadeError
from ....tiers.cpu.huge_pages import may_share_huge_pages
from ..check.config_check import ask_server
from ..check.transfer_config import Given, read_config, read_tiering
from ..command_line import ARENA_DIR
from ..version import ENGINES, installed_version
from .findings import Facts, PathFacts

DRIVER = Path("/proc/driver/nvidia/version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The parts of a configuration that facts are looked up for."""

    pinned_bytes: int | None = None
    arena_dir: Path = ARENA_DIR
    nvme: Sequence[NvmeTierOptions] = ()
    remote: RemoteTierOptions | None = None


def look(config: Path | None) -> Facts:
    """Return the facts, those of a configuration if there is one. Raises `CommandError`."""
    machine, problems, warnings = Machine(), list[str](), list[str]()
    given = _given(config)
    warnings += misspelt(os.environ) if given is None else ()
    sweep_arenas({} if given is None or given.is_tiering else given.extra)
    wanted = _Wanted() if given is None else _wanted(given, machine, problems, warnings)
    if wanted.remote is not None:
        ask_server(wanted.remote, problems, warnings)
    arena_dir = wanted.arena_dir
    installed = installed_version(*ENGINES)
    reason, needs_seed = (None, False) if installed is None else _ask_vllm()
    return Facts(
        vllm=installed,
        vllm_problem=reason,
        hash_seed_is_needed=needs_seed,
        gpus=machine.devices(),
        gpu_driver=_driver(),
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        arena_dir=str(arena_dir),
        arena_file_system=file_system_of(str(arena_dir)),
        arena_free_bytes=_free_bytes(arena_dir, machine),
        has_shared_huge_pages=may_share_huge_pages(),
        pinned_bytes=wanted.pinned_bytes,
        paths=tuple(_paths(wanted.nvme, machine)),
        problems=tuple(problems),
        warnings=tuple(warnings),
        kept_arenas=_kept_arenas(arena_dir),
    )


def _given(config: Path | None) -> Given | None:
    """Return the configuration in a file, or that of the environment; None if there is none."""
    if config is not None:
        return read_config(config)
    if any(name in os.environ for name in (*TOP, *of_tier())):
        return Given("the environment")
    return None


def _wanted(given: Given, machine: Machine, problems: list[str], warnings: list[str]) -> _Wanted:
    """Return what can be read of a configuration; what is wrong with it is added to the lists."""
    problems += given.problems
    warnings += given.warnings
    if given.is_tiering:
        tiering = read_tiering(given.extra, machine, problems, warnings)
        return _Wanted(tiering.cpu_bytes, nvme=tiering.nvme)
    try:
        settings = checked(given.extra, machine, problems)
    except ConfigError:  # its problems are in the list
        return _Wanted()
    if not settings.tiers or not isinstance(settings.tiers[0], CpuTierOptions):
        return _Wanted(nvme=settings.nvme, remote=settings.remote)
    cpu, pinned_bytes = settings.tiers[0], None
    with suppress(ConfigError):  # the list says that the memory is not known
        pinned_bytes = cpu_capacity(cpu, machine)
    return _Wanted(pinned_bytes, cpu.arena_dir, settings.nvme, settings.remote)


def _free_bytes(folder: Path, machine: Machine) -> int:
    with suppress(OSError):  # a problem of the configuration says why
        return machine.disk(folder).free if os.path.isdir(folder) else 0
    return 0


def _kept_arenas(folder: Path) -> int:
    with suppress(OSError):
        return len(list(folder.glob(KEPT_ARENAS)))
    return 0


def _paths(tiers: Sequence[NvmeTierOptions], machine: Machine) -> Iterator[PathFacts]:
    """Yield the facts of each path; one that cannot be read is a problem of the configuration."""
    for path in (path for tier in tiers for path in tier.path):
        try:
            facts = _path(path, machine)
        except OSError:
            continue
        yield facts


def _path(path: Path, machine: Machine) -> PathFacts:
    nearest = nearest_existing(path, machine)
    kind, free = file_system_of(str(nearest)), machine.disk(nearest).free
    return PathFacts(str(path), kind, free, has_direct_io(nearest))


def has_direct_io(folder: Path) -> bool | None:
    """Return whether a file in a folder can be opened for direct I/O; None if no file can be
    made."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvcascade-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
            try:
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
            except OSError:
                return False
            return True
    except OSError:
        return None


def _limit(number: int) -> int | None:
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _driver() -> str | None:
    for path in (DRIVER, AMD_DRIVER):
        try:
            return path.read_text().split("\n")[0].strip()
        except OSError:
            continue
    return None


def _ask_vllm() -> tuple[str | None, bool]:
    """Return why the installed vLLM cannot be used, if so, and if it needs a fixed hash seed.

    Loading it takes seconds.
    """
    try:
        from ....vllm.engine_facts import hashes_change_at_restart
        from ....vllm.precheck import check_spec

        check_spec({})
    except (KVCascadeError, ImportError, OSError) as error:
        return str(error), False
    except Exception as error:  # a vLLM or torch that is half installed
        return f"{type(error).__name__}: {error}", False
    return None, hashes_change_at_restart(None)
