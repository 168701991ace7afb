"""Parts that the configuration names: our own spec, replacement policies and admission rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.machine import Machine, check_machine, check_nvme
from ..config.options import noting
from ..config.schema import AdmissionMode, CascadeConfig, NvmeTier, parse
from ..errors import ConfigError
from ..manager.admission import Admission, AdmitAll, AdmitSecondTouch, admission_by_path
from ..tiers.policies import known_names, order_class

CONNECTOR = "OffloadingConnector"
"""vLLM's connector that asks us."""
SPEC_NAME = "CascadeOffloadingSpec"
"""What that connector knows us by."""
TIERING_SPEC_NAME = "TieringOffloadingSpec"
"""vLLM's own spec, of which our NVMe tier may be a part."""
TIER_NAME = "KVCascadeTier"
"""What vLLM's spec knows that tier by."""
TIER_ABOUT = ("label", "weights_id", "on_reset")
"""Options of that tier that stand beside the tiers elsewhere."""


def admission_rule(name: str) -> Admission:
    """The rule that an `admission` names. Raises `ConfigError`."""
    if name == AdmissionMode.ALL:
        return AdmitAll()
    if name == AdmissionMode.SECOND_TOUCH:
        return AdmitSecondTouch()
    return admission_by_path(name)


def check_names(config: CascadeConfig, noted: list[str] | None = None) -> None:
    """Raise `ConfigError` for the first name that cannot be imported, or note all."""
    for tier in config.tiers:
        with noting(noted):
            order_class(tier.policy)
        if isinstance(tier, NvmeTier):
            with noting(noted):
                admission_rule(tier.admission)


def checked(
    extra_config: Mapping[str, object], machine: Machine, noted: list[str] | None = None
) -> CascadeConfig:
    """The configuration, if an engine would start with it: what it says, what it names, what it
    needs of the machine. Raises `ConfigError` for the first thing that is wrong, or notes all."""
    config = parse(extra_config, known_names(), noted)
    check_names(config, noted)
    check_machine(config, machine, noted)
    return config


def checked_tier(
    options: Mapping[str, Any],
    machine: Machine,
    key: str = f"secondary_tiers.{TIER_NAME}",
    noted: list[str] | None = None,
) -> CascadeConfig:
    """The options of `KVCascadeTier` as a configuration of ours; vLLM's CPU tier stands where ours
    would be. Raises `ConfigError` for the first thing that is wrong, or notes all.

    `key`: the options' place, for messages.
    """
    about = {name: options[name] for name in TIER_ABOUT if name in options}
    nvme = {name: options[name] for name in options if name not in (*TIER_ABOUT, "locality")}
    tiers = [{"type": "cpu", "capacity": 1}, {**nvme, "type": "nvme"}]
    found: list[str] = []
    try:
        config = parse({"tiers": tiers, **about}, known_names(), found)
        check_names(config, found)
        check_nvme(config, machine, found)
    finally:
        for problem in found:
            with noting(noted):
                raise ConfigError(problem.replace("tiers[1]", key))
    return config
