"""Options from environment variables, for container images.

A variable is named after its option: `KVCASCADE_WRITE_MODE` for `write_mode`,
`KVCASCADE_CPU_POLICY` for an option of the CPU tier, `KVCASCADE_NVME_CAPACITY` for one of the first
NVMe tier, and `KVCASCADE_REMOTE_URL` for one of the remote tier. A value is JSON, or text if it is
no valid JSON. The value of an option that is text is text in any case. Options in the configuration
have precedence.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from ..errors import ConfigError
from .schema import (
    PATH_KEY,
    TIER_TYPES,
    VLLM_KEYS,
    CascadeConfig,
    options_class,
    with_tiers,
)

PREFIX = "KVCASCADE_"
MIN_LIKENESS = 0.8
"""Likeness from which on an unknown variable is taken for a misspelt one. Others may belong to
somebody else: Kubernetes sets such variables for a service that is named kvcascade."""


def _names(cls: type[Any]) -> list[str]:
    return [each.name for each in fields(cls) if each.name != "key"]


TOP = {f"{PREFIX}{name.upper()}": name for name in (*_names(CascadeConfig), PATH_KEY)}
"""Options at the top level, by variable."""
OF_VLLM = {f"{PREFIX}{name.upper()}": name for name in VLLM_KEYS}
"""Keys that vLLM itself reads, by a variable that has no effect."""


@cache
def of_tier() -> Mapping[str, tuple[str, str]]:
    """Return tier type and option, by variable."""
    return {
        f"{PREFIX}{kind.upper()}_{name.upper()}": (kind, name)
        for kind in TIER_TYPES
        for name in _names(options_class(kind))
    }


@cache
def texts() -> frozenset[str]:
    """Return the variables of options that are text: their numbers, `true` and `null` are, too."""
    of_top = text_keys(CascadeConfig)
    of_kind = {kind: text_keys(options_class(kind)) for kind in TIER_TYPES}
    return frozenset(variable for variable, name in TOP.items() if name in of_top).union(
        variable for variable, (kind, name) in of_tier().items() if name in of_kind[kind]
    )


def text_keys(cls: type[Any]) -> frozenset[str]:
    """Return the keys of a class of options whose values are text."""
    kinds = get_type_hints(cls)
    return frozenset(name for name in _names(cls) if kinds.get(name) in (str, str | None))


def with_environment(
    extra_config: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the configuration, completed by the variables, and the variables that are used.

    They are named by the key of their option. Only a list of tiers that is given, or that `path`
    stands for, is completed with options of tiers.
    """
    found: dict[str, object] = dict(extra_config)
    used: dict[str, str] = {}
    has_tiers = not {"tiers", PATH_KEY}.isdisjoint(extra_config)
    for variable, name in TOP.items():
        is_wanted = name not in extra_config and not (has_tiers and name in ("tiers", PATH_KEY))
        if is_wanted and variable in environment:
            found[name] = _value(variable, environment)
            used[name] = variable
    if "tiers" not in found:
        found = with_tiers(found)
        if PATH_KEY in used:
            used[f"tiers[1].{PATH_KEY}"] = used[PATH_KEY]
    tiers = found.get("tiers")
    if isinstance(tiers, list | tuple):
        found["tiers"] = list(_completed(tiers, environment, used))
    return found, used


def of_lone_tier(
    kind: str, top: Collection[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables for a tier inside vLLM's tiering, and a sentence for each other one.

    `kind`: type of the tier. `top`: options of the top level that it has.
    """
    known = TOP | {variable: name for variable, (of, name) in of_tier().items() if of == kind}
    here: dict[str, str] = {}
    said: list[str] = []
    for variable in environment:
        if variable in known and (variable not in TOP or TOP[variable] in top):
            here[variable] = environment[variable]
        elif variable in TOP or variable in of_tier():
            said.append(
                f"the environment variable {variable} has no effect inside vLLM's own tiering; "
                "unset it"
            )
    return here, said


@contextmanager
def naming_variables(
    variables: Mapping[str, str], noted: list[str] | None = None
) -> Iterator[None]:
    """Name the variable in each problem with an option that comes from one, raised or collected.

    `variables`: those that `with_environment` used.
    """
    start = 0 if noted is None else len(noted)
    try:
        yield
    except ConfigError as error:
        said = _naming(variables, str(error))
        if said == str(error):
            raise
        raise ConfigError(said) from None
    finally:
        if noted is not None:
            noted[start:] = [_naming(variables, problem) for problem in noted[start:]]


def misspelt(environment: Collection[str]) -> list[str]:
    """Return a sentence for each variable that is no option, and named like one, or nearly so.

    The keys that vLLM itself reads have no variables.
    """
    known = [variable.removeprefix(PREFIX) for variable in (*TOP, *of_tier())]
    said: list[str] = []
    for variable in environment:
        if variable in OF_VLLM:
            said.append(
                f"the environment variable {variable} has no effect, because vLLM itself reads "
                f"{OF_VLLM[variable]}; give it in kv_connector_extra_config"
            )
        elif variable.startswith(PREFIX) and variable not in TOP and variable not in of_tier():
            name = variable.removeprefix(PREFIX)
            close = difflib.get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS)
            if close:
                said.append(
                    f"the environment variable {variable} is not known; if {PREFIX}{close[0]} "
                    "is meant, rename it"
                )
    return said


def unused(types: Collection[str], environment: Collection[str]) -> list[str]:
    """Return a sentence for each variable of a tier type that the list of tiers lacks.

    `types`: those in the list.
    """
    return [
        f"the environment variable {variable} has no effect, because there is no tier of type "
        f"{kind!r}; add one to tiers, or unset the variable"
        for variable, (kind, _) in of_tier().items()
        if variable in environment and kind not in types
    ]


def _naming(variables: Mapping[str, str], problem: str) -> str:
    """Return a problem with the variable of the option that it begins with."""
    place = problem.partition(" ")[0].rstrip(":")
    for key, variable in sorted(variables.items(), key=lambda pair: -len(pair[0])):
        if place == key or place.startswith((f"{key}.", f"{key}[")):
            return f"{problem.removesuffix('.')} (from the environment variable {variable})."
    return problem


def _completed(
    tiers: Sequence[object], environment: Mapping[str, str], used: dict[str, str]
) -> Iterator[object]:
    """Yield the tiers, the first one of each type with the options that it lacks.

    Their variables are added to `used`.
    """
    seen: set[str] = set()
    for index, tier in enumerate(tiers):
        kind = str(tier.get("type")) if isinstance(tier, Mapping) else ""
        if not isinstance(tier, Mapping) or kind in seen:
            yield tier
            continue
        seen.add(kind)
        completed = dict(tier)
        for variable, (of, name) in of_tier().items():
            if of == kind and name not in tier and variable in environment:
                completed[name] = _value(variable, environment)
                used[f"tiers[{index}].{name}"] = variable
        yield completed


def _value(variable: str, environment: Mapping[str, str]) -> object:
    text = environment[variable]
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return text if variable in texts() and not isinstance(value, str) else value
