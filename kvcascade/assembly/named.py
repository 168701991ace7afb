"""Read a configuration, and resolve its names: our spec, eviction policies and admission rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.environment import (
    misspelt,
    naming_variables,
    of_lone_tier,
    unused,
    with_environment,
)
from ..config.machine import Machine, check_machine, check_nvme, settled
from ..config.options import noting
from ..config.schema import (
    AdmissionMode,
    CascadeConfig,
    CpuTierOptions,
    NvmeTierOptions,
    parse,
)
from ..errors import ConfigError, KVCascadeError
from ..logs import get_logger
from ..manager.admission import AdmissionFunction, admission_by_path, admit_second_touch
from ..tiers.cpu.arena import DEFAULT_ARENA_DIR
from ..tiers.cpu.arena_file import sweep
from ..tiers.nvme.disk.filesystem import RealFileSystem
from ..tiers.nvme.path.writer.path_options import check_roots, load_record
from ..tiers.policies import known_names, order_class

_log = get_logger(__name__)

CONNECTOR = "OffloadingConnector"
"""vLLM's connector for offloading specs."""
SPEC_NAME = "CascadeOffloadingSpec"
"""Name of our spec for that connector."""
TIERING_SPEC_NAME = "TieringOffloadingSpec"
"""Name of vLLM's own spec, which may contain our NVMe tier."""
TIER_NAME = "KVCascadeTier"
"""Name of our NVMe tier inside vLLM's spec."""
TIER_MODULE = "kvcascade.vllm_tier"
"""Module in which vLLM finds that tier."""
TIER_KEYS_OF_VLLM = ("type", "module_path", "backpressure")
"""Keys of an item of `secondary_tiers` that vLLM reads and does not pass on."""
TIER_ABOUT = ("label", "weights_id", "on_reset")
"""Options of that tier that are top-level options of a cascade."""


def admission_rule(name: str) -> AdmissionFunction | None:
    """Return the rule for a value of `admission`; None admits every block.

    Raises `ConfigError` if it does not exist.
    """
    if name == AdmissionMode.ALL:
        return None
    if name == AdmissionMode.SECOND_TOUCH:
        return admit_second_touch
    return admission_by_path(name)


def check_names(config: CascadeConfig, noted: list[str] | None = None) -> None:
    """Raise `ConfigError` for the first name that cannot be imported, or collect all."""
    for tier in config.tiers:
        if isinstance(tier, CpuTierOptions | NvmeTierOptions):
            with noting(noted):
                order_class(tier.policy)
        if isinstance(tier, NvmeTierOptions):
            with noting(noted):
                admission_rule(tier.admission)


def check_folders(config: CascadeConfig, noted: list[str] | None = None) -> None:
    """Raise `ConfigError` for the first path with other folders than its tier has, or collect all.

    A path that cannot be read is no error here: the engine says more, and may go on without it.
    """
    fs = RealFileSystem()
    for tier in config.nvme:
        with noting(noted):
            try:
                check_roots(fs, tier.path, load_record(fs, tier.path[0]))
            except ConfigError:
                raise
            except KVCascadeError as error:
                _log.debug("kvcascade: %s", error)


def configured(
    extra_config: Mapping[str, object],
    noted: list[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> CascadeConfig:
    """Return the configuration of an engine: what is given, then variables of the environment.

    Raises `ConfigError` for the first problem, or collects all in `noted`.
    """
    return _configured(extra_config, noted, environment)[0]


def _configured(
    extra_config: Mapping[str, object], noted: list[str] | None, environment: Mapping[str, str]
) -> tuple[CascadeConfig, Mapping[str, str]]:
    """Do as `configured`, and also return the variables that are used, by their options."""
    for said in misspelt(environment):
        _log.warning("kvcascade: %s", said)
    given, variables = with_environment(extra_config, environment)
    with naming_variables(variables, noted):
        config = parse(given, known_names(), noted)
    # A tier with a problem is missing in the list.
    for said in () if noted else unused([tier.type for tier in config.tiers], environment):
        _log.warning("kvcascade: %s", said)
    return config, variables


def checked(
    extra_config: Mapping[str, object],
    machine: Machine | None,
    noted: list[str] | None = None,
    workers: int = 1,
    engines: int = 1,
) -> CascadeConfig:
    """Return the configuration after checking values, names, and whether it fits the machine.

    `machine`: None if only values and names are to be checked. `workers`: number of workers of an
    engine. `engines`: number of engines that start with it on this machine. Raises `ConfigError`
    for the first problem, or collects all in `noted`.
    """
    config, variables = _configured(extra_config, noted, os.environ)
    with naming_variables(variables, noted):
        check_names(config, noted)
        if machine is not None:
            config = settled(config, machine, workers)
            check_machine(config, machine, noted, engines)
            check_folders(config, noted)
    return config


def sweep_arenas(extra_config: Mapping[str, Any]) -> None:
    """Remove the arenas of engines that were killed during their start.

    Their memory would count as taken. Arenas that a live process holds or makes stay (`sweep`).
    Nothing in the configuration needs to be valid.
    """
    given, _ = with_environment(extra_config, os.environ)
    tiers = given.get("tiers")
    named = [tier for tier in tiers if isinstance(tier, Mapping)] if isinstance(tiers, list) else []
    folders = {DEFAULT_ARENA_DIR, *(str(tier.get("arena_dir", "")) for tier in named)} - {""}
    for folder in sorted(folders):
        sweep(folder)


def tier_options(tier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that vLLM passes on to a secondary tier."""
    return {name: tier[name] for name in tier if name not in TIER_KEYS_OF_VLLM}


def checked_tier(
    options: Mapping[str, Any],
    machine: Machine | None,
    key: str = f"secondary_tiers.{TIER_NAME}",
    noted: list[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> CascadeConfig:
    """Return the options of `KVCascadeTier` as a configuration; its CPU tier stands for vLLM's.

    Variables of the environment complete them. `machine`: None if only values and names are to be
    checked. `key`: place of the options, for messages. Raises `ConfigError` for the first problem,
    or collects all in `noted`.
    """
    about = {name: options[name] for name in TIER_ABOUT if name in options}
    nvme = {name: options[name] for name in options if name not in (*TIER_ABOUT, "locality")}
    tiers = [{"type": "cpu", "capacity": 1}, {**nvme, "type": "nvme"}]
    here, idle = of_lone_tier("nvme", TIER_ABOUT, environment)
    for said in [*misspelt(environment), *idle]:
        _log.warning("kvcascade: %s", said)
    given, variables = with_environment({"tiers": tiers, **about}, here)
    found: list[str] = []
    try:
        with naming_variables(variables, found):
            config = parse(given, known_names(), found)
            check_names(config, found)
            if machine is not None:
                check_nvme(config, machine, found)
                check_folders(config, found)
    finally:
        for problem in found:
            with noting(noted):
                raise ConfigError(problem.replace("tiers[1]", key))
    return config
