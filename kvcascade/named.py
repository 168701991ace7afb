"""Parts that the configuration names: our own spec, replacement policies and admission rules."""

from __future__ import annotations

from collections.abc import Mapping

from .config import Admission, CascadeConfig, parse
from .machine import Machine, check_machine
from .manager.admission import Admission as AdmissionRule
from .manager.admission import AdmitAll, AdmitSecondTouch, admission_by_path
from .tiers.policies import known_names, order_class

CONNECTOR = "OffloadingConnector"
"""vLLM's connector that asks us."""
SPEC_NAME = "CascadeOffloadingSpec"
"""What that connector knows us by."""


def admission_rule(name: str) -> AdmissionRule:
    """The rule that an `admission` names. Raises `ConfigError`."""
    if name == Admission.ALL:
        return AdmitAll()
    if name == Admission.SECOND_TOUCH:
        return AdmitSecondTouch()
    return admission_by_path(name)


def check_names(config: CascadeConfig) -> None:
    """Raise `ConfigError` for the first name that cannot be imported."""
    order_class(config.cpu.policy)
    for tier in config.nvme:
        order_class(tier.policy)
        admission_rule(tier.admission)


def checked(extra_config: Mapping[str, object], machine: Machine) -> CascadeConfig:
    """The configuration, if an engine would start with it: what it says, what it names, what it
    needs of the machine. Raises `ConfigError` for the first thing that is wrong."""
    config = parse(extra_config, known_names())
    check_names(config)
    check_machine(config, machine)
    return config
