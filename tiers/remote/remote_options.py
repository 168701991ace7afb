"""Open the engine that the options of a remote tier describe.

`open_remote_engine` reads the secrets that the options name, and asks no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from stat import S_ISDIR

from ...config.remote import RemoteTierOptions
from ...errors import ConfigError
from .base import EngineKind, RemoteEngine
from .engines.opened_folder import folder_of_url
from .objects import SECRET_BYTES, GcmSeal, MacSeal, Seal
from .remote_store import StoreOptions

MAX_SECRET_FILE_BYTES = 4096


def kind_of(options: RemoteTierOptions) -> EngineKind:
    """Return what is known of the engine."""
    kind = import_module(f".engines.{options.engine}", __package__).KIND
    assert isinstance(kind, EngineKind)
    return kind


def store_options(options: RemoteTierOptions) -> StoreOptions:
    """Return the limits of the store."""
    kind = kind_of(options)
    return StoreOptions(
        deadline_s=options.deadline_s,
        renew_after_s=kind.renew_after_s,
        reads_at_a_time=options.reads_at_a_time or kind.reads_at_a_time,
        writes_at_a_time=options.writes_at_a_time or kind.writes_at_a_time,
        read_bytes_per_s=options.read_rate.count if options.read_rate else None,
        write_bytes_per_s=options.write_rate.count if options.write_rate else None,
        when=options.writes,
        queue_bytes=options.queue_bytes.count,
        queue_s=options.queue_s,
    )


def missing_extra(options: RemoteTierOptions) -> str | None:
    """Return a sentence about the optional package that these options need and that is missing."""
    kind = kind_of(options)
    if kind.package is not None and find_spec(kind.package) is None:
        return (
            f"{options.key}.url: {options.scheme}:// needs the package {kind.package}; install "
            f"kvcascade[{kind.extra}]."
        )
    if options.wants("encryption_key") and find_spec("cryptography") is None:
        return (
            f"{options.key}: encryption needs the package cryptography; install "
            "kvcascade[encryption]."
        )
    return None


def folder_problem(options: RemoteTierOptions, *, may_be_missing: bool) -> str | None:
    """Return a sentence about the folder of a `file://` URL; None if it can be opened.

    Blocks as long as its file system does not answer. The first request creates a folder that is
    missing.
    """
    folder = folder_of_url(options.url)
    if folder is None:
        return None
    place = f"{options.key}.url: {str(folder)!r}"
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        said = f"{place} does not exist; mount the share, or correct the url."
        return None if may_be_missing else said
    except OSError as error:
        return f"{place} cannot be read ({error.strerror})."
    except ValueError:
        return f"{place} has a null byte; correct the url."
    return None if S_ISDIR(mode) else f"{place} is a file, not a folder."


def open_remote_engine(
    options: RemoteTierOptions, environment: Mapping[str, str]
) -> tuple[RemoteEngine, Seal | None]:
    """Return the engine, and the protection of its objects.

    Reads secrets from files and environment. Asks no server, and no folder of a `file://` URL.
    Raises `ConfigError`, without any credential in it.
    """
    seal = _open_seal(options, environment)
    secret = partial(_secret, options, environment)
    return kind_of(options).open(options, secret), seal


def check_openable(options: RemoteTierOptions, environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a package or a secret that these options need is missing.

    It loads no library that starts threads, so that a scheduler's process can call it.
    """
    _open_seal(options, environment)
    kind = kind_of(options)
    if kind.is_light:
        kind.open(options, partial(_secret, options, environment)).close()


def _open_seal(options: RemoteTierOptions, environment: Mapping[str, str]) -> Seal | None:
    """Return the protection of objects. Raises `ConfigError`, for a missing package first."""
    missing = missing_extra(options)
    if missing:
        raise ConfigError(missing)
    if options.wants("mac_key"):
        return MacSeal(_key(options, "mac_key", environment))
    if options.wants("encryption_key"):
        return GcmSeal(_key(options, "encryption_key", environment))
    return None


def _secret(options: RemoteTierOptions, environment: Mapping[str, str], name: str) -> bytes:
    variable, path = getattr(options, f"{name}_env"), getattr(options, f"{name}_file")
    if variable is not None:
        if not environment.get(variable):
            raise ConfigError(
                f"{options.key}.{name}_env: that environment variable is not set; set it, or "
                "leave the option out."
            )
        return environment[variable].encode(errors="surrogateescape")
    try:
        with path.open("rb") as file:
            data: bytes = file.read(MAX_SECRET_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{options.key}.{name}_file: {str(path)!r} cannot be read ({error.strerror})."
        ) from None
    if not data or len(data) > MAX_SECRET_FILE_BYTES:
        raise ConfigError(
            f"{options.key}.{name}_file: {str(path)!r} is empty or longer than "
            f"{MAX_SECRET_FILE_BYTES} bytes."
        )
    return data


def _key(options: RemoteTierOptions, name: str, environment: Mapping[str, str]) -> bytes:
    data = _secret(options, environment, name)
    if len(data) == SECRET_BYTES:
        return data
    try:
        found = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        found = b""
    if len(found) != SECRET_BYTES:
        raise ConfigError(
            f"{options.key}.{name}: give {SECRET_BYTES} random bytes, as {2 * SECRET_BYTES} "
            "hexadecimal digits."
        )
    return found
