"""All questions about the installed vLLM: which adapter fits, its version, and what it offers.

No other module compares versions or looks for names in vLLM's modules (`tests/vllm` checks it). A
name is looked for wherever that is possible; a version number decides only where two versions offer
the same names and behave differently. If vLLM is not installed, this module can be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError
from ..logs import get_logger

_log = get_logger(__name__)

_BASE = "vllm.v1.kv_offload"
_RELEASE = re.compile(r"[0-9.]+(\.post[0-9]+)?(\+.*)?")
"""Versions of releases, such as 0.32.1 and 0.32.1+cpu; 0.33.0rc1 and 0.33.0.dev7 are none."""
_AFTER_RELEASE = re.compile(r"\d+\.\d+(\.[1-9]\d*|\.\d+\.post\d+)(\.dev|a|b|rc)")
"""Versions of builds after a release, such as 0.32.1rc1.dev7 and 0.32.0.post1.dev7."""
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
_UNKNOWN = (0, 0)


# The adapter.


@dataclass(frozen=True, slots=True)
class Generation:
    """vLLM versions that one adapter serves."""

    module: str
    """Name of the adapter's module in this folder."""
    first: int
    """Minor version of the oldest vLLM of the generation."""
    last: int
    """Minor version of the newest vLLM of the generation."""
    fits: Callable[[], bool]
    """Returns True if the installed vLLM is of this generation, or of a newer one."""


SEED = "v0_16"
"""Adapter of the versions without keys of their own for blocks, 0.16 to 0.19."""
GENERATIONS = (
    Generation("v0_26", 26, 33, lambda: _has_worker() and _offers(f"{_BASE}.config")),
    Generation("v0_25", 25, 25, lambda: _has_worker()),
    Generation("v0_24", 24, 24, lambda: _has_handlers_and_steps()),
    Generation(SEED, 16, 19, lambda: _is_seed()),
)
"""Newest first; the first that fits is taken."""


def supported(generations: Sequence[Generation] = GENERATIONS) -> str:
    """Return the supported versions in words, generations without a gap as one range."""
    spans: list[tuple[int, int]] = []
    for each in reversed(generations):
        if spans and each.first == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], each.last)
        else:
            spans.append((each.first, each.last))
    return " or ".join(
        f"0.{first}" if first == last else f"0.{first} to 0.{last}" for first, last in spans
    )


def adapter() -> str:
    """Return the name of the module with the adapter for the installed vLLM.

    vLLM rebuilt its interface for offloading several times. The generations differ in their modules
    and in the names in them. Raises `ConfigError` if no adapter fits.
    """
    if not _offers("vllm"):
        raise ConfigError("kvcascade.spec needs vLLM, which is not installed; pip install vllm.")
    for generation in GENERATIONS:
        if generation.fits():
            return generation.module
    version = getattr(import_module("vllm"), "__version__", "(of no known version)")
    raise ConfigError(
        f"kvcascade does not support the installed vLLM {version}, because its interface for "
        f"offloading differs; install vLLM {supported()}."
    )


def _has_worker() -> bool:
    """Return True if a spec makes a worker that submits jobs."""
    return _offers(f"{_BASE}.base", "OffloadingWorker")


def _has_handlers_and_steps() -> bool:
    """Return True for 0.24: managers know requests, steps and pending work, and handlers copy."""
    if not _offers(f"{_BASE}.base", "OffloadingManager") or not _offers(f"{_BASE}.worker.worker"):
        return False
    return hasattr(import_module(f"{_BASE}.base").OffloadingManager, "has_pending_work")


def _is_seed() -> bool:
    """Return True for 0.16 to 0.19: keys are plain hashes, and handlers report dataclasses.

    Up to 0.15 handlers report pairs; from 0.20 on keys are `OffloadKey`.
    """
    if not _offers(f"{_BASE}.mediums") or _offers(f"{_BASE}.abstract", "OffloadKey"):
        return False
    worker = f"{_BASE}.worker.worker"
    return _offers(worker, "TransferResult") and is_dataclass(import_module(worker).TransferResult)


def _offers(module: str, *names: str) -> bool:
    """Return whether the installed vLLM has this module with these names in it."""
    try:
        found = import_module(module)
    except ModuleNotFoundError:
        return False
    return all(hasattr(found, name) for name in names)


# The version number, where the names are the same. Where it says too little, the answer is the one
# that cannot lead to wrong bytes.


def vllm_version() -> tuple[int, int]:
    """Return major and minor version of the installed vLLM; (0, 0) if it does not say.

    A build from source may be named "dev", or "0.1.dev9" if it knows no release.
    """
    found = _NUMBERS.match(_full_version())
    version = (int(found[1]), int(found[2])) if found else _UNKNOWN
    return version if version >= (0, GENERATIONS[-1].first) else _UNKNOWN


def _may_be(first: int, last: int | None = None) -> bool:
    """Return True if the installed vLLM may behave like a version from 0.first to 0.last.

    Without `last`, any version from 0.first on is meant. A build that is no release may also behave
    like the version before, or like the one after if it was made after a release. A build of an
    unknown version may behave like any.
    """
    oldest = newest = vllm_version()
    full = _full_version()
    if oldest == _UNKNOWN:
        _warn_of_unknown(full)
        return True
    if _AFTER_RELEASE.match(full):
        newest = (newest[0], newest[1] + 1)
    elif not _RELEASE.fullmatch(full):
        oldest = (oldest[0], oldest[1] - 1)
    return newest >= (0, first) and (last is None or oldest <= (0, last))


@cache
def _warn_of_unknown(version: str) -> None:
    _log.warning(
        "kvcascade: vLLM's version is %r, which is that of no release; kvcascade takes the faults "
        "of all supported releases for possible",
        version,
    )


def version_of_blocks() -> str | None:
    """Return what of vLLM's version is part of a fingerprint: major and minor of a release.

    Other builds count with their whole version, because pages may change between two of them.
    Return None for a version without a number: any build from source may be named "dev".
    """
    version, number = _full_version(), vllm_version()
    if not _NUMBERS.match(version):
        return None
    is_release = number != _UNKNOWN and _RELEASE.fullmatch(version)
    return ".".join(map(str, number)) if is_release else version


def _full_version() -> str:
    return str(getattr(import_module("vllm"), "__version__", "")).removeprefix("v")


def seeds_hashes_with_a_constant() -> bool:
    """Return whether sha256 block hashes are the same in every process without PYTHONHASHSEED."""
    return not _may_be(0, 28)


def offers_states_once() -> bool:
    """Return whether a block of states is offered only in the step that fills it.

    Earlier versions offer blocks of states again, like all others.
    """
    return _may_be(29)


def offers_the_last_token() -> bool:
    """Return whether vLLM offers the last token of an answer, which is never computed.

    Those versions count it as computed when the request ends (`num_tokens_after_batch =
    req.num_tokens`). Earlier versions store nothing at the end; later ones leave that token out.
    """
    return _may_be(26, 29)


def schedules_block_holders_first() -> bool:
    """Return whether waiting requests that hold device blocks are scheduled before the others."""
    return not _may_be(0, 30)


def sees_blocks_of_other_connectors() -> bool:
    """Return whether a store is waited for before another connector loads into its blocks.

    Earlier versions look only at blocks that our connector loads, or that a scheduled request has.
    """
    return not _may_be(0, 32)


# Names that some versions do not have.


def offered(module: str, name: str) -> Any | None:
    """Return a name of one of vLLM's modules, or None if the installed vLLM does not have it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def has_tiering_spec(name: str) -> bool:
    """Return whether vLLM's factory knows a spec of this name."""
    factory = offered(f"{_BASE}.factory", "OffloadingSpecFactory")
    try:
        return factory is not None and factory.get_spec_cls({"spec_name": name}) is not None
    except (ImportError, AttributeError, ValueError):
        return False


@cache
def cpu_tier_metrics() -> Mapping[str, Any]:
    """Return the metrics that vLLM's own CPU tier declares, by name.

    0.24 and 0.25 know the share in use and the skipped stores; 0.26 and later know all five of
    `observe.metrics.VLLM_METRICS`.
    """
    spec = offered(f"{_BASE}.cpu.spec", "CPUOffloadingSpec")
    if spec is None or not hasattr(spec, "build_metric_definitions"):
        return {}
    found: Mapping[str, Any] = spec.build_metric_definitions({"store_threshold": 2})
    return found


def span_maker() -> EmitSpan | None:
    """Return vLLM's function that makes a finished trace span; None without OpenTelemetry."""
    if not (offered("vllm.tracing", "is_tracing_available") or bool)():
        return None
    return cast("EmitSpan | None", offered("vllm.tracing", "instrument_manual"))


def import_tier_class(tier: Mapping[str, Any]) -> None:
    """Let vLLM import the class of a secondary tier; early versions cannot, and import nothing.

    Whatever the user's module raises is passed on.
    """
    factory = import_module(f"{_BASE}.tiering.factory").SecondaryTierFactory
    if hasattr(factory, "get_tier_class"):
        factory.get_tier_class(dict(tier))


def platform_name() -> tuple[str, str]:
    """Return the device type of vLLM's platform and the platform's own name.

    ROCm's device type is "cuda"; only its name differs.
    """
    platform = import_module("vllm.platforms").current_platform
    kind = str(platform.device_type)
    return kind, str(getattr(platform, "device_name", kind))


def fp8_type() -> str:
    """Return how the platform writes numbers of 8 bits: some AMD GPUs halve their values."""
    return str(import_module("vllm.platforms").current_platform.fp8_dtype())


if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import Locality as Locality
    from vllm.v1.kv_offload.base import LookupResult as LookupResult
    from vllm.v1.kv_offload.base import Medium as Medium
    from vllm.v1.kv_offload.base import OffloadingWorker as OffloadingWorker
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.base import TierFilter as TierFilter
    from vllm.v1.kv_offload.base import TransferResult as TransferResult

    from ..observe.tracing import EmitSpan
else:

    class _Medium(StrEnum):
        """Stand-in for `Medium`, which vLLM has from 0.27 on; events carry these words before."""

        CPU = "CPU"
        STORAGE = "STORAGE"

    class _TierFilter:
        """Stand-in for `TierFilter`, which vLLM has from 0.27 on."""

        ALL = None

    class _Locality:
        """Stand-in for `Locality`, which vLLM has from 0.26 on."""

        LOCAL = REMOTE = None

    class _LookupResult(Enum):
        """Stand-in for `LookupResult`, which vLLM has from 0.25 on; `v0_24` translates it."""

        MISS, HIT, HIT_PENDING, RETRY = range(4)

    Locality = offered(f"{_BASE}.base", "Locality") or _Locality
    LookupResult = offered(f"{_BASE}.base", "LookupResult") or _LookupResult
    Medium = offered(f"{_BASE}.base", "Medium") or _Medium
    TierFilter = offered(f"{_BASE}.base", "TierFilter") or _TierFilter
    # From 0.25 on. Before, `copy_handler` has the place of a worker.
    OffloadingWorker = offered(f"{_BASE}.base", "OffloadingWorker") or object
    TransferResult = offered(f"{_BASE}.base", "TransferResult")


# Fields and methods of vLLM's objects that some versions name otherwise or do not have.


def known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the installed version of a dataclass has fields for."""
    names = _field_names(kind)
    return {name: value for name, value in values.items() if name in names}


@cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def chunk_slot(status: Any) -> int:
    """Return the slot of a chunk's status: `chunk_id`, or `block_id` up to 0.29."""
    slot: int = status.chunk_id if hasattr(status, "chunk_id") else status.block_id
    return slot


def chunk_rows(job: Any) -> list[int]:
    """Return a job's rows of the primary tier: `chunk_ids`, or `block_ids` up to 0.29."""
    rows: Iterable[Any] = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(row) for row in rows]


KEY_POSITIONS = "_offload_key_positions"
"""Field of a request's context from 0.31 on: the position of each key. vLLM adds to it."""


def _plain_state_of(context: object, kind: type[Any]) -> Any:
    """Return the attribute that `_set_plain_state` set."""
    return vars(context).get(kind.__name__)


def _set_plain_state(context: object, state: object) -> None:
    """Set an attribute of a context that has no state of its own, as up to 0.26."""
    setattr(context, type(state).__name__, state)


_ReqContext = offered(f"{_BASE}.base", "ReqContext")
set_state: Callable[[ReqContext, object], None] = getattr(
    _ReqContext, "set_state", _set_plain_state
)
"""Leaves an object with a request, at most one of each class."""
state_of: Callable[[ReqContext, type[Any]], Any] = getattr(
    _ReqContext, "get_state", _plain_state_of
)
"""Returns the object of a class that `set_state` left with a request, or None. The request's
context lives as long as the request."""
