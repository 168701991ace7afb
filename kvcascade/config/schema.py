"""`kv_connector_extra_config` as typed, frozen values, validated before anything is loaded.

Parsing is pure: it reads no file and asks no machine (`config.machine` does that). Every problem is
a `ConfigError` of one sentence that names the full key, the value and the allowed values.
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
from .sizes import Budget, Bytes, DeviceShare, FreeShare, Share, Size, WriteAmount

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
"""Keys of the same dictionary that vLLM reads. vLLM reads them only after the model is loaded and
does not check their types, so they are checked here; their values are not kept."""

ELSEWHERE = {
    "cpu_bytes_to_use": "tiers[0].capacity",
    "cpu_bytes_to_use_per_rank": "tiers[0].capacity",
    "eviction_policy": "tiers[0].policy",
    "secondary_tiers": "tiers",
    "store_threshold": "tiers[1].admission",
}
"""Keys of the tiers that come with vLLM, and the corresponding key here."""

PATH_KEY = "path"
"""Key that stands for a complete list of tiers: a CPU tier, and an NVMe tier on this path."""
DEFAULT_FLUSH_S = 20.0
MAX_TIERS = 8
MAX_IO_THREADS = 64

_PATH_REMEDY = 'give a folder on the device, such as "/mnt/nvme/kv"'
_TIERS_REMEDY = 'give "path": "/mnt/nvme/kv", or a list that begins with {"type": "cpu"}'
_ORDER_REMEDY = 'use "cpu" for the first tier and "nvme" for every other one'


class WriteMode(StrEnum):
    """When a block is written to the tier below."""

    DEMOTE = "demote"
    BACK = "back"
    THROUGH = "through"


class OnReset(StrEnum):
    """Effect of `reset_cache` on stored blocks."""

    INVALIDATE = "invalidate"
    KEEP = "keep"


class Durability(StrEnum):
    """Failure that every block reported as stored survives."""

    PROCESS = "process"
    """The death of the process."""
    POWER = "power"
    """A loss of power."""


class AdmissionMode(StrEnum):
    """Rule for the blocks that may enter a tier."""

    ALL = "all"
    SECOND_TOUCH = "second_touch"


class Movers(StrEnum):
    """Process that moves the blocks of a tier."""

    PROCESS = "process"
    THREADS = "threads"


class DirectIO(StrEnum):
    """Whether block payload bypasses the page cache."""

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
class CpuTierOptions:
    """Options of the tier in shared memory."""

    type: ClassVar[str] = "cpu"

    key: str
    """Place in the configuration, for messages: "tiers[0]"."""
    capacity: Annotated[Size | DeviceShare, sized(sizes.parse_size)] = DeviceShare(Fraction(4, 10))
    """Bytes, or a share of the machine's memory; the default is 40 % of the memory, in equal
    parts for each device of the machine (see `machine.settled`)."""
    policy: Annotated[str, policy_name] = "lru"
    """Name, or "package.module:Class", of the eviction policy."""
    arena_dir: Annotated[Path, folder] = Path("/dev/shm")
    """Folder of a memory file system that holds the arena."""
    prefault: Annotated[bool, flag] = True
    """Touch every page at the start, so that no step pays for it later."""
    low_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(4, 10))
    """Share of the tier that is free or clean; below it, demotion starts."""
    high_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(5, 10))
    """Share of the tier that is free or clean when demotion stops."""
    persist: Annotated[bool, flag] = False
    """Keep the arena in shared memory, for the next engine of the same namespace."""


@dataclass(frozen=True, slots=True)
class NvmeTierOptions:
    """Options of a tier on disk."""

    type: ClassVar[str] = "nvme"

    key: str
    """Place in the configuration, for messages: "tiers[1]"."""
    path: Annotated[tuple[Path, ...], folders, _PATH_REMEDY]
    """Absolute folders, one per device."""
    capacity: Annotated[Size | FreeShare, sized(sizes.parse_size)] = FreeShare(Fraction(8, 10))
    """Bytes over all paths and namespaces, or a share of the disks; the default is 80 % of the
    space that is free, or used by the tier, beyond `min_free`."""
    policy: Annotated[str, policy_name] = "lru"
    """Name, or "package.module:Class", of the eviction policy."""
    durability: Annotated[Durability, choice(Durability)] = Durability.PROCESS
    """Failure that every block reported as stored survives."""
    admission: Annotated[AdmissionMode | str, choice_or_name(AdmissionMode)] = AdmissionMode.ALL
    """Rule for the blocks that may enter; "package.module:function" is the user's own."""
    write_budget: Annotated[WriteAmount | None, optional(sized(sizes.parse_daily_writes))] = None
    """Bytes, or drive writes, per day; `None`: no limit."""
    min_free: Annotated[Size, sized(sizes.parse_reserve)] = Share(Fraction(5, 100))
    """Bytes, or a share of the disk, that stay free."""
    io_threads: Annotated[int, whole(1, MAX_IO_THREADS)] = 3
    """Number of concurrent reads, and of concurrent writes."""
    movers: Annotated[Movers, choice(Movers)] = Movers.PROCESS
    """Process that moves blocks to and from the CPU tier: its own, or the scheduler's."""
    direct_io: Annotated[DirectIO, _direct_io] = DirectIO.AUTO
    """Whether payload bypasses the page cache; `auto`: if the file system supports it."""
    segment_size: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Approximate bytes of one segment file; `None`: 1 GiB, adapted to the tier's size."""


TierConfig = CpuTierOptions | NvmeTierOptions
"""Options of one tier."""
BELOW: Mapping[str, type[NvmeTierOptions]] = {NvmeTierOptions.type: NvmeTierOptions}
"""Types of tiers below the first, and the classes of their options."""
TIER_TYPES = (CpuTierOptions.type, *BELOW)


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
        for path in tier.path if isinstance(tier, NvmeTierOptions) else ():
            clash = f"is used by {owners.get(path)} already; give a folder that is used once"
            with noting(at.noted):
                if path in owners:
                    raise At(f"{tier.key}.path").wrong(str(path), clash)
                owners[path] = tier.key
    return tuple(tiers)


def _tier(at: At, value: Any, index: int) -> TierConfig:
    if not isinstance(value, Mapping):
        raise at.wrong(value, 'is not a tier; write it as {"type": "cpu"} or {"type": "nvme", ...}')
    if "type" not in value:
        raise at.below("type").missing(_ORDER_REMEDY)
    if value["type"] not in TIER_TYPES:
        expected = " or ".join(map(repr, TIER_TYPES))
        key = at.below("type").key
        raise ConfigError(f"{key}: invalid tier type {value['type']!r}; expected {expected}.")
    if (value["type"] in BELOW) is not bool(index):
        problem = f"is not allowed at this position; {_ORDER_REMEDY}"
        raise at.below("type").wrong(value["type"], problem)
    options = {name: option for name, option in value.items() if name != "type"}
    if index:
        return read_options(BELOW[value["type"]], at, options, also=["type"])
    tier = read_options(CpuTierOptions, at, options, also=["type"])
    if tier.low_watermark.part >= tier.high_watermark.part:
        problem = f"is not above low_watermark, which is {tier.low_watermark}; change one of them"
        raise at.below("high_watermark").wrong(str(tier.high_watermark), problem)
    return tier


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """The whole configuration."""

    key: str
    """Empty, because the options are at the top level."""
    tiers: Annotated[tuple[TierConfig, ...], _tiers, _TIERS_REMEDY]
    """From the fastest down; the first is the only `CpuTierOptions`."""
    write_mode: Annotated[WriteMode | None, optional(choice(WriteMode))] = None
    """Time of writing a block to the tier below; `None`: chosen by `machine.writing`."""
    dirty_age_s: Annotated[float, seconds] = 5.0
    """Longest time that a block may be dirty in mode `back`."""
    on_reset: Annotated[OnReset, choice(OnReset)] = OnReset.INVALIDATE
    """Effect of `reset_cache` on stored blocks."""
    shutdown_flush_s: Annotated[float | None, optional(seconds)] = None
    """Longest time for writing dirty blocks at shutdown; `None`: vLLM's shutdown timeout, or
    `DEFAULT_FLUSH_S` if vLLM does not have one."""
    promotion_deadline_s: Annotated[float, deadline] = 10.0
    """Time after which a pending read counts as a miss."""
    promotion_budget: Annotated[Budget | None, optional(sized(sizes.parse_budget))] = None
    """Slots of the first tier that promotions may hold at a time; `None`: nearly all that are not
    dirty, but at least half."""
    load_or_recompute: Annotated[bool, flag] = True
    """Read blocks only if that is expected to be faster than recomputing them."""
    prefill_tokens_per_s: Annotated[float | None, optional(rate)] = None
    """Prefill speed; `None`: measured while serving."""
    record: Annotated[Path | None, optional(folder)] = None
    """Folder for a recording of all requests, for replay; `None`: no recording."""
    label: Annotated[str, text] = ""
    """Free-text tag that is added to the fingerprint of the namespace."""
    weights_id: Annotated[str | None, word_or_none] = None
    """Identity of the weights; `None`: determined from the model."""

    @property
    def cpu(self) -> CpuTierOptions:
        """The first tier."""
        assert isinstance(self.tiers[0], CpuTierOptions)
        return self.tiers[0]

    @property
    def nvme(self) -> tuple[NvmeTierOptions, ...]:
        """The NVMe tiers, below the first tier."""
        return tuple(tier for tier in self.tiers if isinstance(tier, NvmeTierOptions))


def parse(
    extra_config: Mapping[str, object],
    policies: Collection[str] | None = None,
    noted: list[str] | None = None,
) -> CascadeConfig:
    """Return the configuration in `kv_connector_extra_config`. Raises `ConfigError`.

    `policies`: known names; a policy may also be given as "package.module:Class". If it is None,
    any word passes for a policy, and `assembly.named.check_names` finds the wrong ones. If `noted`
    is a list, problems are collected there, and all other options are read (`options.noting`).
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
    with noting(noted):
        ours = with_tiers(ours)
    return read_options(CascadeConfig, At("", known, noted), ours, also=(*VLLM_KEYS, PATH_KEY))


def with_tiers(options: dict[str, object]) -> dict[str, object]:
    """Replace `path` by the two tiers that it stands for: one in memory, one in these folders.

    Raises `ConfigError` if the tiers are given, too.
    """
    if PATH_KEY not in options:
        return options
    path = options[PATH_KEY]
    if "tiers" in options:
        problem = "has no effect beside tiers; leave it out, or give it in a tier of type nvme"
        raise At(PATH_KEY).wrong(path, problem)
    others = {key: value for key, value in options.items() if key != PATH_KEY}
    return {**others, "tiers": [{"type": "cpu"}, {"type": "nvme", "path": path}]}


def check_vllm_keys(extra_config: Mapping[str, object], noted: list[str] | None = None) -> None:
    """Raise `ConfigError` for the first of `VLLM_KEYS` with a wrong value, or collect all."""
    for key, read in VLLM_KEYS.items():
        if key in extra_config:
            with noting(noted):
                read(At(key), extra_config[key])
    with noting(noted):
        if None not in (extra_config.get("block_size"), extra_config.get("blocks_per_chunk")):
            problem = "has the same meaning as blocks_per_chunk; leave one of them out"
            raise At("block_size").wrong(extra_config["block_size"], problem)
