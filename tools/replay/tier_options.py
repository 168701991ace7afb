"""Options of a replay: tiers and costs, with their parsers for the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...config import sizes
from ...config.schema import AdmissionMode, WriteMode
from ...errors import ConfigError
from ...tiers.policies import known_names
from .virtual import Rate

_TIER_KEYS = ("read", "write", "latency", "admission", "write_budget")
_TIER_FORM = 'write it as NAME=SIZE,POLICY, such as "cpu=64GiB,lru" or "nvme=1TiB,lru,read=3GB"'


@dataclass(frozen=True, slots=True)
class GivenTier:
    """One tier as given on the command line."""

    name: str
    capacity_bytes: int
    policy: str = "lru"
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    latency_s: float | None = None
    admission: str = AdmissionMode.ALL
    write_budget: sizes.WriteAmount | None = None


@dataclass(frozen=True, slots=True)
class TierOptions:
    """One tier of a replay."""

    name: str
    capacity_bytes: int
    policy: str = "lru"
    read: Rate = field(default_factory=Rate)
    """Rate to the tier above; for the first tier, to the device."""
    write: Rate = field(default_factory=Rate)
    admission: str = AdmissionMode.ALL
    """Admission mode, as in the configuration of an NVMe tier."""
    write_budget_bytes: int | None = None
    """Limit of bytes written in any 24 hours; None for no limit."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of one run."""

    tiers: tuple[TierOptions, ...]
    kv_bytes_per_token: int
    prefill_tokens_per_s: float | None = None
    """Prefill rate of the engine. If None, no prefill times are computed, and all hits are
    loaded."""
    load_or_recompute: bool = True
    write_mode: WriteMode = WriteMode.DEMOTE
    speed_up: float = 1.0
    """Factor by which the trace's clock is faster than recorded."""


def parse_tier(text: str) -> GivenTier:
    """Parse `NAME=SIZE[,POLICY][,KEY=VALUE]...`. Raises `ConfigError`."""
    name, sign, rest = text.partition("=")
    size, *others = rest.split(",")
    if not (name and sign and size):
        raise ConfigError(f"--tier: {text!r} is not a tier; {_TIER_FORM}.")
    tier = GivenTier(name, _bytes(text, size))
    for other in others:
        key, has_value, value = other.partition("=")
        if has_value and key not in _TIER_KEYS:
            known = ", ".join(_TIER_KEYS)
            raise ConfigError(f"--tier: {key!r} in {text!r} is not known; use {known}.")
        tier = (
            _with_value(tier, text, key, value) if has_value else replace(tier, policy=_policy(key))
        )
    return tier


def _with_value(tier: GivenTier, text: str, key: str, value: str) -> GivenTier:
    match key:
        case "read":
            return replace(tier, read_bytes_per_s=float(_bytes(text, value)))
        case "write":
            return replace(tier, write_bytes_per_s=float(_bytes(text, value)))
        case "latency":
            return replace(tier, latency_s=_seconds(text, value))
        case "admission":
            return replace(tier, admission=value)
        case _:
            return replace(tier, write_budget=_budget(text, value))


def parse_sizes(text: str) -> tuple[str, list[int]]:
    """Parse `NAME=SIZE,SIZE,...` of `--sweep`. Raises `ConfigError`."""
    name, sign, rest = text.partition("=")
    if not (name and sign and rest):
        raise ConfigError(f'--sweep: {text!r} is not a list; write it as "cpu=8GiB,16GiB,32GiB".')
    return name, [_bytes(text, size) for size in rest.split(",")]


def check_policies(names: Sequence[str]) -> list[str]:
    """Return the names. Raises `ConfigError` if a policy does not exist."""
    return [_policy(name) for name in names]


def _policy(name: str) -> str:
    if name not in known_names() and ":" not in name:
        raise ConfigError(f"policy {name!r} is not known; use one of {', '.join(known_names())}.")
    return name


def _bytes(text: str, size: str) -> int:
    try:
        return sizes.parse_bytes(size).of(0)
    except ValueError as error:
        raise ConfigError(f"{size!r} in {text!r} {error}.") from None


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{value!r} in {text!r} is not a time; give seconds, such as 0.0001.")
    return seconds


def _budget(text: str, value: str) -> sizes.WriteAmount:
    try:
        return sizes.parse_daily_writes(value)
    except ValueError as error:
        raise ConfigError(f"{value!r} in {text!r} {error}.") from None
