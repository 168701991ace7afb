"""Options of a remote tier: `{"type": "remote", "url": ...}`, and the engine that they describe.

`parse_remote` is pure. `open_remote_engine` reads the secrets that the options name, and asks no
server. No credential is an option: options name environment variables and files. No message shows
the value of an option that could be a credential.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from ...config import sizes
from ...config.options import (
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
from ...config.sizes import Bytes
from ...errors import ConfigError
from .base import RemoteEngine
from .object_store import OBJECT_SCHEMES, ObjectStoreOptions, open_object_store
from .objects import SECRET_BYTES, GcmSeal, MacSeal, Seal
from .remote_store import StoreOptions
from .resp import Address, Login
from .uploads import WriteWhen
from .valkey import ValkeyEngine, ValkeyOptions

PLAIN_SCHEMES, TLS_SCHEMES = ("valkey", "redis"), ("valkeys", "rediss")
SCHEMES = (*PLAIN_SCHEMES, *TLS_SCHEMES, *OBJECT_SCHEMES)
DEFAULT_PORT = 6379
MAX_THREADS = 64
MAX_SECRET_FILE_BYTES = 4096
_URL_REMEDY = 'give a URL such as "s3://bucket/prefix" or "valkeys://host:6379"'
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECRET_WORDS = ("password", "secret", "token", "key", "credential", "auth")
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
    if parts.scheme in OBJECT_SCHEMES and port is not None:
        raise ConfigError(f'{at.key}: a bucket has no port; give the server as "endpoint".')
    if parts.scheme in (*PLAIN_SCHEMES, *TLS_SCHEMES) and not re.fullmatch(r"/?\d*", parts.path):
        raise ConfigError(f'{at.key}: the path is no number of a database; give none, or "/0".')
    return written


def _endpoint(at: At, value: Any) -> str:
    parts = urlsplit(value) if isinstance(value, str) else SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f'{at.key}: give a URL such as "https://s3.example.org".')
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{at.key}: holds credentials; leave them out, {_NO_SECRETS}.")
    return str(value)


def _variable(at: At, value: Any) -> str:
    """Read the name of an environment variable; messages do not show it."""
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ConfigError(f"{at.key}: is not the name of an environment variable.")
    return value


@dataclass(frozen=True, slots=True)
class RemoteTierOptions:
    """Options of a tier in an object store or in a Valkey server."""

    type: ClassVar[str] = "remote"

    key: str
    """Place in the configuration, for messages: "tiers[2]"."""
    url: Annotated[str, _url, _URL_REMEDY]
    """Bucket and prefix, folder, or server."""
    writes: Annotated[WriteWhen, choice(WriteWhen)] = WriteWhen.SECOND_TOUCH
    """Time at which a block is written."""
    deadline_s: Annotated[float, deadline] = 2.0
    """Longest time that a request waits for the tier, lookup and read together."""
    timeout_s: Annotated[float, deadline] = 2.0
    """Longest time of one request to an object store, or without a byte from a Valkey server."""
    connect_timeout_s: Annotated[float, deadline] = 1.0
    """Longest time to open a connection."""
    queue_bytes: Annotated[Bytes, sized(sizes.parse_bytes)] = Bytes(256 << 20)
    """Payload of blocks that may wait to be written; more is dropped."""
    queue_s: Annotated[float, deadline] = 10.0
    """Longest time that a block waits to be written."""
    read_rate: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Limit in bytes per second; None: no limit."""
    write_rate: Annotated[Bytes | None, optional(sized(sizes.parse_bytes))] = None
    """Limit in bytes per second; None: no limit."""
    reads_at_a_time: Annotated[int | None, optional(whole(1, MAX_THREADS))] = None
    """Concurrent reads; None: 8 for object stores, 2 for Valkey."""
    writes_at_a_time: Annotated[int | None, optional(whole(1, MAX_THREADS))] = None
    """Concurrent writes; None: 4 for object stores, 2 for Valkey."""
    insecure: Annotated[bool, flag] = False
    """Allow connections without TLS to other hosts."""
    endpoint: Annotated[str | None, optional(_endpoint)] = None
    """URL of an S3-compatible server; None: the provider's own."""
    region: Annotated[str | None, optional(text)] = None
    """Region of an S3 bucket; None: that of the environment."""
    ttl_s: Annotated[float | None, optional(deadline)] = None
    """Seconds after which a Valkey server removes a block; None: never."""
    username: Annotated[str | None, optional(text)] = None
    """User of a Valkey server; None: the default user."""
    password_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with the password of a Valkey server."""
    password_file: Annotated[Path | None, optional(folder)] = None
    """File with the password of a Valkey server."""
    ca_file: Annotated[Path | None, optional(folder)] = None
    """Certificates that sign those of a Valkey server; None: those of the system."""
    mac_key_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with a key that authenticates blocks, as 64 hexadecimal digits."""
    mac_key_file: Annotated[Path | None, optional(folder)] = None
    """File with a key that authenticates blocks: 32 bytes or 64 hexadecimal digits."""
    encryption_key_env: Annotated[str | None, optional(_variable)] = None
    """Environment variable with a key that encrypts blocks, as 64 hexadecimal digits."""
    encryption_key_file: Annotated[Path | None, optional(folder)] = None
    """File with a key that encrypts blocks: 32 bytes or 64 hexadecimal digits."""

    @property
    def is_valkey(self) -> bool:
        """True for a Valkey or Redis server, False for an object store."""
        return urlsplit(self.url).scheme not in OBJECT_SCHEMES

    @property
    def store(self) -> StoreOptions:
        """Limits of the store."""
        reads, writes = (2, 2) if self.is_valkey else (8, 4)
        return StoreOptions(
            deadline_s=self.deadline_s,
            reads_at_a_time=self.reads_at_a_time or reads,
            writes_at_a_time=self.writes_at_a_time or writes,
            read_bytes_per_s=self.read_rate.count if self.read_rate else None,
            write_bytes_per_s=self.write_rate.count if self.write_rate else None,
            when=self.writes,
            queue_bytes=self.queue_bytes.count,
            queue_s=self.queue_s,
        )


_VALKEY_ONLY = ("ttl_s", "username", "password_env", "password_file", "ca_file")
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
    scheme = urlsplit(read.url).scheme
    misplaced = [] if read.is_valkey else [n for n in _VALKEY_ONLY if getattr(read, n) is not None]
    if scheme != "s3":
        misplaced += [n for n in _S3_ONLY if getattr(read, n) is not None]
    if misplaced:
        raise ConfigError(f"{at.key}.{misplaced[0]}: does not apply to {scheme}://; leave it out.")
    for one, other in _PAIRS:
        if getattr(read, one) and getattr(read, other):
            raise ConfigError(f"{at.key}.{one}: leave it out, since {other} is set too.")
    if _wants(read, "mac_key") and _wants(read, "encryption_key"):
        raise ConfigError(
            f"{at.key}: leave the mac_key out, since encrypted blocks are authenticated too."
        )
    if read.username is not None and not _wants(read, "password"):
        raise ConfigError(f"{at.key}.username: set password_env or password_file too.")
    if not read.insecure:
        _check_tls(at, read)
    return read


def _wants(options: RemoteTierOptions, secret: str) -> bool:
    return bool(getattr(options, f"{secret}_env") or getattr(options, f"{secret}_file"))


def _check_tls(at: At, options: RemoteTierOptions) -> None:
    """Refuse connections to other hosts that are not encrypted."""
    parts = urlsplit(options.url)
    if parts.scheme in PLAIN_SCHEMES and not _is_loopback(parts.hostname or ""):
        tls = TLS_SCHEMES[PLAIN_SCHEMES.index(parts.scheme)]
        raise ConfigError(
            f"{at.key}.url: {parts.scheme}:// to another host has no TLS; use {tls}:// or set "
            "insecure to true."
        )
    endpoint = urlsplit(options.endpoint or "")
    if endpoint.scheme == "http" and not _is_loopback(endpoint.hostname or ""):
        raise ConfigError(
            f"{at.key}.endpoint: http:// to another host has no TLS; use https:// or set insecure "
            "to true."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def missing_extra(options: RemoteTierOptions) -> str | None:
    """Return a sentence about the optional package that these options need and that is missing."""
    if not options.is_valkey and find_spec("obstore") is None:
        scheme = urlsplit(options.url).scheme
        return f"{options.key}.url: {scheme}:// needs the package obstore; install kvcascade[s3]."
    if _wants(options, "encryption_key") and find_spec("cryptography") is None:
        return (
            f"{options.key}: encryption needs the package cryptography; install "
            "kvcascade[encryption]."
        )
    return None


def open_remote_engine(
    options: RemoteTierOptions, environment: Mapping[str, str]
) -> tuple[RemoteEngine, Seal | None]:
    """Return the engine, and the protection of its objects.

    Reads files and environment, and asks no server. Raises `ConfigError`, without any credential
    in it.
    """
    missing = missing_extra(options)
    if missing:
        raise ConfigError(missing)
    seal: Seal | None = None
    if _wants(options, "mac_key"):
        seal = MacSeal(_key(options, "mac_key", environment))
    elif _wants(options, "encryption_key"):
        seal = GcmSeal(_key(options, "encryption_key", environment))
    if options.is_valkey:
        return _open_valkey(options, environment), seal
    of_store = ObjectStoreOptions(
        options.url,
        options.timeout_s,
        options.connect_timeout_s,
        options.endpoint,
        options.region,
    )
    return open_object_store(of_store), seal


def _open_valkey(options: RemoteTierOptions, environment: Mapping[str, str]) -> ValkeyEngine:
    parts = urlsplit(options.url)
    tls: ssl.SSLContext | None = None
    if parts.scheme in TLS_SCHEMES:
        try:
            tls = ssl.create_default_context(cafile=options.ca_file and str(options.ca_file))
        except OSError as error:
            raise ConfigError(
                f"{options.key}.ca_file: cannot be read ({error.strerror or 'no certificates'})."
            ) from None
    password: str | None = None
    if _wants(options, "password"):
        raw = _secret(options, "password", environment)
        password = raw.decode(errors="surrogateescape").rstrip("\r\n")
    login = Login(
        options.connect_timeout_s,
        options.timeout_s,
        tls,
        options.username,
        password,
        int(parts.path.strip("/") or 0),
    )
    address = Address(unquote(parts.hostname or ""), parts.port or DEFAULT_PORT)
    return ValkeyEngine(ValkeyOptions(address, login, options.ttl_s))


def _secret(options: RemoteTierOptions, name: str, environment: Mapping[str, str]) -> bytes:
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
    data = _secret(options, name, environment)
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
