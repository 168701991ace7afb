"""Objects of a user's own that the configuration names: policies and admission rules."""

from __future__ import annotations

import pkgutil
from typing import Any

from ...errors import ConfigError


def named_object(kind: str, name: str, path: str) -> Any:
    """What lies at `"package.module:object"`; messages say `kind` and `name`.

    Raises `ConfigError`.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:  # whatever the user's module does when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({said}); check the path, or mend the module"
        ) from None
