"""Import of user-defined objects that the configuration names: policies and admission rules."""

from __future__ import annotations

import pkgutil
from typing import Any

from ...errors import ConfigError


def named_object(kind: str, name: str, path: str) -> Any:
    """Import and return the object at `"package.module:object"`.

    Raises `ConfigError` if that fails. `kind` and `name` appear in its message.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:  # a user's module may raise anything when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({said}); check the path, or mend the module"
        ) from None
