"""`kv_connector_extra_config` as typed, frozen values, validated before anything is loaded.

Parsing is pure: it reads no file and asks no machine (`config.machine` does that). Every problem is
a `ConfigError` of one sentence that names the full key, the value and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from fractions import Fraction
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Protocol

from ..errors import ConfigError
from . import sizes
from .options import (
    At,
    Reader,
    choice,
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
from .remote import RemoteTierOptions, parse_remote
from .sizes import Budget, Bytes, DeviceShare, FreeShare, Share, Size, WriteAmount

MAX_BLOCKS_PER_CHUNK = 1 << 16
MAX_TOKENS_PER_CHUNK = 1 << 20


def _not_canonical(at: At, value: Any) -> bool:
    if value is not False:
        raise at.wrong(value, "is not supported; leave it out, or set it to false")
    return value


VLLM_KEYS: Mapping[str, tuple[Reader, str]] = {
    "spec_name": (text, 'Name of the spec: `"CascadeOffloadingSpec"`.'),
    "spec_module_path": (
        optional(text),
        'Module of the spec: `"kvcascade.spec"`. Where kvcascade is installed, it may be left out, '
        "because a plugin registers the name with vLLM.",
    ),
    "block_size": (
        optional(whole(1, MAX_TOKENS_PER_CHUNK)),
        "Tokens of an offloaded block, a multiple of vLLM's block size: several GPU blocks become "
        "one offloaded block.",
    ),
    "blocks_per_chunk": (
        optional(whole(1, MAX_BLOCKS_PER_CHUNK)),
        "The same as a number of GPU blocks; give one of the two. Above 1 it is refused for models "
        "with sliding windows or states, because vLLM would store chunks with gaps.",
    ),
    "offload_prompt_only": (
        flag,
        "Offload the blocks of prompts only, as in vLLM. False is refused with vLLM 0.26 to 0.29 "
        "and builds next to them: they store the last token of an answer before it is computed.",
    ),
    "self_describing_kv_events": (flag, "Add token ids and more to KV events, as in vLLM."),
    "sync_load_budget_bytes": (whole(0, sizes.MAX_BYTES), "As in vLLM, from 0.33 on."),
    "canonical_layout": (_not_canonical, "Only false is supported."),
}
"""Keys of the same dictionary that vLLM reads, with reader and meaning. vLLM reads them only after
the model is loaded and does not check their types, so they are checked here; their values are not
kept."""

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
STOP_S = 2.0
"""Seconds that an engine needs to stop, in addition to the time for writing dirty blocks."""
MAX_TIERS = 8
MAX_IO_THREADS = 64

_PATH_REMEDY = 'give a folder on the device, such as "/mnt/nvme/kv"'
_TIERS_REMEDY = 'give "path": "/mnt/nvme/kv", or a list that begins with {"type": "cpu"}'
_ORDER_REMEDY = 'use "cpu" for the first tier, "nvme" for others, and "remote" for the last one'


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
    """The death of the process. After a loss of power, or a crash of the kernel, the latest blocks
    are gone, and sometimes all."""
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


def _direct_io(at: At, value: Any) -> bool:
    if isinstance(value, bool) or value == "auto":
        return bool(value)
    raise at.wrong(value, 'is not known; use "auto", true or false')


@dataclass(frozen=True, slots=True)
class CpuTierOptions:
    """Options of the tier in shared memory."""

    type: ClassVar[str] = "cpu"

    key: str
    """Place in the configuration, for messages: "tiers[0]"."""
    capacity: Annotated[Size | DeviceShare, sized(sizes.parse_size)] = DeviceShare(Fraction(4, 10))
    """Memory of the arena, over all ranks: a size, or a share of the memory of the machine or of
    its container. The default is 40 % of that memory, divided by the devices of the machine and
    multiplied by those of the engine; without GPUs, an eighth of it."""
    policy: Annotated[str, policy_name] = "lru"
    """Eviction policy: a built-in name, the name of an entry point of the group
    `kvcascade.policies`, or "package.module:Class"."""
    arena_dir: Annotated[Path, folder] = Path("/dev/shm")
    """Folder of a memory file system, or of hugetlbfs, that holds the arena. On a disk, the
    contents of memory would also be written to that disk."""
    prefault: Annotated[bool, flag] = True
    """Touch every page at the start, so that no step pays for it later."""
    low_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(4, 10))
    """Demotion starts when less than this share of the tier is free or clean."""
    high_watermark: Annotated[Share, sized(sizes.parse_share)] = Share(Fraction(5, 10))
    """Demotion stops when this share of the tier is free or clean."""
    persist: Annotated[bool, flag] = False
    """Keep the arena in shared memory however the engine ends. The next engine of the same
    namespace and capacity takes over every complete block. `kvcascade shm ls` lists such arenas,
    `kvcascade shm drop` frees them."""


@dataclass(frozen=True, slots=True)
class NvmeTierOptions:
    """Options of a tier on disk."""

    type: ClassVar[str] = "nvme"
    opener: ClassVar[str] = "kvcascade.assembly.node_parts:open_node_tier"

    key: str
    """Place in the configuration, for messages: "tiers[1]"."""
    path: Annotated[tuple[Path, ...], folders, _PATH_REMEDY]
    """Absolute folder, or a list of folders on several devices, whose bandwidth adds up."""
    capacity: Annotated[Size | FreeShare, sized(sizes.parse_size)] = FreeShare(Fraction(8, 10))
    """Disk space over all paths and all models in them, index included: a size, or a share of the
    disks. The default is 80 % of the space that is free or used by the tier, beyond `min_free`.
    Of engines that share a path, the one that writes it decides."""
    policy: Annotated[str, policy_name] = "lru"
    """Eviction policy, as for the CPU tier; the engine that writes the path decides."""
    durability: Annotated[Durability, choice(Durability)] = Durability.PROCESS
    """Failure that a stored block survives: the death of the process, or a loss of power. Of the
    engines that share a path, the stronger choice holds."""
    admission: Annotated[AdmissionMode | str, choice(AdmissionMode, or_name=True)] = (
        AdmissionMode.ALL
    )
    """Blocks that may enter the tier: all, or only blocks that were used again. A rule of your own
    is a function `function(block_hash, uses) -> bool`, given as "package.module:function"."""
    write_budget: Annotated[WriteAmount | None, optional(sized(sizes.parse_daily_writes))] = None
    """Bytes that all engines together may write in any 24 hours, restarts included: `"500GB"`, or
    drive writes per day, `"0.3 DWPD"`."""
    min_free: Annotated[Size, sized(sizes.parse_reserve)] = Share(Fraction(5, 100))
    """Disk space that is never used: a size, or a share of the disk."""
    min_share: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Space that the blocks of other models in the same path may not take from those of this
    engine. By default the coldest blocks of all models leave first. It is recorded with the path,
    and of several engines of one model the largest holds."""
    io_threads: Annotated[int, whole(1, MAX_IO_THREADS)] = 3
    """Number of concurrent reads, and of concurrent writes. Each takes two threads of the process
    that moves blocks, and two buffers of 8 MiB if the arena is in small pages."""
    movers: Annotated[Movers, choice(Movers)] = Movers.PROCESS
    """Mover of blocks to and from the CPU tier: a small process of its own, which a busy scheduler
    does not slow down, or threads of the scheduler's process."""
    direct_io: Annotated[bool, _direct_io] = True
    """Whether payload bypasses the page cache if the file system supports it. `"auto"` means the
    same as `true`."""
    segment_size: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Approximate size of one file. The default is about 1 GiB: smaller in small tiers, larger in
    large ones."""


class BelowOptions(Protocol):
    """Options of a tier below the first: a frozen dataclass whose fields name their readers."""

    type: ClassVar[str]
    opener: ClassVar[str]
    """The `Opener` of `assembly.below_parts` that opens such a tier, as "module:function"."""

    @property
    def key(self) -> str:
        """Place in the configuration, for messages: "tiers[1]"."""
        ...


TierConfig = CpuTierOptions | BelowOptions
"""Options of one tier."""
BELOW: Mapping[str, str] = {
    "nvme": "kvcascade.config.schema:NvmeTierOptions",
    "remote": "kvcascade.config.remote:RemoteTierOptions",
}
"""Types of tiers below the first, and the classes of their options, as "module:class"."""
TIER_TYPES = (CpuTierOptions.type, *BELOW)


@cache
def options_class(kind: str) -> type[Any]:
    """Return the class of the options of a tier type."""
    if kind == CpuTierOptions.type:
        return CpuTierOptions
    found: type[Any] = resolve_name(BELOW[kind])
    return found


def _tiers(at: At, value: Any) -> tuple[TierConfig, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise at.wrong(value, f"is not a list of tiers; {_TIERS_REMEDY}")
    if len(value) > MAX_TIERS:
        raise at.wrong(value, f"has {len(value)} tiers; give {MAX_TIERS} at most")
    tiers: list[TierConfig] = []
    for index, item in enumerate(value):
        with noting(at.noted):
            tiers.append(_tier(at.item(index), item, index))
    with noting(at.noted):
        _check_remote(tiers)
    owners: dict[Path, str] = {}
    for tier in tiers:
        for path in tier.path if isinstance(tier, NvmeTierOptions) else ():
            clash = f"is used by {owners.get(path)} already; give a folder that is used once"
            with noting(at.noted):
                if path in owners:
                    raise At(f"{tier.key}.path").wrong(str(path), clash)
                owners[path] = tier.key
    return tuple(tiers)


def _check_remote(tiers: Sequence[TierConfig]) -> None:
    """Check that only the last tier is remote, and that the first one is not kept above it."""
    for tier in tiers[:-1]:
        if isinstance(tier, RemoteTierOptions):
            problem = f"is not allowed at this position; {_ORDER_REMEDY}"
            raise At(f"{tier.key}.type").wrong(tier.type, problem)
    for tier in tiers:
        if isinstance(tier, CpuTierOptions) and tier.persist and len(tiers) > 1:
            if isinstance(tiers[-1], RemoteTierOptions):
                problem = "would miss resets by other hosts of the remote tier; leave it out"
                raise At(f"{tier.key}.persist").wrong(True, problem)


def _tier(at: At, value: Any, index: int) -> TierConfig:
    if not isinstance(value, Mapping):
        raise at.wrong(value, 'is not a tier; write it as {"type": "cpu"} or {"type": "nvme", ...}')
    if "type" not in value:
        raise at.below("type").missing(_ORDER_REMEDY)
    if value["type"] not in TIER_TYPES:
        *most, last = map(repr, TIER_TYPES)
        expected = f"{', '.join(most)} or {last}"
        key = at.below("type").key
        raise ConfigError(f"{key}: invalid tier type {value['type']!r}; expected {expected}.")
    if (value["type"] in BELOW) is not bool(index):
        problem = f"is not allowed at this position; {_ORDER_REMEDY}"
        raise at.below("type").wrong(value["type"], problem)
    options = {name: option for name, option in value.items() if name != "type"}
    if value["type"] == RemoteTierOptions.type:
        return parse_remote(at, options)
    if index:
        below: BelowOptions = read_options(options_class(value["type"]), at, options, also=["type"])
        return below
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
    """The tiers, fastest first: one `cpu` tier, then `nvme` tiers, then perhaps a `remote` tier; 8
    at most. A key `path` instead of it stands for a `cpu` tier and an `nvme` tier on that path,
    with default capacities."""
    write_mode: Annotated[WriteMode | None, optional(choice(WriteMode))] = None
    """When a block is written down: when it leaves the CPU tier or at shutdown (`"demote"`), also
    `dirty_age_s` after it was stored (`"back"`), or at once (`"through"`). The default is
    `"back"` where the first NVMe tier is at least twice as large as the CPU tier, else
    `"demote"`; above a remote tier alone it is `"through"`. The log and `kvcascade check` say
    which."""
    dirty_age_s: Annotated[float, seconds] = 5.0
    """Longest time in seconds that a stored block may exist in memory only, in mode `back`. It is
    longer only if the tier below has no room."""
    on_reset: Annotated[OnReset, choice(OnReset)] = OnReset.INVALIDATE
    """Effect of `reset_prefix_cache(reset_connector=True)`. `"invalidate"`: older blocks are
    unreachable, and blocks stored later are not for the next start, because the weights may have
    been updated in place. `"keep"`: blocks stay; for engines that reset only for sleep and wake."""
    shutdown_flush_s: Annotated[float | None, optional(seconds)] = None
    """Time limit in seconds for writing dirty blocks at shutdown. The default is vLLM's
    `--shutdown-timeout` less 2 s, or 20 s where vLLM has none."""
    promotion_deadline_s: Annotated[float, deadline] = 10.0
    """A pending read without progress for this many seconds counts as a miss. With
    `load_or_recompute`, a request waits less if it computes faster."""
    promotion_budget: Annotated[Budget | None, optional(sized(sizes.parse_budget))] = None
    """Part of the CPU tier that reads from below may hold at a time: a share, a size or a number of
    blocks. The default is the tier without 1/16 and without dirty blocks, and at least half."""
    load_or_recompute: Annotated[bool, flag] = True
    """Read blocks from a lower tier only if reading is expected to take less than twice as long as
    computing them, and from a remote tier less time than computing. The requests ahead count on
    both sides."""
    prefill_tokens_per_s: Annotated[float | None, optional(rate)] = None
    """Prefill speed for that choice. The default is measured while serving."""
    record: Annotated[Path | None, optional(folder)] = None
    """Folder in which every request is recorded, without tokens, for `kvcascade replay`: mode 0600,
    at most 1 GiB for each engine that records there; the oldest recordings are removed."""
    label: Annotated[str, text] = ""
    """Free-text tag that is added to the fingerprint. Engines with different labels share no
    blocks."""
    weights_id: Annotated[str | None, word_or_none] = None
    """Identity of the weights: a name that changes with them. The default is determined from the
    model."""

    @property
    def cpu(self) -> CpuTierOptions:
        """The first tier."""
        assert isinstance(self.tiers[0], CpuTierOptions)
        return self.tiers[0]

    @property
    def nvme(self) -> tuple[NvmeTierOptions, ...]:
        """The NVMe tiers, below the first tier."""
        return tuple(tier for tier in self.tiers if isinstance(tier, NvmeTierOptions))

    @property
    def shutdown_timeout_s(self) -> int | None:
        """vLLM's `--shutdown-timeout` that leaves time to write dirty blocks; None if none are."""
        flush_s = self.shutdown_flush_s
        if len(self.tiers) == 1 or flush_s == 0:
            return None
        return math.ceil((DEFAULT_FLUSH_S if flush_s is None else flush_s) + STOP_S)

    @property
    def below(self) -> tuple[BelowOptions, ...]:
        """The tiers below the first."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, CpuTierOptions))

    @property
    def remote(self) -> RemoteTierOptions | None:
        """The remote tier, which is the last one; None if there is none."""
        last = self.tiers[-1]
        return last if isinstance(last, RemoteTierOptions) else None


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
    known_here = option_names(CascadeConfig) | {PATH_KEY}
    for key in [key for key in ours if key not in known_here]:
        kinds = [kind for kind in TIER_TYPES if key in option_names(options_class(kind))]
        if kinds:
            value = ours.pop(key)
            with noting(noted):
                raise At(key).unknown(value, _of_tiers(key, kinds))
    with noting(noted):
        ours = with_tiers(ours)
    ours.pop(PATH_KEY, None)  # a problem that is noted
    return read_options(CascadeConfig, At("", known, noted), ours, also=(*VLLM_KEYS, PATH_KEY))


def option_names(cls: type[Any]) -> set[str]:
    """Return the keys of a class of options."""
    return {each.name for each in fields(cls)} - {"key"}


def _of_tiers(key: str, kinds: Sequence[str]) -> str:
    """Return the remedy for a key of tiers that stands at the top level."""
    *most, last = kinds
    owners = f"{', '.join(most)} and {last} tiers" if most else f"{last} tier"
    return (
        f" of the top level; {key} is a key of the {owners}, so write out tiers and give it there"
    )


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
    for key, (read, _) in VLLM_KEYS.items():
        if key in extra_config:
            with noting(noted):
                read(At(key), extra_config[key])
    with noting(noted):
        if None not in (extra_config.get("block_size"), extra_config.get("blocks_per_chunk")):
            problem = "has the same meaning as blocks_per_chunk; leave one of them out"
            raise At("block_size").wrong(extra_config["block_size"], problem)
