"""The open tiers of a cascade, by their types."""

from __future__ import annotations

from kvcascade.assembly.build import Cascade
from kvcascade.assembly.node_parts import OpenTier
from kvcascade.assembly.remote_parts import OpenRemote


def nodes_of(cascade: Cascade) -> list[OpenTier]:
    """The tiers behind nodes of a path."""
    return [tier for tier in cascade.below if isinstance(tier, OpenTier)]


def remote_of(cascade: Cascade) -> OpenRemote:
    """The remote tier, which the cascade has."""
    (remote,) = (tier for tier in cascade.below if isinstance(tier, OpenRemote))
    return remote
