"""The format of a remote object, how it is made, and how it is verified.

The header, all numbers little endian: magic, version, flags, payload length, generation, digest of
the namespace, key, nonce, checksum, tag, zeros up to `HEADER_BYTES`. The checksum covers everything
before it and the stored payload. The tag is a message authentication code over the same bytes, or
the tag of AES-GCM; without a secret key it is zero.

The digest of the namespace is derived from the fingerprint and from the secret key. Engines with
other keys therefore use other names, and never see, reject or remove each other's objects. The
same holds for engines with other versions of the format.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import numpy as np
import xxhash

from ...errors import ConfigError
from ..base import BlockHash
from .base import HEADER_BYTES, PrivateBuffer, RemoteObject

OBJECT_VERSION = 1
_DIGEST_WORDS = {1: b"kvcascade remote\0"}
"""First word of the digest of a namespace, by version. Engines of different versions need different
names. Otherwise the older one would remove the objects of the newer one as damaged."""
MAX_REMOTE_KEY_BYTES = 64
SECRET_BYTES = 32
_MAGIC = b"KVCR"
BODY = struct.Struct("<4sHHQQ32sB64s12s")
"""Fields of the header before the checksum."""
_CHECKSUM_BYTES = 16
_TAG_BYTES = 32
_GCM_TAG_BYTES = 16
_NONCE_BYTES = 12
_FIELDS_BYTES = BODY.size + _CHECKSUM_BYTES + _TAG_BYTES
_PADDING = bytes(HEADER_BYTES - _FIELDS_BYTES)
assert _FIELDS_BYTES <= HEADER_BYTES


class Seal(ABC):
    """Protection of objects by a secret key. Any thread."""

    flag: int
    """Value of the header's flags."""
    label: bytes
    """Digest that distinguishes the namespaces of different keys; it does not reveal the key."""

    def new_nonce(self) -> bytes:
        """Return the nonce of the next object; zeros if nothing is encrypted."""
        return bytes(_NONCE_BYTES)

    @abstractmethod
    def close(self, body: bytes, nonce: bytes, payload: memoryview) -> tuple[memoryview, bytes]:
        """Return the payload as it is stored, and the tag."""

    @abstractmethod
    def open(self, body: bytes, nonce: bytes, payload: memoryview, tag: bytes) -> memoryview | None:
        """Return the payload in plain, or None if the tag is not right."""


class NoSeal(Seal):
    """No secret key: the checksum finds damage, but not a forgery."""

    flag = 0
    label = b""

    def close(self, body: bytes, nonce: bytes, payload: memoryview) -> tuple[memoryview, bytes]:
        return payload, bytes(_TAG_BYTES)

    def open(self, body: bytes, nonce: bytes, payload: memoryview, tag: bytes) -> memoryview | None:
        return payload if tag == bytes(_TAG_BYTES) else None


class MacSeal(Seal):
    """HMAC-SHA-256 over header and payload: who does not know the key can forge nothing."""

    flag = 1

    def __init__(self, secret: bytes) -> None:
        """`secret`: `SECRET_BYTES` random bytes. Raises `ConfigError` for another length."""
        self._secret = _checked(secret)
        self.label = _label(b"mac", secret)

    def close(self, body: bytes, nonce: bytes, payload: memoryview) -> tuple[memoryview, bytes]:
        return payload, self._tag(body, payload)

    def open(self, body: bytes, nonce: bytes, payload: memoryview, tag: bytes) -> memoryview | None:
        return payload if hmac.compare_digest(tag, self._tag(body, payload)) else None

    def _tag(self, body: bytes, payload: memoryview) -> bytes:
        mac = hmac.new(self._secret, body, hashlib.sha256)
        mac.update(payload)
        return mac.digest()


class GcmSeal(Seal):
    """AES-256-GCM: payloads are encrypted, and header and payload are authenticated."""

    flag = 2

    def __init__(self, secret: bytes) -> None:
        """`secret`: `SECRET_BYTES` random bytes. Raises `ConfigError` for another length, or if
        the package `cryptography` is missing."""
        try:
            ciphers: Any = import_module("cryptography.hazmat.primitives.ciphers")
            exceptions: Any = import_module("cryptography.exceptions")
        except ImportError:
            raise ConfigError(
                "encryption of remote blocks needs the package cryptography; install "
                "kvcascade[encryption]."
            ) from None
        self._ciphers = ciphers
        self._wrong_tag: type[Exception] = exceptions.InvalidTag
        self._algorithm = ciphers.algorithms.AES(_checked(secret))
        self.label = _label(b"gcm", secret)

    def new_nonce(self) -> bytes:
        return os.urandom(_NONCE_BYTES)

    def close(self, body: bytes, nonce: bytes, payload: memoryview) -> tuple[memoryview, bytes]:
        modes = self._ciphers.modes
        work = self._ciphers.Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        work.authenticate_additional_data(body)
        stored = np.empty(payload.nbytes, np.uint8).data
        work.update_into(payload, stored)
        work.finalize()
        return stored, work.tag.ljust(_TAG_BYTES, b"\0")

    def open(self, body: bytes, nonce: bytes, payload: memoryview, tag: bytes) -> memoryview | None:
        modes = self._ciphers.modes
        if tag[_GCM_TAG_BYTES:] != bytes(_TAG_BYTES - _GCM_TAG_BYTES):
            return None
        mode = modes.GCM(nonce, tag[:_GCM_TAG_BYTES])
        work = self._ciphers.Cipher(self._algorithm, mode).decryptor()
        work.authenticate_additional_data(body)
        plain = np.empty(payload.nbytes, np.uint8).data
        work.update_into(payload, plain)
        try:
            work.finalize()
        except self._wrong_tag:
            return None
        return plain


class ObjectFormat:
    """Makes and verifies the objects of one namespace. Any thread."""

    def __init__(self, fingerprint: str, payload_bytes: int, seal: Seal | None = None) -> None:
        """`fingerprint`: everything that shapes the bytes of a block, as one word.

        All payloads have `payload_bytes`.
        """
        self.payload_bytes = payload_bytes
        self._seal = seal or NoSeal()
        named = hashlib.sha256(_DIGEST_WORDS[OBJECT_VERSION] + fingerprint.encode() + b"\0")
        named.update(payload_bytes.to_bytes(8, "little") + self._seal.label)
        self._digest = named.digest()
        self.namespace = self._digest[:16].hex()
        """First part of every name."""

    @property
    def counter_name(self) -> str:
        """Name of the counter of generations."""
        return counter_name(self.namespace)

    @property
    def marks_name(self) -> str:
        """Name of the counter that holds the mark of the last reset."""
        return f"{self.namespace}/resets"

    def name(self, key: BlockHash, generation: int) -> str:
        """Return the name of a block's object."""
        word = key.hex()
        return f"{self.namespace}/{generation:x}/{word[:2]}/{word}"

    def make(self, key: BlockHash, generation: int, payload: memoryview) -> RemoteObject:
        """Return the object of a block; without encryption its payload is the given memory."""
        nonce = self._seal.new_nonce()
        body = self._body(key, generation, nonce)
        stored, tag = self._seal.close(body, nonce, payload)
        checksum = _checksum(body, stored)
        return RemoteObject(body + checksum + tag + _PADDING, stored)

    def verified(self, key: BlockHash, generation: int, buffer: PrivateBuffer) -> memoryview | None:
        """Return the payload of an object, or None if it is not exactly the one that was asked for.

        The payload lies in private memory, mostly that of `buffer`.
        """
        header, payload = bytes(buffer.header), buffer.payload
        if len(header) != HEADER_BYTES or payload.nbytes != self.payload_bytes:
            return None
        nonce = nonce_of(header)
        body = self._body(key, generation, nonce)
        tag = tag_of(header, body, payload)
        return None if tag is None else self._seal.open(body, nonce, payload, tag)

    def _body(self, key: BlockHash, generation: int, nonce: bytes) -> bytes:
        n_bytes = self.payload_bytes
        return packed_body(self._seal.flag, n_bytes, generation, self._digest, key, nonce)


def counter_name(namespace: str) -> str:
    """Return the name of the counter of a namespace's generations."""
    return f"{namespace}/generation"


def generation_of(counter: int, *, was_reset: bool) -> int:
    """Return the generation of an engine's blocks: twice the counter, and one more after a reset.

    `was_reset`: the engine itself was reset since its start. Its weights may have been updated in
    place, so engines with the weights of the disk must not find its blocks.
    """
    return 2 * counter + was_reset


def parts_of(generation: int) -> tuple[int, bool]:
    """Return the arguments of `generation_of`."""
    return generation >> 1, bool(generation & 1)


def packed_body(
    flag: int, payload_bytes: int, generation: int, digest: bytes, key: BlockHash, nonce: bytes
) -> bytes:
    """Return the fields of a header before the checksum."""
    assert 0 < len(key) <= MAX_REMOTE_KEY_BYTES
    fields = (flag, payload_bytes, generation, digest, len(key), key, nonce)
    return BODY.pack(_MAGIC, OBJECT_VERSION, *fields)


def nonce_of(header: bytes) -> bytes:
    """Return the nonce that a header names."""
    return header[BODY.size - _NONCE_BYTES : BODY.size]


def tag_of(header: bytes, body: bytes, payload: memoryview) -> bytes | None:
    """Return the tag of an object; None if its header has another body, or it is damaged."""
    if header[: BODY.size] != body or header[_FIELDS_BYTES:] != _PADDING:
        return None
    tag_at = BODY.size + _CHECKSUM_BYTES
    if header[BODY.size : tag_at] != _checksum(body, payload):
        return None
    return header[tag_at:_FIELDS_BYTES]


def _checksum(body: bytes, payload: memoryview) -> bytes:
    """Return 128 bits over both parts, in one call, so that two threads can hash at a time."""
    return xxhash.xxh3_128_digest(payload, seed=xxhash.xxh3_64_intdigest(body))


def _checked(secret: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"the key for remote blocks has {len(secret)} bytes; give {SECRET_BYTES} random bytes."
        )
    return secret


def _label(purpose: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, b"kvcascade remote " + purpose, hashlib.sha256).digest()
