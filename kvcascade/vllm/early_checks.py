"""Refuse a configuration before the model is loaded, as far as the engine's options show it.

What is refused here would also end the start later, as a rule by the same function. So a fact that
this vLLM does not show yet is no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from ..assembly.named import (
    SPEC_NAME,
    TIER_MODULE,
    TIER_NAME,
    TIERING_SPEC_NAME,
    checked,
    checked_tier,
    sweep_arenas,
    tier_options,
)
from ..config.machine import Machine
from ..config.options import noting
from ..errors import ConfigError, KVCascadeError
from ..logs import get_logger
from . import generation
from .engine_facts import EXTERNAL_LAUNCHER, MULTI_CONNECTOR, has_several_connectors
from .refusals import (
    refuse_answers,
    refuse_encoders,
    refuse_other_connectors,
    refuse_platform,
    refuse_producers,
    refuse_records,
    refuse_routed_experts,
    refuse_separate_ranks,
    refuse_useless,
)

_log = get_logger(__name__)

_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


@dataclass(frozen=True, slots=True)
class Connector:
    """The fields of a `KVTransferConfig` that count here, under vLLM's names."""

    kv_connector: Any
    kv_role: Any
    kv_connector_extra_config: Mapping[str, Any]

    @property
    def is_cascade(self) -> bool:
        """Return True if the connector runs our spec."""
        return self.kv_connector_extra_config.get("spec_name") == SPEC_NAME

    @property
    def tiers(self) -> dict[str, Mapping[str, Any]]:
        """Return our tiers inside vLLM's own spec, by their place."""
        extra = self.kv_connector_extra_config
        tiers = extra.get("secondary_tiers") if extra.get("spec_name") == TIERING_SPEC_NAME else ()
        return {
            f"secondary_tiers[{index}]": tier
            for index, tier in enumerate(tiers if isinstance(tiers, list) else ())
            if isinstance(tier, Mapping)
            and (tier.get("type"), tier.get("module_path")) == (TIER_NAME, TIER_MODULE)
        }


def check_early(engine: Any) -> None:
    """Raise `ConfigError` if kvcascade will refuse this engine, an `EngineArgs` or a `VllmConfig`.

    To be called before an engine of this start has opened its tiers: the memory that they took
    would count as missing.
    """
    connectors = list(_connectors(own(engine, "kv_transfer_config")))
    ours = [each for each in connectors if each.is_cascade or each.tiers]
    if not ours:
        return
    _check_options(ours, own(engine, "parallel_config") or engine)
    for each in ours:
        refuse_answers(each.kv_connector_extra_config)
    with _as_far_as_known():
        refuse_other_connectors(any(map(has_several_connectors, connectors)))
    with _as_far_as_known():
        _refuse_roles([connectors[0], *ours])
    for refuse in (refuse_useless, refuse_routed_experts, refuse_encoders):
        with _as_far_as_known():
            refuse(_as_config(engine))


def own(thing: object, name: str) -> Any:
    """Return an item of a mapping, or an attribute from the object's own `__dict__`, else None.

    `getattr` is not safe on a half-made object: a `__getattr__` that delegates to a part which does
    not exist yet calls itself without end.
    """
    return (thing if isinstance(thing, Mapping) else attributes(thing)).get(name)


def attributes(thing: object) -> Mapping[str, Any]:
    """Return the object's own `__dict__`; empty if it has none."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found


def _connectors(transfer: Any) -> Iterator[Connector]:
    """Yield a connector, and those that it makes."""
    extra = own(transfer, "kv_connector_extra_config")
    found = Connector(
        own(transfer, "kv_connector"),
        own(transfer, "kv_role"),
        extra if isinstance(extra, Mapping) else {},
    )
    yield found
    if found.kv_connector == MULTI_CONNECTOR:
        below = found.kv_connector_extra_config.get("connectors")
        for each in below if isinstance(below, list | tuple) else ():
            yield from _connectors(each)


def _as_config(engine: Any) -> Any:
    """Return a `VllmConfig` as it is. An `EngineArgs` holds the options of all its parts itself."""
    if own(engine, "model_config") is not None:
        return engine
    return SimpleNamespace(model_config=engine, aux_output_config=own(engine, "aux_output_config"))


def _check_options(ours: Sequence[Connector], parallel: Any) -> None:
    """Raise one `ConfigError` with all problems of our options, a line each."""
    problems: list[str] = []
    machine: Machine | None = Machine()
    with _as_far_as_known():
        machine = machine if _engines(parallel) else None
    for each in ours:
        if each.is_cascade:
            with _as_far_as_known(), noting(problems):
                _check_cascade(each.kv_connector_extra_config, parallel, machine, problems)
        for key, tier in each.tiers.items():
            with _as_far_as_known(), noting(problems):
                checked_tier(tier_options(tier), machine, key, problems)
    if problems:
        raise ConfigError("\n".join(problems))


def _check_cascade(
    extra: Mapping[str, Any], parallel: Any, machine: Machine | None, problems: list[str]
) -> None:
    """Check the options of our spec; `machine`: None if no engine of this start will run here."""
    workers = _workers(parallel)
    if machine is not None:
        refuse_platform()
        with _as_far_as_known():
            sweep_arenas(extra)
    settings = checked(extra, machine, problems, workers, _engines(parallel))
    with _as_far_as_known():
        if not problems and generation.adapter() == generation.SEED:
            refuse_records(settings)
    if machine is not None:
        with _as_far_as_known():
            refuse_separate_ranks(parallel, workers)


def _refuse_roles(connectors: Sequence[Connector]) -> None:
    """Refuse producers. vLLM acts on the engine's role; our connector may have one of its own."""
    if generation.adapter() == generation.SEED:  # a request keeps its blocks until they are stored
        return
    for each in connectors:
        refuse_producers(SimpleNamespace(kv_transfer_config=each))


def _workers(parallel: Any) -> int:
    """Return the number of workers of one engine."""
    known = own(parallel, "world_size")
    if isinstance(known, int):
        return known
    ranks: int = prod(own(parallel, name) or 1 for name in _RANKS)
    is_launched = own(parallel, "distributed_executor_backend") == EXTERNAL_LAUNCHER
    engines: int = own(parallel, "data_parallel_size") or 1
    return ranks * engines if is_launched else ranks


def _engines(parallel: Any) -> int:
    """Return how many engines of this start will need memory of this machine; 1 if not known.

    0 in a process that only answers requests: each engine checks its own machine. Of several
    engines, the first one counts all. They wait for each other before they load the model, so none
    has taken its memory by then.
    """
    if own(parallel, "data_parallel_backend") == "ray":
        # Ray starts the engines where it likes. Only an engine has the number of its workers.
        return 0 if own(parallel, "world_size") is None else 1
    if own(parallel, "data_parallel_rank_local"):
        return 1
    local: int | None = own(parallel, "data_parallel_size_local")
    if local is None and own(parallel, "data_parallel_rank") is None:
        spans_hosts = (own(parallel, "nnodes") or 1) > 1
        is_balanced = own(parallel, "data_parallel_external_lb") or own(
            parallel, "data_parallel_multi_port_external_lb"
        )
        local = None if spans_hosts or is_balanced else own(parallel, "data_parallel_size")
    return 1 if local is None else local


@contextmanager
def _as_far_as_known() -> Iterator[None]:
    """Let our own errors pass only. Any other says that a fact is not known yet."""
    try:
        yield
    except KVCascadeError:
        raise
    except Exception as error:  # whatever a half-made object, or one of another version, raises
        _log.debug("kvcascade: a check before the model is loaded was left out: %r", error)
