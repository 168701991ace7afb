"""Names that vLLM's offloading got after 0.24, and what stands in for them where they are missing.

`v0_26` is written for the newest interface of its generation; what is missing in the
installed one is found by looking, not by version number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.v1.kv_offload import base

State = TypeVar("State")

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingWorker,
        ReqContext,
        TierFilter,
        TransferResult,
    )
else:

    class _Medium(StrEnum):
        """Events carry its words up to 0.26."""

        CPU = "CPU"
        STORAGE = "STORAGE"

    class _TierFilter:
        """No request can choose its tiers up to 0.26."""

        ALL = None

    class _Locality:
        """Nobody is told up to 0.25."""

        LOCAL = None

    class _LookupResult(Enum):
        """`v0_24` says it otherwise up to 0.24."""

        MISS, HIT, HIT_PENDING, RETRY = range(4)

    class _OffloadingWorker:
        """Up to 0.24 there are handlers, and nothing to derive from."""

    @dataclass
    class _TransferResult:
        """As later; up to 0.24 it has one field more."""

        job_id: int
        success: bool
        transfer_size: int | None = None
        transfer_time: float | None = None

    Locality = getattr(base, "Locality", _Locality)
    LookupResult = getattr(base, "LookupResult", _LookupResult)
    Medium = getattr(base, "Medium", _Medium)
    OffloadingWorker = getattr(base, "OffloadingWorker", _OffloadingWorker)
    TierFilter = getattr(base, "TierFilter", _TierFilter)
    TransferResult = getattr(base, "TransferResult", _TransferResult)


def state_of(context: ReqContext, kind: type[State]) -> State | None:
    """What `set_state` left with a request; vLLM keeps one context as long as the request lives."""
    if hasattr(context, "get_state"):
        return context.get_state(kind)
    return cast("State | None", _plain_states(context).get(kind.__name__))


def set_state(context: ReqContext, state: object) -> None:
    """Leave something with a request, one thing of each kind."""
    if hasattr(context, "set_state"):
        context.set_state(state)
    else:
        _plain_states(context)[type(state).__name__] = state


def _plain_states(context: Any) -> dict[str, Any]:
    """Up to 0.26 a context is a plain object: its own attributes are the place."""
    attributes: dict[str, Any] = context.__dict__
    return attributes


__all__ = [
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingWorker",
    "TierFilter",
    "TransferResult",
    "set_state",
    "state_of",
]
