"""Options of a remote tier: `{"type": "remote", "url": ...}`.

Parsing is pure. No credential is an option: options name environment variables and files. No
message shows the value of an option that could be a credential.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from ..errors import ConfigError
from . import sizes
from .options import (
    At,
    choice,
    deadline,
    did_you_mean,
    flag,
    folder,
    optional,
    read_options,
    sized,
    text,
    whole,
)
from .sizes import Bytes


class Scheme(NamedTuple):
    """Engine behind a kind of URL."""

    engine: str
    """Module of `tiers/remote/`."""
    protected: str = ""
    """Scheme of the same servers whose connections are protected, which may be this one."""


VALKEY, OBJECT_STORE = "valkey", "object_store"
SCHEMES = {
    "valkey": Scheme(VALKEY, "valkeys"),
    "redis": Scheme(VALKEY, "rediss"),
    "valkeys": Scheme(VALKEY, "valkeys"),
    "rediss": Scheme(VALKEY, "rediss"),
    "s3": Scheme(OBJECT_STORE, "s3"),
    "gs": Scheme(OBJECT_STORE, "gs"),
    "az": Scheme(OBJECT_STORE, "az"),
    "file": Scheme(OBJECT_STORE, "file"),
}
MAX_THREADS = 64
_URL_REMEDY = 'give a URL such as "s3://bucket/prefix" or "valkeys://host:6379"'
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECRET_WORDS = ("pass", "pwd", "secret", "token", "key", "credential", "auth")
_NO_SECRETS = "credentials are no options; name an environment variable or a file that holds them"


def _url(at: At, value: Any) -> str:
    """Read a URL without credentials; messages do not show it, since it could hold some."""
    written = text(at, value) if isinstance(value, str) else ""
    try:
        parts = urlsplit(written)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{at.key}: is not a URL; {_URL_REMEDY}.") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{at.key}: holds credentials or a query; leave them out, {_NO_SECRETS}.")
    if parts.scheme not in SCHEMES:
        close = did_you_mean(parts.scheme, SCHEMES)
        known = ", ".join(SCHEMES)
        raise ConfigError(f"{at.key}: unknown scheme {parts.scheme!r}{close}; use one of {known}.")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f'{at.key}: give a folder as "file:///mnt/share/kv".')
    if parts.scheme != "file" and not parts.hostname:
        raise ConfigError(f"{at.key}: names no host or bucket; {_URL_REMEDY}.")
    engine = SCHEMES[parts.scheme].engine
    if engine == OBJECT_STORE and port is not None:
        raise ConfigError(f'{at.key}: a bucket has no port; give the server as "endpoint".')
    if engine == VALKEY and not re.fullmatch(r"/?\d*", parts.path):
        raise ConfigError(f'{at.key}: the path is no number of a database; give none, or "/0".')
    return written


def _endpoint(at: At, value: Any) -> str:
    """Read the URL of a server without credentials; messages do not show it."""
    wrong = ConfigError(f'{at.key}: give a URL such as "https://s3.example.org".')
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not is_address:
        raise wrong
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{at.key}: holds credentials; leave them out, {_NO_SECRETS}.")
    return str(value)


def _variable(at: At, value: Any) -> str:
    """Read the name of an environment variable; messages do not show it."""
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ConfigError(
            f"{at.key}: is not the name of an environment variable; give the name of the one that "
            "holds the secret, such as VALKEY_PASSWORD."
        )
    return value


def _secret_file(at: At, value: Any) -> Path:
    """Read the path of a file; messages do not show a value that could be the secret itself."""
    try:
        return folder(at, value)
    except ConfigError:
        raise ConfigError(
            f"{at.key}: is not an absolute path; give the path of the file with the secret."
        ) from None


class WriteWhen(StrEnum):
    """Time at which an offered block is written to the remote tier."""

    SECOND_TOUCH = "second_touch"
    """At its second offer."""
    THROUGH = "through"
    """Whenever it is offered."""
    OFF = "off"
    """Never: this engine only reads."""


@dataclass(frozen=True, slots=True)
class RemoteTierOptions:
    """Options of a tier in an object store or in a Valkey server."""

    type: ClassVar[str] = "remote"
    opener: ClassVar[str] = "kvcascade.assembly.remote_parts:open_remote_tier"

    key: str
    """Place in the configuration, for messages: "tiers[2]"."""
    url: Annotated[str, _url, _URL_REMEDY]
    """Bucket and prefix, folder, or server: `"s3://bucket/prefix"`, `"file:///mnt/share/kv"`,
    `"valkeys://host:6379"`. Credentials are never part of it."""
    writes: Annotated[WriteWhen, choice(WriteWhen)] = WriteWhen.SECOND_TOUCH
    """Time at which a block is written: when a second request of this host has used it
    (`"second_touch"`), as soon as it is stored (`"through"`), or never (`"off"`)."""
    deadline_s: Annotated[float, deadline] = 2.0
    """Longest time in seconds that a request waits for the tier, lookup and read together."""
    timeout_s: Annotated[float, deadline] = 2.0
    """Longest time in seconds of one request to an object store, or without a byte from a Valkey
    server."""
    connect_timeout_s: Annotated[float, deadline] = 1.0
    """Longest time in seconds to open a connection."""
    queue_bytes: Annotated[Bytes, sized(sizes.parse_bytes)] = Bytes(256 << 20)
    """Payload of blocks that may wait to be written; more is dropped."""
    queue_s: Annotated[float, deadline] = 10.0
    """Longest time in seconds that a block waits to be written."""
    read_rate: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Limit of reads in bytes per second."""
    write_rate: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Limit of writes in bytes per second."""
    reads_at_a_time: Annotated[int | None, optional(whole(1, MAX_THREADS))] = None
    """Limit on concurrent reads. The default is 64 for object stores and 2 for Valkey. Above 8 the
    number grows while reads are quick, up to 128 MiB of blocks, and falls while they are slow."""
    writes_at_a_time: Annotated[int | None, optional(whole(1, MAX_THREADS))] = None
    """Limit on concurrent writes, which works likewise. The default is 32 for object stores and 2
    for Valkey."""
    share_tp: Annotated[bool, flag] = False
    """Share blocks with engines of other tensor-parallel sizes; all ranks must hold the same KV."""
    insecure: Annotated[bool, flag] = False
    """Allow connections without TLS to other hosts."""
    endpoint: Annotated[str | None, optional(_endpoint)] = None
    """URL of an S3-compatible server. The default is the provider's own."""
    region: Annotated[str | None, optional(text)] = None
    """Region of an S3 bucket. The default is that of the environment."""
    ttl_s: Annotated[float | None, optional(deadline)] = None
    """Seconds without use after which a Valkey server removes a block."""
    username: Annotated[str | None, optional(text)] = None
    """User of a Valkey server. The default is the server's default user."""
    password_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with the password of a Valkey server."""
    password_file: Annotated[Path | None, optional(_secret_file)] = None
    """File with the password of a Valkey server."""
    ca_file: Annotated[Path | None, optional(folder)] = None
    """Certificates that sign those of a Valkey server. The default is those of the system."""
    client_cert_file: Annotated[Path | None, optional(folder)] = None
    """Certificate that a Valkey server asks its clients for, in PEM."""
    client_key_file: Annotated[Path | None, optional(_secret_file)] = None
    """Key of that certificate, in PEM and not encrypted. The default is the certificate's file."""
    mac_key_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with a key that authenticates blocks, as 64 hexadecimal digits."""
    mac_key_file: Annotated[Path | None, optional(_secret_file)] = None
    """File with a key that authenticates blocks: 32 bytes or 64 hexadecimal digits."""
    encryption_key_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with a key that encrypts blocks, as 64 hexadecimal digits."""
    encryption_key_file: Annotated[Path | None, optional(_secret_file)] = None
    """File with a key that encrypts blocks: 32 bytes or 64 hexadecimal digits."""

    @property
    def scheme(self) -> str:
        """Scheme of the URL, one of `SCHEMES`."""
        return urlsplit(self.url).scheme

    @property
    def engine(self) -> str:
        """Module of `tiers/remote/` with the engine."""
        return SCHEMES[self.scheme].engine

    def wants(self, secret: str) -> bool:
        """Return True if they name this secret: password, mac_key or encryption_key."""
        return bool(getattr(self, f"{secret}_env") or getattr(self, f"{secret}_file"))

    def as_given(self) -> dict[str, object]:
        """Return the options as JSON values that `parse_remote` reads again."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "key"}
        return {name: _plain(value) for name, value in found.items() if value is not None}


_TLS_ONLY = ("ca_file", "client_cert_file", "client_key_file")
_VALKEY_ONLY = ("ttl_s", "username", "password_env", "password_file", *_TLS_ONLY)
_S3_ONLY = ("endpoint", "region")
_PAIRS = (
    ("password_env", "password_file"),
    ("mac_key_env", "mac_key_file"),
    ("encryption_key_env", "encryption_key_file"),
)


def parse_remote(at: At, options: Mapping[str, object]) -> RemoteTierOptions:
    """Return the options of a remote tier, without its "type". Raises `ConfigError`."""
    known = RemoteTierOptions.__annotations__
    for name in options:
        if name not in known and any(word in str(name).lower() for word in _SECRET_WORDS):
            raise ConfigError(f"{at.below(str(name)).key}: is not known; {_NO_SECRETS}.")
    read = read_options(RemoteTierOptions, at, options, also=["type"])
    scheme = read.scheme
    others = [
        *(() if read.engine == VALKEY else _VALKEY_ONLY),
        *(() if scheme == SCHEMES[scheme].protected else _TLS_ONLY),
        *(() if scheme == "s3" else _S3_ONLY),
    ]
    misplaced = [name for name in others if getattr(read, name) is not None]
    if misplaced:
        raise ConfigError(f"{at.key}.{misplaced[0]}: does not apply to {scheme}://; leave it out.")
    for one, other in _PAIRS:
        if getattr(read, one) and getattr(read, other):
            raise ConfigError(f"{at.key}.{one}: leave it out, since {other} is set too.")
    if read.wants("mac_key") and read.wants("encryption_key"):
        raise ConfigError(
            f"{at.key}: leave the mac_key out, since encrypted blocks are authenticated too."
        )
    if read.username is not None and not read.wants("password"):
        raise ConfigError(f"{at.key}.username: set password_env or password_file too.")
    if read.client_key_file is not None and read.client_cert_file is None:
        raise ConfigError(f"{at.key}.client_key_file: set client_cert_file too.")
    if not read.insecure:
        _check_tls(at, read)
    return read


def _plain(value: object) -> object:
    if isinstance(value, Bytes):
        return value.count
    return value if isinstance(value, bool | int | float) else str(value)


def _check_tls(at: At, options: RemoteTierOptions) -> None:
    """Refuse connections to other hosts that are not encrypted."""
    scheme, host = options.scheme, urlsplit(options.url).hostname or ""
    protected = SCHEMES[scheme].protected
    if scheme != protected and not is_loopback(host):
        other = f"use {protected}:// or " if protected else ""
        raise ConfigError(
            f"{at.key}.url: {scheme}:// to another host has no TLS; {other}set insecure to true."
        )
    endpoint = urlsplit(options.endpoint or "")
    if endpoint.scheme == "http" and not is_loopback(endpoint.hostname or ""):
        raise ConfigError(
            f"{at.key}.endpoint: http:// to another host has no TLS; use https:// or set insecure "
            "to true."
        )


def is_loopback(host: str) -> bool:
    """Return True if connections to this host stay on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
