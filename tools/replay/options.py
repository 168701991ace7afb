"""What a replay is asked for: tiers, costs, and how they are written on the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import sizes
from ...errors import ConfigError, FormatError, os_errors
from ...manager.cascading import WriteMode
from ...tiers.policies import known_names
from ..bench.labels import DOWN, TRANSFERS, UP, transfer_block_bytes
from ..bench.results import OURS
from .virtual import Speed

_TIER_FORM = 'write it as NAME=SIZE,POLICY, such as "cpu=64GiB,lru" or "nvme=1TiB,lru,read=3GB"'


@dataclass(frozen=True, slots=True)
class TierOptions:
    """One tier of a replay."""

    name: str
    capacity_bytes: int
    policy: str = "lru"
    read: Speed = field(default_factory=Speed)
    """Towards the tier above; of the first one, towards the device."""
    write: Speed = field(default_factory=Speed)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """One run."""

    tiers: tuple[TierOptions, ...]
    kv_bytes_per_token: int
    prefill_tokens_per_s: float | None = None
    """None: unknown, nothing is said about seconds of prefill, everything found is loaded."""
    load_or_recompute: bool = True
    write_mode: WriteMode = WriteMode.DEMOTE
    promotion_budget: float = 0.5
    """Share of the first tier."""
    speed_up: float = 1.0
    """The trace's clock runs so many times as fast."""


def parse_tier(text: str) -> TierOptions:
    """`NAME=SIZE[,POLICY][,read=BYTES][,write=BYTES][,latency=SECONDS]`. Raises `ConfigError`."""
    name, sign, rest = text.partition("=")
    size, *others = rest.split(",")
    if not (name and sign and size):
        raise ConfigError(f"--tier: {text!r} is not a tier; {_TIER_FORM}.")
    policy, rates, latency_s = "lru", {"read": math.inf, "write": math.inf}, 0.0
    for other in others:
        key, has_value, value = other.partition("=")
        if not has_value:
            policy = _policy(key)
        elif key in rates:
            rates[key] = float(_bytes(text, value))
        elif key == "latency":
            latency_s = _seconds(text, value)
        else:
            raise ConfigError(f"--tier: {other!r} in {text!r} is not known; {_TIER_FORM}.")
    speeds = {key: Speed(rate, latency_s) for key, rate in rates.items()}
    return TierOptions(name, _bytes(text, size), policy, speeds["read"], speeds["write"])


def parse_sizes(text: str) -> tuple[str, list[int]]:
    """`NAME=SIZE,SIZE,...` of `--sweep`. Raises `ConfigError`."""
    name, sign, rest = text.partition("=")
    if not (name and sign and rest):
        raise ConfigError(f'--sweep: {text!r} is no list; write it as "cpu=8GiB,16GiB,32GiB".')
    return name, [_bytes(text, size) for size in rest.split(",")]


def check_policies(names: Sequence[str]) -> list[str]:
    """Raises `ConfigError` for one that does not exist."""
    return [_policy(name) for name in names]


def with_bench(tiers: Sequence[TierOptions], path: Path, block_bytes: int) -> list[TierOptions]:
    """Speeds of the lower tiers as `kvcascade bench` measured them, where none are given.

    Of the block sizes that were measured the nearest one is taken. Raises `FormatError`.
    """
    with os_errors(f"reading {path}"):
        text = path.read_text()
    try:
        rows = [
            row
            for measurement in json.loads(text)["measurements"]
            if measurement["name"] == TRANSFERS
            for row in measurement["rows"]
        ]
        read, write = (_nearest(rows, kind, block_bytes) for kind in (UP, DOWN))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} holds no measured transfers ({error!r}); give what "
            "`kvcascade bench --only transfers` wrote"
        ) from None
    return [
        tier
        if number == 0
        else replace(
            tier,
            read=read if tier.read == Speed() else tier.read,
            write=write if tier.write == Speed() else tier.write,
        )
        for number, tier in enumerate(tiers)
    ]


def _nearest(rows: Sequence[dict[str, Any]], kind: str, block_bytes: int) -> Speed:
    """Of our rates of one kind, that of the block size nearest to the one asked for."""
    rates = {
        size: float(row["median"][OURS])
        for row in rows
        if row["quantity"] == kind and (size := transfer_block_bytes(row["case"]))
    }
    if not rates:
        raise ValueError(f"nothing about {kind}")
    return Speed(rates[min(rates, key=lambda size: abs(math.log(size / block_bytes)))] * 1e9)


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
