"""Collect the facts that `kvcascade doctor` judges, from this machine and a configuration."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ....assembly.named import checked, configured
from ....config.environment import OF_TIER, TOP
from ....config.machine import KEPT_ARENAS, ThisMachine, cpu_capacity, doubts, file_system_of
from ....config.schema import CascadeConfig
from ....errors import ConfigError, KVCascadeError
from ....tiers.cpu.huge_pages import may_share_huge_pages
from ....vllm.engine_facts import hashes_change_at_restart
from ..check.transfer_config import Given, read_config
from ..command_line import ARENA_DIR
from ..version import ENGINES
from .findings import Facts, PathFacts

DRIVER = Path("/proc/driver/nvidia/version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
PROBE_BYTES = 4096


def look(config: Path | None) -> Facts:
    """Return the facts, those of a configuration if there is one. Raises `CommandError`."""
    machine, problems, warnings = ThisMachine(), list[str](), list[str]()
    settings: CascadeConfig | None = None
    given = _given(config)
    if given is not None:
        problems += given.problems
        warnings += given.doubts
        settings = _settings(given.extra, problems)
    if settings is not None and not problems:
        warnings += doubts(settings, machine)
    arena_dir = ARENA_DIR if settings is None else settings.cpu.arena_dir
    installed = _vllm_version()
    reason = None if installed is None else _vllm_problem()
    return Facts(
        vllm=installed,
        vllm_problem=reason,
        hash_seed_is_needed=bool(installed) and not reason and hashes_change_at_restart(None),
        gpus=machine.devices(),
        gpu_driver=_driver(),
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        arena_dir=str(arena_dir),
        arena_file_system=file_system_of(str(arena_dir)),
        arena_free_bytes=machine.disk(arena_dir).free if arena_dir.is_dir() else 0,
        has_shared_huge_pages=may_share_huge_pages(),
        pinned_bytes=None if settings is None else cpu_capacity(settings.cpu, machine),
        paths=() if settings is None else _paths(settings, machine),
        problems=tuple(problems),
        doubts=tuple(warnings),
        kept_arenas=len(list(arena_dir.glob(KEPT_ARENAS))),
    )


def _given(config: Path | None) -> Given | None:
    """Return the configuration in a file, or that of the environment; None if there is none."""
    if config is not None:
        return read_config(config)
    if any(name in os.environ for name in (*TOP, *OF_TIER)):
        return Given("the environment")
    return None


def _settings(extra: Mapping[str, Any], problems: list[str]) -> CascadeConfig | None:
    """Return the settings, complete or not; None if there is no usable list of tiers."""
    try:
        settings = checked(extra, ThisMachine(), problems)
    except ConfigError:
        try:
            settings = configured(extra)
        except ConfigError as error:
            if not problems:
                problems.append(str(error))
            return None
    has_cpu = bool(settings.tiers) and settings.tiers[0].type == "cpu"
    return settings if has_cpu else None


def _paths(settings: CascadeConfig, machine: ThisMachine) -> tuple[PathFacts, ...]:
    return tuple(_path(path, machine) for tier in settings.nvme for path in tier.path)


def _path(path: Path, machine: ThisMachine) -> PathFacts:
    nearest = path
    while not nearest.is_dir() and nearest != nearest.parent:
        nearest = nearest.parent
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


def _vllm_version() -> str | None:
    for name in ENGINES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _vllm_problem() -> str | None:
    from ....vllm.precheck import check_spec

    try:
        check_spec({})
    except (KVCascadeError, ImportError, OSError) as error:
        return str(error)
    return None
