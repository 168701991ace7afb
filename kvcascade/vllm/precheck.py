"""Check a configuration with the installed vLLM, without an engine; for `kvcascade check`.

Importing vLLM takes seconds and logs. Each function imports it itself, when it is called.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from ..assembly.named import SPEC_NAME, TIERING_SPEC_NAME
from ..errors import ConfigError

PLUGINS = "vllm.general_plugins"
PLUGIN = "kvcascade.vllm.plugin:register"
PLUGINS_ALLOWED = "VLLM_PLUGINS"
"""Environment variable with the names of the plugins that vLLM loads; without it, all."""


def loads_plugin() -> bool:
    """Return True if an engine that is started here finds our spec by its name."""
    allowed = os.environ.get(PLUGINS_ALLOWED)
    names = [found.name for found in entry_points(group=PLUGINS) if found.value == PLUGIN]
    return any(allowed is None or name in allowed.split(",") for name in names)


def transfer_errors(transfer: Mapping[str, object]) -> dict[str, str] | None:
    """Validate a `--kv-transfer-config` with vLLM's own class; return key to message.

    The key "" is for the whole. None: vLLM cannot be imported.
    """
    with _quiet():
        try:
            from pydantic import TypeAdapter, ValidationError

            from .generation import offered

            transfer_config = offered("vllm.config", "KVTransferConfig")
        except (ImportError, OSError):  # OSError: a library of the machine that it needs
            return None
        if transfer_config is None:
            return None
        try:
            TypeAdapter(transfer_config).validate_python(dict(transfer))
        except ValidationError as error:
            return {str([*each["loc"], ""][0]): each["msg"] for each in error.errors()}
    return {}


def check_spec(extra_config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the installed vLLM cannot run the named spec, or not correctly.

    Some versions would give wrong tokens with some options."""
    with _quiet():
        from .generation import adapter, has_tiering_spec
        from .refusals import refuse_answers

        if extra_config.get("spec_name") != TIERING_SPEC_NAME:
            adapter()
        elif not has_tiering_spec(TIERING_SPEC_NAME):
            raise ConfigError(
                f"spec_name: the installed vLLM has no {TIERING_SPEC_NAME}; use {SPEC_NAME}, or "
                "install vLLM 0.32"
            )
        refuse_answers(extra_config)


def check_tier_class(key: str, tier: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if vLLM finds no class for an item of `secondary_tiers`."""
    with _quiet():
        try:
            from .generation import import_tier_class

            import_tier_class(tier)
        except Exception as error:  # whatever the user's module does when it is imported
            said = f"{type(error).__name__}: {error}"
            remedy = "check type and module_path"
            raise ConfigError(f"{key}: vLLM finds no class for it ({said}); {remedy}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the lines that vLLM logs when it is imported; they concern engines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
