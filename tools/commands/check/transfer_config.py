"""The file of `kvcascade check`: vLLM's whole `--kv-transfer-config`, or only our options.

All errors are collected: keys that vLLM refuses, and names that select something unintended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from ....assembly.named import (
    CONNECTOR,
    SPEC_NAME,
    TIER_MODULE,
    TIER_NAME,
    TIERING_SPEC_NAME,
    checked_tier,
    tier_options,
)
from ....config.machine import Machine
from ....config.options import At, did_you_mean, flag, noting, optional, read_options, text, whole
from ....config.schema import PATH_KEY, VLLM_KEYS, CascadeConfig, NvmeTierOptions, check_vllm_keys
from ....config.sizes import human
from ....errors import ConfigError
from ....tiers.policies import named_object
from ....vllm import precheck
from ..command_line import CommandError, ExitCode

MAX_CONFIG_BYTES = 1 << 20
STANDARD_INPUT = Path("-")
WRAPPERS = ("kv_transfer_config", "kv-transfer-config")
"""Keys that may contain the object, as in a file with all options of `vllm serve`."""
GIVE_JSON = "give JSON; `kvcascade config --json` prints it"
EXTRA = "kv_connector_extra_config"
SPEC_KEY = "spec_name"
MODULE_KEY = "spec_module_path"
OUR_MODULE = "kvcascade.spec"
ROLES = ("kv_both", "kv_consumer")
FAILURE_POLICIES = ("recompute", "fail")
SPECS = (SPEC_NAME, TIERING_SPEC_NAME)
POLICY_MODULE = "kvcascade.vllm_policies"
VLLM_POLICIES = ("lru", "arc")
TIERING_KEYS = (
    *VLLM_KEYS,
    "cpu_bytes_to_use",
    "eviction_policy",
    "cache_policy_module_path",
    "secondary_tiers",
    "store_threshold",
    "max_tracker_size",
    "backpressure",
    "enable_telemetry",
)
"""Keys that vLLM reads if it keeps its own manager."""
OPTIONS = frozenset({*TIERING_KEYS, *CascadeConfig.__slots__, PATH_KEY} - {"key"})
"""All keys that are valid in `kv_connector_extra_config`."""


def _one_of(words: Sequence[str], at: At, value: Any) -> str:
    if value not in words:
        known = " or ".join(f'"{word}"' for word in words)
        raise at.wrong(value, f"does not work{did_you_mean(value, words)}; use {known}")
    return str(value)


def _connector(at: At, value: Any) -> str:
    if value != CONNECTOR:
        raise at.wrong(value, f'is a different one; use "{CONNECTOR}"')
    return str(value)


def _mapping(at: At, value: Any) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise at.wrong(value, 'is not an object; give {"spec_name": ..., "tiers": [...]}')
    return value


def _anything(at: At, value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Fields of vLLM's `KVTransferConfig`, of all supported versions."""

    key: str
    kv_connector: Annotated[str, _connector, f'give "{CONNECTOR}"']
    kv_role: Annotated[str, partial(_one_of, ROLES), 'give "kv_both"']
    kv_connector_extra_config: Annotated[
        Mapping[str, object], _mapping, 'give {"spec_name": ..., "tiers": [...]}'
    ]
    engine_id: Annotated[str | None, optional(text)] = None
    kv_buffer_device: Annotated[str | None, optional(text)] = None
    kv_buffer_size: Annotated[Any, _anything] = None
    kv_rank: Annotated[Any, _anything] = None
    kv_parallel_size: Annotated[Any, _anything] = None
    kv_ip: Annotated[str | None, optional(text)] = None
    kv_port: Annotated[int, whole(0, 65535)] = 0
    kv_connector_module_path: Annotated[str | None, optional(text)] = None
    enable_permute_local_kv: Annotated[bool, flag] = False
    kv_load_failure_policy: Annotated[str, partial(_one_of, FAILURE_POLICIES)] = "fail"


FIELDS = frozenset(TransferConfig.__slots__) - {"key"}


@dataclass(slots=True)
class Given:
    """A configuration, as far as it can be read."""

    source: str
    """Name of the file, or "standard input"."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Contents of `kv_connector_extra_config`; empty if it is missing."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_tiering(self) -> bool:
        """Return True if the configuration seems to use our NVMe tier inside vLLM's own tiering."""
        name = self.extra.get(SPEC_KEY)
        if name in SPECS:
            return name == TIERING_SPEC_NAME
        return name is not None and "tiers" not in self.extra and "secondary_tiers" in self.extra


def read_config(path: Path) -> Given:
    """Read a configuration from a file, or from standard input if the path is "-".

    The file holds `kv_connector_extra_config`, vLLM's whole `--kv-transfer-config`, or an object
    with the latter as `kv_transfer_config`.
    """
    given = Given("standard input" if path == STANDARD_INPUT else str(path))
    with noting(given.problems):
        document = _read_json(path, given)
        for name in WRAPPERS:
            if name in document:
                document = _mapping(At(name), document[name])
        _take(document, given)
    return given


@dataclass(frozen=True, slots=True)
class Tiering:
    """vLLM's own tiering with our components in it."""

    cpu_bytes: int
    policy: str
    """Eviction policy of vLLM's CPU tier."""
    nvme: list[NvmeTierOptions]


def read_tiering(
    extra: Mapping[str, object], machine: Machine, problems: list[str], warnings: list[str]
) -> Tiering:
    """Read the options of `TieringOffloadingSpec` that are ours, or that vLLM requires.

    Errors are added to `problems`; the result is incomplete then.
    """
    warnings += [
        f"{key} is not an option of {TIERING_SPEC_NAME}{did_you_mean(key, TIERING_KEYS)}; "
        "it is ignored"
        for key in extra
        if key not in TIERING_KEYS
    ]
    check_vllm_keys(extra, problems)
    cpu_bytes, nvme = 0, list[NvmeTierOptions]()
    with noting(problems):
        cpu_bytes = _cpu_bytes(extra, machine)
    with noting(problems):
        _check_policy(extra)
    tiers = extra.get("secondary_tiers", [])
    with noting(problems):
        if not isinstance(tiers, list):
            raise At("secondary_tiers").wrong(
                tiers, f'is not a list; give [{{"type": "{TIER_NAME}"'
            )
        for index, tier in enumerate(tiers):
            with noting(problems):
                nvme += _secondary(At(f"secondary_tiers[{index}]"), tier, machine, problems)
    return Tiering(cpu_bytes, str(extra.get("eviction_policy", "lru")), nvme)


def _cpu_bytes(extra: Mapping[str, Any], machine: Machine) -> int:
    at, value = At("cpu_bytes_to_use"), extra.get("cpu_bytes_to_use")
    if value is None:
        raise at.missing("give the bytes of vLLM's CPU tier, such as 68719476736")
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise at.wrong(value, "is not a number of bytes; give one, such as 68719476736")
    available = machine.memory().available
    if count > available:
        problem = f"is more memory than there is ({human(available)} available); lower it"
        raise at.wrong(value, problem)
    return count


def _check_policy(extra: Mapping[str, Any]) -> None:
    """Check that the policy is one of vLLM's own, or a class in a module."""
    name, module = extra.get("eviction_policy", "lru"), extra.get("cache_policy_module_path")
    at = At("eviction_policy")
    if module is None:
        if name not in VLLM_POLICIES:
            remedy = "give cache_policy_module_path, too, such as"
            raise at.wrong(name, f'is not a policy of vLLM; {remedy} "{POLICY_MODULE}"')
    elif module != POLICY_MODULE or find_spec("vllm") is not None:  # our policies need vLLM
        named_object(at.key, str(name), f"{module}:{name}")


def _secondary(
    at: At, tier: object, machine: Machine, problems: list[str]
) -> tuple[NvmeTierOptions, ...]:
    """Return the options of an item if it is our tier."""
    if not isinstance(tier, Mapping):
        raise at.wrong(tier, f'is not a tier; write it as {{"type": "{TIER_NAME}", ...}}')
    kind, module = tier.get("type"), tier.get("module_path")
    if kind is None:
        raise at.below("type").missing(f'give "{TIER_NAME}", or a type of vLLM\'s')
    if kind != TIER_NAME:
        if module == TIER_MODULE:
            raise at.below("type").wrong(kind, f'is not in {TIER_MODULE}; use "{TIER_NAME}"')
        if find_spec("vllm") is not None:
            precheck.check_tier_class(at.key, tier)
        return ()
    with noting(problems):
        if module is None:
            raise at.below("module_path").missing(f'give "{TIER_MODULE}"')
        if module != TIER_MODULE:
            raise at.below("module_path").wrong(module, f'has no {kind}; use "{TIER_MODULE}"')
    return checked_tier(tier_options(tier), machine, at.key, problems).nvme


def _take(document: Mapping[str, object], given: Given) -> None:
    """Read a whole transfer configuration, or our options alone."""
    is_whole = bool(FIELDS & document.keys())
    given.extra = document
    if is_whole:
        extra = document.get(EXTRA, {})
        given.extra = extra if isinstance(extra, Mapping) else {}
    if document.keys() == {EXTRA}:
        remedy = f'an engine needs "{CONNECTOR}", and kv_role "kv_both"'
        given.warnings.append(str(At("kv_connector").missing(remedy)))
        is_whole = False
        _mapping(At(EXTRA), document[EXTRA])
    has_vllm = is_whole and _check_transfer(document, given.problems)
    if given.extra:
        _check_spec_name(given, is_whole)
        _check_module(given, is_whole)
        with noting(given.problems):
            if has_vllm:
                precheck.check_spec(given.extra)


def _check_transfer(document: Mapping[str, object], problems: list[str]) -> bool:
    """Check the object around our options, with our messages where we have them, else with vLLM's.

    Returns True if vLLM is installed.
    """
    theirs = precheck.transfer_errors(document)
    ours = dict(document)
    for key, value in document.items():
        if key in OPTIONS:
            problems.append(str(At(key).wrong(value, f"is an option of {EXTRA}; move it there")))
            del ours[key]
        elif key not in FIELDS and theirs is not None and key not in theirs:
            del ours[key]  # vLLM knows a key that this check does not
    with noting(problems):
        read_options(TransferConfig, At("", noted=problems), ours, also=())
    said = {problem.split(" ")[0].rstrip(":") for problem in problems}
    for key, message in (theirs or {}).items():
        if key not in said and (key or not problems):
            problems.append(f"{key or 'kv_transfer_config'}: the installed vLLM says: {message}.")
    return theirs is not None


def _check_spec_name(given: Given, is_whole: bool) -> None:
    """Check for a missing name: none of vLLM's defaults is ours."""
    name = given.extra.get(SPEC_KEY)
    if name is None:
        missing = str(At(SPEC_KEY).missing(f'an engine needs "{SPEC_NAME}"'))
        (given.problems if is_whole else given.warnings).append(missing)
    elif name not in SPECS:
        expected = " or ".join(map(repr, SPECS))
        given.problems.append(f"unknown spec_name {name!r}; expected {expected}.")


def _check_module(given: Given, is_whole: bool) -> None:
    """Check the module path, which vLLM ignores if it knows the spec by its name."""
    name, path = given.extra.get(SPEC_KEY), given.extra.get(MODULE_KEY)
    if name not in SPECS or not isinstance(path, str | None):
        return
    is_needed = name == SPEC_NAME and not precheck.loads_plugin()
    if path is None:
        if is_needed and is_whole:
            remedy = f'vLLM loads no plugin of kvcascade here; give "{OUR_MODULE}"'
            given.problems.append(str(At(MODULE_KEY).missing(remedy)))
        return
    try:
        if path == OUR_MODULE or find_spec(path) is None:  # our module imports vLLM
            found = path == OUR_MODULE
        else:
            named_object(MODULE_KEY, path, f"{path}:{name}" if is_needed else path)
            found = True
    except (ConfigError, ImportError, ValueError):
        found = False
    if not found and is_needed:
        remedy = f'cannot be imported, or has no {name}; use "{OUR_MODULE}"'
        given.problems.append(str(At(MODULE_KEY).wrong(path, remedy)))
    elif not found:
        remedy = f"cannot be imported; it is ignored here, since vLLM knows {name} by its name"
        given.warnings.append(str(At(MODULE_KEY).wrong(path, remedy)))


def _read_json(path: Path, given: Given) -> Mapping[str, object]:
    source = given.source
    try:
        if path == STANDARD_INPUT:
            if not sys.stdin:  # Python has none for a closed descriptor
                problem = f"{source} is closed; give the name of a file"
                raise CommandError(problem, ExitCode.USAGE)
            data = sys.stdin.buffer.read(MAX_CONFIG_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error.strerror})") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{source} is too large for a configuration")
    try:
        document = json.loads(data.decode(), object_pairs_hook=partial(_once_each, given.problems))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON ({error}); {GIVE_JSON}") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source} holds no JSON object; {GIVE_JSON}")
    return document


def _once_each(problems: list[str], pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    """Return a JSON object, and report duplicate keys, of which JSON would keep the last."""
    found: dict[str, object] = {}
    for key, value in pairs:
        with noting(problems):
            if key in found:
                raise At(key).wrong(value, "is given beside another value; give every key once")
        found[key] = value
    return found
