"""Options as annotated fields: one line states an option's type, its reader and its default.

A configuration class is a frozen dataclass whose options are `Annotated[type, reader]`. An option
without a default is required; its annotation then also holds the remedy for the error message.
`read_options` makes such an object of a dictionary. Every problem is a `ConfigError` of one
sentence that names key, value and remedy. The first one is raised, or all are collected in a list
(`noting`).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..errors import ConfigError

Config = TypeVar("Config")

MAX_SECONDS = 10**9
"""Longest time, 31 years."""
MAX_TOKENS_PER_S = 10**12
_SHOWN_CHARACTERS = 80
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class At:
    """Place of a value in the configuration."""

    key: str
    """Full key, such as "tiers[1].capacity"; empty at the top."""
    policies: Collection[str] | None = None
    """Known names of eviction policies; `None`: any word passes for one."""
    noted: list[str] | None = field(default=None, compare=False)
    """List that problems are collected in; None: the first one is raised."""

    def below(self, name: str) -> At:
        """Return the place of an option below this place."""
        return replace(self, key=f"{self.key}.{name}" if self.key else name)

    def item(self, index: int) -> At:
        """Return the place of an item of the list at this place."""
        return replace(self, key=f"{self.key}[{index}]")

    def wrong(self, value: object, problem: str) -> ConfigError:
        """Return the error for a value that is not allowed; `problem` ends with the remedy."""
        return ConfigError(f"{self.key}: {_shown(value)} {problem}.")

    def unknown(self, value: object, remedy: str) -> ConfigError:
        """Return the error for a key that does not exist."""
        return ConfigError(f"{self.key} (set to {_shown(value)}) is an unknown key{remedy}.")

    def missing(self, remedy: str) -> ConfigError:
        """Return the error for a required option that is missing."""
        return ConfigError(f"{self.key} is missing; {remedy}.")


class IncompleteError(ConfigError):
    """A configuration object cannot be made; its problems have been collected already."""


@contextmanager
def noting(noted: list[str] | None) -> Iterator[None]:
    """Collect a `ConfigError` in `noted` and go on; with None, let it propagate."""
    try:
        yield
    except ConfigError as error:
        if noted is None:
            raise
        if not isinstance(error, IncompleteError) and str(error) not in noted:
            noted.append(str(error))


Reader = Callable[[At, Any], object]
"""Checks the value at a place and turns it into what the configuration holds."""


def sized(parse: Callable[[object], object]) -> Reader:
    """Return a reader of an amount; `parse` is one of `kvcascade.config.sizes`."""

    def read(at: At, value: Any) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise at.wrong(value, str(error)) from None

    return read


def choice(choices: type[StrEnum], *, or_name: bool = False) -> Reader:
    """Return a reader of one of a few words, or of a "package.module:name" if `or_name`."""

    def read(at: At, value: Any) -> str:
        if or_name and isinstance(value, str) and _DOTTED_NAME.fullmatch(value):
            return value
        words = list(choices)
        if not isinstance(value, str) or value not in words:
            hint, known = did_you_mean(value, words), _either(words)
            also = ', or "package.module:name"' if or_name else ""
            raise at.wrong(value, f"is not known{hint}; use {known}{also}")
        return choices(value)

    return read


def whole(lowest: int, highest: int) -> Reader:
    """Return a reader of a whole number within bounds."""

    def read(at: At, value: Any) -> int:
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number or not lowest <= value <= highest:
            raise at.wrong(value, f"is not allowed; give a whole number from {lowest} to {highest}")
        return int(value)

    return read


def seconds(at: At, value: Any) -> float:
    """Read a time in seconds; zero is allowed."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_SECONDS:
        problem = f"is not a time; give a number of seconds from 0 to {MAX_SECONDS}"
        raise at.wrong(value, problem)
    return float(value)


def deadline(at: At, value: Any) -> float:
    """Read a time in seconds above zero."""
    if not seconds(at, value):
        raise at.wrong(value, "is not above 0; give a number of seconds above 0")
    return float(value)


def rate(at: At, value: Any) -> float:
    """Read a number of tokens per second."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_TOKENS_PER_S:
        remedy = f"give a number of tokens per second above 0, up to {MAX_TOKENS_PER_S}"
        raise at.wrong(value, f"is not a speed; {remedy}")
    return float(value)


def flag(at: At, value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise at.wrong(value, "is not a boolean; use true or false")
    return value


def text(at: At, value: Any) -> str:
    """Read any text."""
    if not _is_text(value):
        raise at.wrong(value, "is not text; give a string")
    return str(value)


def word_or_none(at: At, value: Any) -> str | None:
    """Read text that is not blank, or null."""
    if value is not None and not text(at, value).strip():
        raise at.wrong(value, "is blank; give some text, or leave it out")
    return value  # type: ignore[no-any-return]


def optional(read: Reader) -> Reader:
    """Return a reader that also accepts null."""
    return lambda at, value: None if value is None else read(at, value)


def policy_name(at: At, value: Any) -> str:
    """Read the name of an eviction policy, or of a class that is one."""
    if isinstance(value, str) and _DOTTED_NAME.fullmatch(value):
        return value
    if at.policies is None:
        return text(at, value)
    if isinstance(value, str) and value in at.policies:
        return value
    hint = did_you_mean(value, at.policies)
    known = _either([*at.policies])
    raise at.wrong(
        value, f'is not a known policy{hint}; use {known}, or a class as "package.module:Class"'
    )


def folder(at: At, value: Any) -> Path:
    """Read an absolute path; "~" is the home folder."""
    if not _is_text(value) or not value or "\0" in value:
        remedy = 'give its path as text in UTF-8, such as "/mnt/nvme/kv"'
        raise at.wrong(value, f"is not a folder; {remedy}")
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise at.wrong(value, "is a relative path; give an absolute path, without variables")
    return Path(os.path.normpath(path))


def folders(at: At, value: Any) -> tuple[Path, ...]:
    """Read one folder or a list of them."""
    if not isinstance(value, list | tuple):
        return (folder(at, value),)
    if not value:
        raise at.wrong(value, "is empty; give one folder, or a list with one per device")
    return tuple(folder(at.item(index), item) for index, item in enumerate(value))


def read_options(
    cls: Callable[..., Config], at: At, given: Mapping[str, object], also: Collection[str]
) -> Config:
    """Make a configuration object of a dictionary; `also`: allowed keys that are not read here.

    Raises `ConfigError` for the first problem. If problems are collected, it raises
    `IncompleteError` if a required option is missing or wrong.
    """
    readers, hints = _options(cls)
    for name, value in given.items():
        if name not in readers:
            known = ", ".join([*readers, *sorted(also)])
            close = did_you_mean(name, [*readers, *also])
            with noting(at.noted):
                raise at.below(str(name)).unknown(value, f"{close}; known are {known}")
    for name in hints:
        if name not in given:
            with noting(at.noted):
                raise at.below(name).missing(hints[name])
    values: dict[str, Any] = {}
    for name in filter(readers.__contains__, given):
        with noting(at.noted):
            values[name] = readers[name](at.below(name), given[name])
    if not hints.keys() <= values.keys():
        raise IncompleteError(f"{at.key} lacks what it needs")
    return cls(key=at.key, **values)


def _options(cls: Any) -> tuple[dict[str, Reader], dict[str, str]]:
    """Return the reader of each option of a class, and the remedy for each required one."""
    annotations = get_type_hints(cls, include_extras=True)
    readers: dict[str, Reader] = {}
    remedies: dict[str, str] = {}
    for each in fields(cls):
        extras: Sequence[Any] = getattr(annotations[each.name], "__metadata__", ())
        if extras:
            readers[each.name] = extras[0]
            if each.default is MISSING:
                remedies[each.name] = extras[1]
    return readers, remedies


def _is_text(value: object) -> bool:
    """Return whether a value is encodable text; JSON can contain halves of characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _shown(value: object) -> str:
    """Return a value as the user wrote it, cut to a bounded length."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        written = repr(value)
    written = written.encode(errors="backslashreplace").decode()
    short = len(written) <= _SHOWN_CHARACTERS
    return written if short else f"{written[:_SHOWN_CHARACTERS]}…"


def did_you_mean(value: object, known: Collection[str]) -> str:
    """Return a clause with the known word that is most similar; empty if none is."""
    close = difflib.get_close_matches(str(value).lower(), known, n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""


def _either(words: Sequence[str]) -> str:
    """Return words as an alternative: "a", "b" or "c"."""
    quoted = [f'"{word}"' for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
