"""Tables of all configuration keys, made from `kvcascade.config.schema`.

A key's meaning is the docstring below its field. A key without one is an error.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ....config.schema import (
    TIER_TYPES,
    VLLM_KEYS,
    CascadeConfig,
    TierConfig,
    options_class,
)
from ....config.sizes import Blocks, Bytes, DeviceShare, DriveWrites, FreeShare, Share

NOT_A_KEY = "key"
"""Field that holds an option's place in the configuration."""
EXPLAINED = "The default is"
"""Words in the meaning of a key whose default is determined at the start."""
_VALUES: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "folder",
    tuple[Path, ...]: "folder, or list of folders",
    tuple[TierConfig, ...]: "list of tiers",
    Bytes: "size",
    Share: "share",
    Blocks: "number of blocks",
    DriveWrites: "drive writes per day",
    DeviceShare: "",
    FreeShare: "",
}


class UndescribedError(Exception):
    """Something that the site documents has no description; the message names it."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row of a table."""

    name: str
    values: str
    """Kind of values, or the words that are allowed."""
    default: str
    meaning: str


def meanings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            found[ast.unparse(node.target)] = " ".join(str(text).split())
    return found


def key_rows(cls: type[Any]) -> Iterator[KeyRow]:
    """Yield the keys of an options class. Raises `UndescribedError`."""
    hints, said = get_type_hints(cls), meanings(cls)
    for each in fields(cls):
        if each.name == NOT_A_KEY:
            continue
        if not said.get(each.name):
            raise UndescribedError(f"{cls.__name__}.{each.name} has no docstring")
        meaning = said[each.name]
        values = "file" if each.name.endswith("_file") else _values(hints[each.name])
        yield KeyRow(each.name, values, _default(each, meaning), meaning)


def config_reference() -> str:
    """Return all keys in Markdown: those of the top level, of each tier type, and vLLM's."""
    parts = ["### Top level", _table(key_rows(CascadeConfig))]
    for cls in map(options_class, TIER_TYPES):
        parts += [f'### Tier `{{"type": "{cls.type}"}}`', _table(key_rows(cls))]
    rows = [f"| `{name}` | {meaning} |" for name, (_, meaning) in VLLM_KEYS.items()]
    parts += ["### Keys of vLLM", "\n".join(["| key | meaning |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def _table(rows: Iterator[KeyRow]) -> str:
    head = ["| key | value | default | meaning |", "|---|---|---|---|"]
    cells = [f"| `{r.name}` | {r.values} | {r.default} | {r.meaning} |" for r in rows]
    return "\n".join([*head, *cells])


def _values(hint: Any) -> str:
    """Return the kind of a field's values; null is left out."""
    if hint in _VALUES:
        return _VALUES[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return ", ".join(f'`"{word}"`' for word in hint)
    if get_origin(hint) in (Union, UnionType):
        shown = (_values(part) for part in get_args(hint) if part is not NoneType)
        return ", ".join(filter(None, shown))
    raise UndescribedError(f"values of type {hint} have no name in _VALUES")


def _default(option: Field[Any], meaning: str) -> str:
    value = option.default
    if value is MISSING:
        return "**required**"
    if value is None or isinstance(value, DeviceShare | FreeShare):
        return "automatic" if EXPLAINED in meaning else "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, int | float) else f'`"{value}"`'
