"""Checks of one object of a remote tier that need no fingerprint of its namespace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ....tiers.base import BlockHash
from ....tiers.remote.base import HEADER_BYTES, PrivateBuffer
from ....tiers.remote.objects import (
    BODY,
    GcmSeal,
    MacSeal,
    NoSeal,
    Seal,
    nonce_of,
    packed_body,
    tag_of,
)

_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{1,16})/([0-9a-f]{2})/(\3(?:[0-9a-f]{2}){0,63})")
_FLAGS = (NoSeal.flag, MacSeal.flag, GcmSeal.flag)


class Verdict(StrEnum):
    """Result of looking at one object without knowing the fingerprint of its namespace."""

    OK = "ok"
    """The object is what its name says, and authentic if it has a tag."""
    NO_KEY = "no_key"
    """The object is undamaged, and was not authenticated: that needs a secret key."""
    OTHER_KEY = "other_key"
    """The object is undamaged, and made with another secret key, or forged."""
    CORRUPT = "corrupt"
    """The object is damaged, or of another name, generation or length than it says."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Parts of the name of a block's object."""

    namespace: str
    generation: int
    key: BlockHash


def parse_name(name: str) -> ObjectName | None:
    """Return the parts of a name; None if it is not that of a block."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return ObjectName(found[1], int(found[2], 16), BlockHash(bytes.fromhex(found[4])))


def examine(name: ObjectName, buffer: PrivateBuffer, seal: Seal | None) -> Verdict:
    """Verify an object against its own header and its name.

    The digest of the namespace is that of the header, of which the name has the first half. An
    engine knows the whole digest.
    """
    header, payload = bytes(buffer.header), buffer.payload
    if len(header) != HEADER_BYTES:
        return Verdict.CORRUPT
    flag, digest, nonce = BODY.unpack_from(header)[2], header[24:56], nonce_of(header)
    body = packed_body(flag, payload.nbytes, name.generation, digest, name.key, nonce)
    tag = tag_of(header, body, payload)
    if tag is None or digest[:16].hex() != name.namespace or flag not in _FLAGS:
        return Verdict.CORRUPT
    used = NoSeal() if flag == NoSeal.flag else seal
    if used is None or used.flag != flag:
        return Verdict.NO_KEY
    is_right = used.open(body, nonce, payload, tag) is not None
    if flag == NoSeal.flag:
        return Verdict.OK if is_right else Verdict.CORRUPT
    return Verdict.OK if is_right else Verdict.OTHER_KEY
