"""The parts of a cascade in this process, for tests that look inside: top first."""

from __future__ import annotations

from kvcascade.manager.below.node_tier import NodeTier
from kvcascade.manager.below.port import Below, NoTierBelow
from kvcascade.manager.below.solo import SoloTier
from kvcascade.manager.below.tier_chain import TierChain
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.demotion import Demoter
from kvcascade.manager.level import Level


def solos(below: Below) -> list[SoloTier]:
    """The tiers behind a port that live in this process."""
    found: list[SoloTier] = []
    while isinstance(below, TierChain):
        found.append(below._first)
        below = below._rest
    if not isinstance(below, NoTierBelow | NodeTier):
        assert isinstance(below, SoloTier)
        found.append(below)
    return found


def demoters(manager: CascadingOffloadingManager) -> list[Demoter]:
    """The manager's own demoter, and those between the tiers below."""
    found, below = [manager._demoter], manager._flow.below
    while isinstance(below, TierChain):
        found.append(below.demoter)
        below = below._rest
    return found


def levels(manager: CascadingOffloadingManager) -> list[Level]:
    """The first tier and every tier below it."""
    return [manager._flow.top, *(solo.level for solo in solos(manager._flow.below))]
