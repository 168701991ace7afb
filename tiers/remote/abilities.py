"""Abilities that a remote engine may have beside `RemoteEngine`; only tools need them.

An engine without one of them serves all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from .base import RemoteOutcome


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """An object as the server lists it."""

    name: str
    size_bytes: int
    """Bytes of the header and the payload, or the memory that both take at the server."""
    touched_s: float | None
    """Unix time of the last write, or of the last use where the server knows it; None: unknown."""
    is_exact: bool = True
    """Whether the size is that of header and payload alone."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A batch of a list."""

    outcome: RemoteOutcome
    """`OK`, or the failure that ended the list."""
    entries: Sequence[RemoteEntry] = ()


@runtime_checkable
class CanList(Protocol):
    """An engine that lists its objects. Any thread."""

    def list_objects(self, prefix: str, limit_s: float) -> Iterator[Listing]:
        """Yield all objects whose names begin with `prefix`, in batches and in any order.

        The prefix ends with a slash or is empty. A batch takes `limit_s` seconds at most, and to
        the server it is no use of any object. A batch whose outcome is not `OK` is the last one.
        Nothing is raised. An object that is written or removed meanwhile may be missing; one may be
        named twice.
        """
        ...


@runtime_checkable
class CanMeasure(Protocol):
    """An engine whose lists have inexact sizes. Any thread."""

    def measure(self, names: Sequence[str], limit_s: float) -> list[int | RemoteOutcome]:
        """Return the bytes of each object, header and payload, or why they are not known.

        To the server this may be a use of the object. Nothing is raised.
        """
        ...


@runtime_checkable
class CanSweep(Protocol):
    """An engine that leaves files and folders that no list names. Any thread."""

    def sweep(
        self,
        namespace: str,
        older_than_s: float,
        is_old: Callable[[str], bool],
        *,
        is_dry_run: bool,
    ) -> list[int]:
        """Remove incomplete files of namespaces that begin with these digits. Return their bytes.

        A file stays if it was written in the last `older_than_s` seconds, since its writer may
        live. Empty folders of old generations are removed, too. `is_old` takes the first two parts
        of an object's name. Nothing is raised, except by `is_old`.
        """
        ...


class Cause(StrEnum):
    """Reason why a server is of no use, or soon will be."""

    NO_BUCKET = "no_bucket"
    """There is no such bucket or container."""
    NO_CREDENTIALS = "no_credentials"
    """No credentials were found on this machine."""
    CREDENTIALS = "credentials"
    """The server does not accept the credentials."""
    CLOCK = "clock"
    """The clock of this machine differs too much from that of the server."""
    RIGHT = "right"
    """The user is known, and may not read."""
    FOLDER = "folder"
    """The folder cannot be created or read by this user."""
    REGION = "region"
    """The bucket is in another region."""
    DATABASE = "database"
    """There is no database of this number."""
    CERTIFICATE = "certificate"
    """The certificate of the server is not trusted."""
    KEEPS_ALL = "keeps_all"
    """The server removes no old blocks by itself, and refuses new ones once it is full."""


@runtime_checkable
class CanExplain(Protocol):
    """An engine that finds out why its server is of no use. Any thread."""

    def explain(self, limit_s: float) -> Cause | None:
        """Return what is wrong with the server as seen by this user; None: nothing that is known.

        It asks the server, reads only, and takes `limit_s` plus `timeout_s` seconds at most.
        Nothing is raised.
        """
