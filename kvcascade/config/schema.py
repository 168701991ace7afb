"""`kv_connector_extra_config` as typed, frozen values, validated before anything is loaded.

Parsing is pure: it looks at no file and at no machine (`config.machine` does that), and changes
nothing. Every problem is a `ConfigError` of one sentence that names the full key, the value and
what is allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ..errors import ConfigError
from . import sizes
from .options import (
    At,
    Reader,
    choice,
    choice_or_name,
    deadline,
    flag,
    folder,
    folders,
    noting,
    optional,
    policy_name,
    rate,
    read_options,
    seconds,
    sized,
    text,
    whole,
    word_or_none,
)
from .sizes import Budget, Bytes, Share, Size, WriteAmount

MAX_BLOCKS_PER_CHUNK = 1 << 16
MAX_TOKENS_PER_CHUNK = 1 << 20


def _not_canonical(at: At, value: Any) -> bool:
    if value is not False:
        raise at.wrong(value, "is not supported; leave it out, or set it to false")
    return value


VLLM_KEYS: Mapping[str, Reader] = {
    "spec_name": text,
    "spec_module_path": optional(text),
    "block_size": optional(whole(1, MAX_TOKENS_PER_CHUNK)),
    "blocks_per_chunk": optional(whole(1, MAX_BLOCKS_PER_CHUNK)),
    "offload_prompt_only": flag,
    "self_describing_kv_events": flag,
    "sync_load_budget_bytes": whole(0, sizes.MAX_BYTES),
    "canonical_layout": _not_canonical,
}
"""Keys of the same dictionary that vLLM reads, once the model is loaded and whatever their type:
looked at here, and not kept."""

ELSEWHERE = {
    "cpu_bytes_to_use": "tiers[0].capacity",
    "cpu_bytes_to_use_per_rank": "tiers[0].capacity",
    "eviction_policy": "tiers[0].policy",
    "secondary_tiers": "tiers",
    "store_threshold": "tiers[1].admission",
}
"""Keys of the tiers that come with vLLM, and what says the same here."""

DEFAULT_FLUSH_S = 20.0
MAX_TIERS = 8
MAX_IO_THREADS = 64

_SIZE_REMEDY = 'give a size such as "64GiB" or "50%"'
_PATH_REMEDY = 'give a folder on the device, such as "/mnt/nvme/kv"'
_TIERS_REMEDY = 'give a list that begins with {"type": "cpu", "capacity": "64GiB"}'
_ORDER_REMEDY = 'use "cpu" for the first tier and "nvme" for every other one'


class WriteMode(StrEnum):
    """When a block is written to the tier below."""

    DEMOTE = "demote"
    BACK = "back"
    THROUGH = "through"


class OnReset(StrEnum):
    """What `reset_cache` does to the blocks that are there."""

    INVALIDATE = "invalidate"
    KEEP = "keep"


class Durability(StrEnum):
    """What a committed block survives."""

    PROCESS = "process"
    POWER = "power"


class Admission(StrEnum):
    """Which blocks may enter a tier."""

    ALL = "all"
    SECOND_TOUCH = "second_touch"


class Movers(StrEnum):
    """Who moves the blocks of a tier."""

    PROCESS = "process"
    THREADS = "threads"


class DirectIO(StrEnum):
    """Whether payload passes by the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def _direct_io(at: At, value: Any) -> DirectIO:
    if isinstance(value, bool):
        return DirectIO.ON if value else DirectIO.OFF
    if value != "auto":
        raise at.wrong(value, 'is not known; use "auto", true or false')
    return DirectIO.AUTO


@dataclass(frozen=True, slots=True)
class CpuTier:
    """Options of the tier in shared memory."""

    type: ClassVar[str] = "cpu"

    key: str
    """Where it stands in the configuration, for messages: "tiers[0]"."""
    capacity: Annotated[Size, sized(sizes.parse_size), _SIZE_REMEDY]
    """Bytes, or a share of the machine's memory."""
    policy: Annotated[str, policy_name] = "lru"
    """Name, or "package.module:Class", of the replacement policy."""
    arena_dir: Annotated[Path, folder] = Path("/dev/shm")
    """Folder of a memory file system that holds the arena."""
    prefault: Annotated[bool, flag] = True
    """Touch every page at the start, so that no step pays for it later."""
    low_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(4, 10))
    """Share of the tier that is free or clean at least; below it demotion starts."""
    high_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(5, 10))
    """Share of the tier that is free or clean when demotion stops."""
    persist: Annotated[bool, flag] = False
    """Leave the arena in shared memory, for the next engine of the same namespace to take over."""


@dataclass(frozen=True, slots=True)
class NvmeTier:
    """Options of a tier on disk."""

    type: ClassVar[str] = "nvme"

    key: str
    """Where it stands in the configuration, for messages: "tiers[1]"."""
    capacity: Annotated[Size, sized(sizes.parse_size), _SIZE_REMEDY]
    """Bytes over all paths and namespaces, or a share of the disks."""
    path: Annotated[tuple[Path, ...], folders, _PATH_REMEDY]
    """Absolute folders, one per device."""
    policy: Annotated[str, policy_name] = "lru"
    """Name, or "package.module:Class", of the replacement policy."""
    durability: Annotated[Durability, choice(Durability)] = Durability.PROCESS
    """What a committed block survives."""
    admission: Annotated[Admission | str, choice_or_name(Admission)] = Admission.ALL
    """Which blocks may enter; "package.module:function" asks a function of the user."""
    write_budget: Annotated[WriteAmount | None, optional(sized(sizes.parse_daily_writes))] = None
    """Bytes, or drive writes, per day; `None`: no limit."""
    min_free: Annotated[Size, sized(sizes.parse_reserve)] = Share(Fraction(5, 100))
    """Bytes, or a share of the disk, that are never used."""
    io_threads: Annotated[int, whole(1, MAX_IO_THREADS)] = 3
    """Reads, and writes, that are under way at a time."""
    movers: Annotated[Movers, choice(Movers)] = Movers.PROCESS
    """Who moves blocks to and from the CPU tier: a process of its own, or the scheduler's."""
    direct_io: Annotated[DirectIO, _direct_io] = DirectIO.AUTO
    """Whether payload passes by the page cache; `auto`: where the file system can."""
    segment_size: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Bytes of one segment file, about; `None`: 1 GiB, less in small tiers, more in large ones."""


TierConfig = CpuTier | NvmeTier
"""The options of one tier."""
BELOW: Mapping[str, type[NvmeTier]] = {NvmeTier.type: NvmeTier}
"""Types of tiers below the first, and the classes of their options."""
TIER_TYPES = (CpuTier.type, *BELOW)


def _tiers(at: At, value: Any) -> tuple[TierConfig, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise at.wrong(value, f"is not a list of tiers; {_TIERS_REMEDY}")
    if len(value) > MAX_TIERS:
        raise at.wrong(value, f"has {len(value)} tiers; give {MAX_TIERS} at most")
    tiers: list[TierConfig] = []
    for index, item in enumerate(value):
        with noting(at.noted):
            tiers.append(_tier(at.item(index), item, index))
    owners: dict[Path, str] = {}
    for tier in tiers:
        for path in tier.path if isinstance(tier, NvmeTier) else ():
            clash = f"is used by {owners.get(path)} already; give a folder that is used once"
            with noting(at.noted):
                if path in owners:
                    raise At(f"{tier.key}.path").wrong(str(path), clash)
                owners[path] = tier.key
    return tuple(tiers)


def _tier(at: At, value: Any, index: int) -> TierConfig:
    if not isinstance(value, Mapping):
        raise at.wrong(value, 'is not a tier; write it as {"type": ..., "capacity": ...}')
    if "type" not in value:
        raise at.below("type").missing(_ORDER_REMEDY)
    if value["type"] not in TIER_TYPES:
        expected = " or ".join(map(repr, TIER_TYPES))
        key = at.below("type").key
        raise ConfigError(f"{key}: invalid tier type {value['type']!r}; expected {expected}.")
    if (value["type"] in BELOW) is not bool(index):
        raise at.below("type").wrong(value["type"], f"is not what comes here; {_ORDER_REMEDY}")
    options = {name: option for name, option in value.items() if name != "type"}
    if index:
        return read_options(BELOW[value["type"]], at, options, also=["type"])
    tier = read_options(CpuTier, at, options, also=["type"])
    if tier.low_watermark.part >= tier.high_watermark.part:
        problem = f"is not above low_watermark, which is {tier.low_watermark}; change one of them"
        raise at.below("high_watermark").wrong(str(tier.high_watermark), problem)
    return tier


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """The whole configuration."""

    key: str
    """Empty: the options stand at the top."""
    tiers: Annotated[tuple[TierConfig, ...], _tiers, _TIERS_REMEDY]
    """From the fastest down; the first is the only `CpuTier`."""
    write_mode: Annotated[WriteMode | None, optional(choice(WriteMode))] = None
    """When a block is written to the tier below; `None`: see `machine.writing`."""
    dirty_age_s: Annotated[float, seconds] = 5.0
    """In mode `back`: how long a block may be dirty."""
    on_reset: Annotated[OnReset, choice(OnReset)] = OnReset.INVALIDATE
    """What `reset_cache` does to the blocks that are there."""
    shutdown_flush_s: Annotated[float | None, optional(seconds)] = None
    """How long a shutdown may take to write dirty blocks; `None`: what the engine is given, or
    `DEFAULT_FLUSH_S` where it does not say."""
    promotion_deadline_s: Annotated[float, deadline] = 10.0
    """After this long a pending read is a miss."""
    promotion_budget: Annotated[Budget | None, optional(sized(sizes.parse_budget))] = None
    """Slots of the first tier that promotions may hold at a time; `None`: nearly all that are not
    dirty, and at least half."""
    load_or_recompute: Annotated[bool, flag] = True
    """Read blocks only where that is expected to be faster than computing them again."""
    prefill_tokens_per_s: Annotated[float | None, optional(rate)] = None
    """Speed of computing; `None`: measured while serving."""
    record: Annotated[Path | None, optional(folder)] = None
    """Folder for a record of all requests, to be replayed; `None`: none is kept."""
    label: Annotated[str, text] = ""
    """The user's word in the fingerprint of the namespace."""
    weights_id: Annotated[str | None, word_or_none] = None
    """Identity of the weights, in place of the one that is found; `None`: find it."""

    @property
    def cpu(self) -> CpuTier:
        """The first tier."""
        assert isinstance(self.tiers[0], CpuTier)
        return self.tiers[0]

    @property
    def nvme(self) -> tuple[NvmeTier, ...]:
        """The tiers below the first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, NvmeTier))


def parse(
    extra_config: Mapping[str, object],
    policies: Collection[str] | None = None,
    noted: list[str] | None = None,
) -> CascadeConfig:
    """Read `kv_connector_extra_config`; raises `ConfigError`, touches nothing.

    `policies` are the known names of policies; a policy may also be "package.module:Class". Without
    them any word passes for a policy, and `assembly.named.check_names` finds the wrong ones.
    With a list to note problems in, what can be read is read all the same (`options.noting`).
    """
    if not isinstance(extra_config, Mapping):
        remedy = 'is not a dictionary; give {"tiers": [...], ...}'
        raise At("kv_connector_extra_config").wrong(extra_config, remedy)
    check_vllm_keys(extra_config, noted)
    known = None if policies is None else tuple(policies)
    ours: dict[str, object] = {}
    for key, value in extra_config.items():
        if key not in VLLM_KEYS and key not in ELSEWHERE:
            ours[key] = value
        with noting(noted):
            if key in ELSEWHERE:
                remedy = f" of the tiers in vLLM itself; use {ELSEWHERE[key]} here"
                raise At(key).unknown(value, remedy)
    return read_options(CascadeConfig, At("", known, noted), ours, also=VLLM_KEYS)


def check_vllm_keys(extra_config: Mapping[str, object], noted: list[str] | None = None) -> None:
    """Raise `ConfigError` for the first of `VLLM_KEYS` with a wrong value, or note all."""
    for key, read in VLLM_KEYS.items():
        if key in extra_config:
            with noting(noted):
                read(At(key), extra_config[key])
    with noting(noted):
        if None not in (extra_config.get("block_size"), extra_config.get("blocks_per_chunk")):
            problem = "says the same as blocks_per_chunk; leave one of them out"
            raise At("block_size").wrong(extra_config["block_size"], problem)
