"""Try whether the server of a remote tier can be used: what engines and `kvcascade check` ask.

It asks for an object and a counter that are not there. A small object is created,
created again, and removed. None of them belongs to a namespace. Folders that were created for it
are removed, too.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ...config.remote import RemoteTierOptions, WriteWhen
from .base import HEADER_BYTES, Cause, RemoteEngine, RemoteObject, RemoteOutcome
from .engines.opened_folder import folder_of_url
from .remote_options import folder_problem

PROBE_BYTES = 4096
FOLDER = "kvcascade-check"
FULL_BYTES = 16 << 20
"""A share with less free space is full: it takes small objects, and no blocks."""

_REASONS = {
    RemoteOutcome.ABSENT: "has no such bucket or folder; create it",
    RemoteOutcome.NO_SPACE: "is full, or cannot save to its own disk; make room, let it evict, or "
    "read its log",
    RemoteOutcome.DENIED: "refuses the credentials, or has no such bucket, or finds the clock of "
    "this machine wrong; set them right",
    RemoteOutcome.BUSY: "asks to come back later, as one that starts or has too many requests; an "
    "engine serves without it until then",
    RemoteOutcome.TIMED_OUT: "does not answer in time; an engine serves without it until it does",
    RemoteOutcome.IO_ERROR: "cannot be reached; an engine serves without it until it can",
}
_CAUSES = {
    Cause.NO_BUCKET: "has no such bucket; create it, or correct the url",
    Cause.NO_CREDENTIALS: "was not asked, since this machine has no credentials for it; set the "
    "variables of the environment, such as AWS_ACCESS_KEY_ID",
    Cause.CREDENTIALS: "refuses the credentials; correct them in the environment or in the file",
    Cause.CLOCK: "finds the clock of this machine wrong; set it right",
    Cause.RIGHT: "does not let this user read; allow reads, and lists of the bucket",
    Cause.FOLDER: "does not let this user create or read the folder; set its rights, or mount it "
    "writable",
    Cause.OTHER_FOLDER: "has lost the folder that this engine opened; mount the share again, or "
    "restart the engine if another folder is right",
    Cause.REGION: 'has this bucket in another region; set "region"',
    Cause.DATABASE: "has no such database; give the number of another one in the url",
    Cause.CERTIFICATE: "has a certificate that this machine does not trust; install the one that "
    'signed it, or set "ca_file" (Valkey) or the variable SSL_CERT_FILE (a bucket)',
    Cause.TLS: "breaks off connections with TLS; give a port that has TLS, or set "
    '"client_cert_file" if it asks its clients for a certificate',
    Cause.KEEPS_ALL: "removes no old blocks and takes no new ones once it is full; set maxmemory "
    "and maxmemory-policy allkeys-lru there",
}


class ServerFinding(NamedTuple):
    """A problem of a server."""

    text: str
    """Sentence about it."""
    is_hint: bool = False
    """True if the server works now, and its configuration will fail it later."""


def finding_of(engine: RemoteEngine, options: RemoteTierOptions) -> ServerFinding | None:
    """Return what is wrong with the server of an engine; None if nothing is.

    Blocks for a few deadlines of the tier, or as long as the file system of a folder.
    """
    said = folder_problem(options, may_be_missing=True)
    if said is not None:
        return ServerFinding(said)
    folder = folder_of_url(options.url)
    with without_new_folders(folder and folder / FOLDER):
        found = _problem(engine, options)
        if found is None and folder is not None and options.writes is not WriteWhen.OFF:
            is_full = shutil.disk_usage(folder).free < FULL_BYTES
            found = _REASONS[RemoteOutcome.NO_SPACE] if is_full else None
    is_hint = found is None and _will_keep_all(engine, options)
    if is_hint:
        found = _CAUSES[Cause.KEEPS_ALL]
    return None if found is None else ServerFinding(sentence(options, found), is_hint)


def sentence(options: RemoteTierOptions, clause: str) -> str:
    """Return the sentence about a tier with a clause about its server."""
    return f"{options.key}.url: the server {clause}."


def _will_keep_all(engine: RemoteEngine, options: RemoteTierOptions) -> bool:
    """Return True if we write to a server that will be full one day, and evicts nothing then."""
    writes = options.writes is not WriteWhen.OFF
    return writes and engine.explain(options.deadline_s) is Cause.KEEPS_ALL


@contextmanager
def without_new_folders(folder: Path | None) -> Iterator[None]:
    """Remove this folder and its parents again if they were created meanwhile and are empty."""
    paths = () if folder is None else (folder, *folder.parents)
    missing = [*takewhile(lambda path: not os.path.exists(path), paths)]
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # somebody uses it; a null byte is a `ValueError`
            for path in missing:
                path.rmdir()


def reason(outcome: RemoteOutcome, cause: Cause | None) -> str:
    """Return a clause about a server that failed."""
    if cause is not None and cause is not Cause.KEEPS_ALL:
        return _CAUSES[cause]
    nonsense = f"answers nonsense ({outcome}); look for a proxy or another server at this url"
    return _REASONS.get(outcome, nonsense)


def _problem(engine: RemoteEngine, options: RemoteTierOptions) -> str | None:
    """Return a clause about why the server cannot be used now; None if it can."""
    limit_s = options.deadline_s
    name = f"{FOLDER}/{secrets.token_hex(8)}"
    (found,) = engine.exist_many([name], limit_s)
    cause = engine.explain(limit_s)
    if found is not RemoteOutcome.ABSENT or cause not in (None, Cause.KEEPS_ALL):
        return reason(found, cause)
    counted = engine.counter(name, None, limit_s).outcome
    if counted is not RemoteOutcome.ABSENT:
        return reason(counted, Cause.RIGHT if counted is RemoteOutcome.DENIED else None)
    if options.writes is WriteWhen.OFF:
        return None
    return _problem_of_writes(engine, name, limit_s)


def _problem_of_writes(engine: RemoteEngine, name: str, limit_s: float) -> str | None:
    """Create an object twice and remove it."""
    probe = RemoteObject(bytes(HEADER_BYTES), memoryview(bytes(PROBE_BYTES)))
    (wrote,) = engine.put([name], [probe], limit_s)
    if wrote is RemoteOutcome.DENIED:
        return (
            "takes no objects from this user; allow writes, give the url of the primary if this is "
            'a replica, or set writes to "off"'
        )
    if wrote is RemoteOutcome.IO_ERROR:
        return (
            "answers, and fails to store objects; read its log, or use one that creates objects on "
            "condition (a folder: on a file system with hard links)"
        )
    if wrote is not RemoteOutcome.OK:
        return _REASONS.get(wrote, f"does not store objects ({wrote})")
    (again,) = engine.put([name], [probe], limit_s)
    (removed,) = engine.remove([name], limit_s)
    if again is RemoteOutcome.OK:
        return "replaces objects that it should refuse to create again; use another server"
    if removed is not RemoteOutcome.OK:
        return "does not let this user remove objects, such as damaged ones; allow it"
    return None
