"""Open the scheduler's side of the cascade, the same way for all vLLM generations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..assembly.build import Cascade, Geometry, open_cascade
from ..config.schema import STOP_S, CascadeConfig
from ..identity import code_identity, is_shareable, private_identity, weights_identity
from ..logs import get_logger, json_handler, wants_json
from ..observe.tracing import TransferSpans
from ..tiers.nvme.namespace import NamespaceKey
from . import engine_facts, packing
from .generation import span_maker, version_of_blocks
from .refusals import refuse_other_connectors, refuse_routed_experts, refuse_useless

logger = get_logger(__name__)

_CODE = "remote_code"
"""Fact about code that a model takes from another repository."""
_BUILD = "vllm"
"""Fact about the build of vLLM."""


def log_beside_vllm() -> None:
    """Add the handlers of vLLM's logger to ours, since vLLM sets up handlers for its own only.

    If lines shall be JSON, they go to the same stream through a handler of our own.
    """
    ours, theirs = logging.getLogger("kvcascade"), logging.getLogger("vllm")
    if not ours.handlers:
        handlers = theirs.handlers
        if wants_json():
            streams = [h.stream for h in handlers if isinstance(h, logging.StreamHandler)]
            handlers = [json_handler(streams[0] if streams else None)]
        for handler in handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())


def namespace_key(
    settings: CascadeConfig,
    engine_config: Any | None,
    model: str,
    shape: Mapping[str, str],
    about: Mapping[str, Any] | None = None,
) -> NamespaceKey:
    """Return the namespace of an engine, and warn if its blocks cannot outlive it.

    `about` is written beside the fingerprint, for people; for the rest see `namespace_facts`.
    Raises `ConfigError` for an engine that would crash or give wrong tokens.
    """
    refuse_useless(engine_config)
    refuse_routed_experts(engine_config)
    refuse_other_connectors(engine_facts.has_other_connectors())
    facts = namespace_facts(settings, engine_config, model, shape)
    warn_of_privacy(settings, engine_config, facts, model)
    return NamespaceKey(settings.label or model, facts, about or {})


def namespace_facts(
    settings: CascadeConfig, engine_config: Any | None, model: str, shape: Mapping[str, str]
) -> dict[str, str]:
    """Return the facts of the fingerprint that are known before the workers' tensor layouts.

    `engine_config`: vLLM's `VllmConfig`, None if it was not found. Without it, blocks are shared
    only if the user sets `weights_id`, which then vouches for everything unknown.
    `model`: the model's name or path for that case.
    `shape`: facts about blocks and parallelism from the generation's own configuration.
    """
    version = version_of_blocks() or settings.weights_id or private_identity()
    facts = {_BUILD: version, "label": settings.label, **shape}
    facts |= packing.machine_facts()
    if engine_config is None:
        return facts | {"weights": settings.weights_id or private_identity()}
    facts.update(engine_facts.model_facts(engine_config))
    facts |= {"weights": settings.weights_id} if settings.weights_id else _weights(engine_config)
    return facts | {name: private_identity() for name in _private(settings, engine_config)}


def _weights(engine_config: Any) -> dict[str, str]:
    """Return the facts for which `weights_id` stands: all weights, and code from elsewhere."""
    loaded = engine_facts.other_weights_facts(engine_config)
    loaded["weights"] = engine_facts.weights_facts(engine_config)
    facts = {name: weights_identity(*about) for name, about in loaded.items()}
    facts |= engine_facts.format_facts(engine_config)
    remote_code = engine_facts.remote_code(engine_config)
    code = None if remote_code is None else code_identity(*remote_code)
    return facts if code is None else {**facts, _CODE: code}


def _private(settings: CascadeConfig, engine_config: Any) -> dict[str, str]:
    """Return the reasons not to share; a user who sets `weights_id` vouches for adapters, too."""
    found = engine_facts.reasons_not_to_share(engine_config)
    if settings.weights_id:
        found.pop("adapters", None)
    return found


def warn_of_privacy(
    settings: CascadeConfig, engine_config: Any | None, facts: Mapping[str, str], model: str
) -> None:
    """Log one line for each reason why blocks cannot be shared or found again after a restart."""
    private = {} if engine_config is None else _private(settings, engine_config)
    reasons = list(private.values())
    unknown = {name for name, fact in facts.items() if not is_shareable(fact)} - private.keys()
    if _BUILD in unknown:
        reasons.append("the build of the installed vLLM cannot be identified; set weights_id")
    if _CODE in unknown:
        reasons.append(
            f"the code that {model!r} takes from another repository cannot be identified; "
            "set weights_id"
        )
    if unknown - {_CODE, _BUILD}:
        reasons.append(f"the weights of {model!r} cannot be identified; set weights_id")
    if engine_facts.hashes_change_at_restart(engine_config):
        reasons.append(
            "this vLLM draws a new block hash seed at every start; set the environment variable "
            "PYTHONHASHSEED=0"
        )
    for reason in reasons:
        logger.warning(
            "kvcascade: nothing is shared with other processes or kept for the next start: %s",
            reason,
        )


def with_time_to_flush(
    settings: CascadeConfig, engine_config: Any | None
) -> tuple[CascadeConfig, str | None]:
    """Fit `shutdown_flush_s` to vLLM's shutdown timeout; also return a line to log if that is 0."""
    given_s, needed_s = engine_facts.seconds_to_stop(engine_config), settings.shutdown_timeout_s
    if needed_s is None or given_s is None:
        return settings, None
    if given_s > 0:
        if settings.shutdown_flush_s is None:
            settings = replace(settings, shutdown_flush_s=max(1.0, given_s - STOP_S))
        return settings, None
    return settings, (
        "kvcascade: vLLM kills this engine as soon as it is asked to stop (--shutdown-timeout 0), "
        "so dirty blocks are not written at shutdown; to have them written, start it with "
        f"--shutdown-timeout {needed_s}"
    )


def open_scheduler_side(
    settings: CascadeConfig,
    geometry: Geometry,
    engine_id: str,
    key: NamespaceKey,
    engine_config: Any | None,
    *,
    with_events: bool,
    waits_for_stores: bool = True,
) -> Cascade:
    """Open the cascade in the scheduler process. Raises one of our errors."""
    settings, said = with_time_to_flush(settings, engine_config)
    if said is not None:
        logger.info(said)
    return open_cascade(
        settings,
        geometry,
        engine_id,
        key,
        steps_until_flushed=engine_facts.pipeline_depth(engine_config),
        with_events=with_events,
        waits_for_stores=waits_for_stores,
        on_transfer=transfer_spans(engine_config),
    )


def transfer_spans(engine_config: Any | None) -> TransferSpans | None:
    """Return what makes spans of transfers if vLLM was started with `--otlp-traces-endpoint`."""
    emit = span_maker() if engine_facts.is_traced(engine_config) else None
    return None if emit is None else TransferSpans(emit)
