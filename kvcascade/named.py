"""Parts that the configuration names: replacement policies and admission rules."""

from __future__ import annotations

from .config import Admission, CascadeConfig, NvmeTier
from .manager.admission import Admission as AdmissionRule
from .manager.admission import AdmitAll, AdmitSecondTouch, admission_by_path
from .tiers.policies import order_class


def admission_rule(tier: NvmeTier) -> AdmissionRule:
    """The rule that a tier's `admission` names. Raises `ConfigError`."""
    if tier.admission is Admission.ALL:
        return AdmitAll()
    if tier.admission is Admission.SECOND_TOUCH:
        return AdmitSecondTouch()
    return admission_by_path(tier.admission)


def check_names(config: CascadeConfig) -> None:
    """Raise `ConfigError` for the first name that cannot be imported."""
    order_class(config.cpu.policy)
    for tier in config.nvme:
        order_class(tier.policy)
        admission_rule(tier)
