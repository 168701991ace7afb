"""Try whether the server of a remote tier can be used: what `kvcascade check` asks.

A small object is created, created again, and removed. It belongs to no namespace.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ...config.remote import RemoteTierOptions, WriteWhen
from .base import HEADER_BYTES, RemoteEngine, RemoteObject, RemoteOutcome
from .remote_options import open_remote_engine

PROBE_BYTES = 4096
FOLDER = "kvcascade-check"

_REASONS = {
    RemoteOutcome.ABSENT: "has no such bucket or folder; create it",
    RemoteOutcome.NO_SPACE: "is full; make room, or let it evict",
    RemoteOutcome.DENIED: "refuses the credentials, or has no such bucket, or finds the clock of "
    "this machine wrong; set them right",
    RemoteOutcome.BUSY: "asks to come back later",
    RemoteOutcome.TIMED_OUT: "does not answer in time; an engine serves without it until it does",
    RemoteOutcome.IO_ERROR: "cannot be reached; an engine serves without it until it can",
}


def probe_remote(options: RemoteTierOptions, environment: Mapping[str, str]) -> str | None:
    """Return a sentence about why the tier cannot be used as configured; None if it can.

    Blocks for a few deadlines of the tier. Raises `ConfigError` if a package or a secret is
    missing.
    """
    engine, _ = open_remote_engine(options, environment)
    try:
        found = _problem(engine, options)
    finally:
        engine.close()
    return None if found is None else f"{options.key}.url: the server {found}."


def _problem(engine: RemoteEngine, options: RemoteTierOptions) -> str | None:
    limit_s = options.deadline_s
    name = f"{FOLDER}/{secrets.token_hex(8)}"
    (found,) = engine.exist_many([name], limit_s)
    if found is not RemoteOutcome.ABSENT:
        return _REASONS.get(found, f"answers nonsense ({found})")
    if options.writes is WriteWhen.OFF:
        return None
    probe = RemoteObject(bytes(HEADER_BYTES), memoryview(bytes(PROBE_BYTES)))
    (wrote,) = engine.put([name], [probe], limit_s)
    if wrote is RemoteOutcome.DENIED:
        create = "" if options.is_valkey else "create the bucket if there is none, "
        return f'takes no objects from this user; {create}allow writes, or set writes to "off"'
    if wrote is not RemoteOutcome.OK:
        return _REASONS.get(wrote, f"does not store objects ({wrote})")
    (again,) = engine.put([name], [probe], limit_s)
    engine.remove([name], limit_s)
    if again is RemoteOutcome.OK:
        return "replaces objects that it should refuse to create again; use another server"
    return None
