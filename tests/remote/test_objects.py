"""An object counts only if it is exactly the one that was asked for."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.keys import key

from kvcascade.errors import ConfigError
from kvcascade.tiers.remote.base import HEADER_BYTES, PrivateBuffer, RemoteObject
from kvcascade.tiers.remote.objects import (
    GcmSeal,
    MacSeal,
    NoSeal,
    ObjectFormat,
    Seal,
)
from kvcascade.tools.commands.remote.examine_object import Verdict, examine, parse_name

PAYLOAD_BYTES = 4096
SECRET, OTHER_SECRET = b"\1" * 32, b"\2" * 32
PAYLOAD = memoryview(bytes(range(256)) * (PAYLOAD_BYTES // 256))
SEALS = [NoSeal(), MacSeal(SECRET), GcmSeal(SECRET)]


def fmt(seal: Seal | None = None, fingerprint: str = "model-1") -> ObjectFormat:
    return ObjectFormat(fingerprint, PAYLOAD_BYTES, seal)


def arrived(header: bytes, payload: bytes | memoryview) -> PrivateBuffer:
    buffer = PrivateBuffer(len(payload))
    to_header, to_payload = buffer.allocate()
    to_header[:], to_payload[:] = header, payload
    return buffer


def of(made: RemoteObject) -> PrivateBuffer:
    return arrived(made.header, made.payload)


@pytest.fixture(params=SEALS, ids=lambda seal: type(seal).__name__)
def seal(request: pytest.FixtureRequest) -> Seal:
    found: Seal = request.param
    return found


def test_what_was_made_is_verified(seal: Seal) -> None:
    made = fmt(seal).make(key(1), 7, PAYLOAD)
    assert len(made.header) == HEADER_BYTES and made.payload.nbytes == PAYLOAD_BYTES
    assert fmt(seal).verified(key(1), 7, of(made)) == PAYLOAD


def test_an_object_in_memory_of_the_engine_is_verified_too(seal: Seal) -> None:
    made = fmt(seal).make(key(1), 7, PAYLOAD)
    buffer = PrivateBuffer(PAYLOAD_BYTES)
    assert not buffer.adopt(memoryview(made.header + bytes(made.payload) + b"x"))
    assert buffer.adopt(memoryview(made.header + bytes(made.payload)))
    assert fmt(seal).verified(key(1), 7, buffer) == PAYLOAD


@given(st.sampled_from(SEALS), st.integers(0, (HEADER_BYTES + PAYLOAD_BYTES) * 8 - 1))
def test_one_flipped_bit_anywhere_is_found(seal: Seal, bit: int) -> None:
    made = fmt(seal).make(key(1), 7, PAYLOAD)
    data = bytearray(made.header + bytes(made.payload))
    data[bit // 8] ^= 1 << bit % 8
    buffer = arrived(bytes(data[:HEADER_BYTES]), bytes(data[HEADER_BYTES:]))
    assert fmt(seal).verified(key(1), 7, buffer) is None


@given(st.sampled_from(SEALS), st.integers(0, (HEADER_BYTES + PAYLOAD_BYTES) * 8 - 1))
def test_a_tool_without_the_fingerprint_finds_it_too(seal: Seal, bit: int) -> None:
    made = fmt(seal).make(key(1), 7, PAYLOAD)
    name = parse_name(fmt(seal).name(key(1), 7))
    assert name is not None and (name.generation, name.key) == (7, key(1))
    assert examine(name, of(made), seal) is Verdict.OK
    assert examine(replace(name, generation=8), of(made), seal) is Verdict.CORRUPT
    assert examine(replace(name, key=key(2)), of(made), seal) is Verdict.CORRUPT
    assert examine(replace(name, namespace="0" * 32), of(made), seal) is Verdict.CORRUPT
    data = bytearray(made.header + bytes(made.payload))
    data[bit // 8] ^= 1 << bit % 8
    buffer = arrived(bytes(data[:HEADER_BYTES]), bytes(data[HEADER_BYTES:]))
    found = examine(name, buffer, seal)
    assert found is (Verdict.OTHER_KEY if seal.flag and 149 <= bit // 8 < 181 else Verdict.CORRUPT)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "kvcascade-check/0123456789abcdef",
        f"{'0' * 32}/generation/begin",
        f"{'0' * 32}/1/00/01",
        f"{'0' * 31}/1/00/00",
        f"{'0' * 32}/1/00/00/00",
        f"{'0' * 32}/1/00/000",
        f"{'0' * 32}/g/00/00",
        f"{'0' * 32}/{'1' * 17}/00/00",
        f"{'0' * 32}/1/00/{'00' * 65}",
    ],
)
def test_names_of_no_block(name: str) -> None:
    assert parse_name(name) is None


def test_another_key_generation_or_fingerprint_is_refused(seal: Seal) -> None:
    buffer = of(fmt(seal).make(key(1), 7, PAYLOAD))
    assert fmt(seal).verified(key(2), 7, buffer) is None
    assert fmt(seal).verified(key(1), 6, buffer) is None
    assert fmt(seal, "model-2").verified(key(1), 7, buffer) is None
    assert fmt(seal).verified(key(1), 7, buffer) == PAYLOAD


def test_header_and_payload_of_two_objects_do_not_fit(seal: Seal) -> None:
    one = fmt(seal).make(key(1), 7, PAYLOAD)
    two = fmt(seal).make(key(1), 7, memoryview(bytes(PAYLOAD_BYTES)))
    assert fmt(seal).verified(key(1), 7, arrived(one.header, two.payload)) is None
    assert fmt(seal).verified(key(1), 7, arrived(two.header, one.payload)) is None


@pytest.mark.parametrize("kind", [MacSeal, GcmSeal])
def test_who_lacks_the_secret_key_can_forge_nothing(kind: type[MacSeal] | type[GcmSeal]) -> None:
    ours = fmt(kind(SECRET))
    theirs = fmt(kind(OTHER_SECRET))
    theirs._digest = ours._digest  # an attacker may write any header
    forged = theirs.make(key(1), 7, PAYLOAD)
    assert ours.verified(key(1), 7, of(forged)) is None
    unsealed = fmt()
    unsealed._digest = ours._digest
    assert ours.verified(key(1), 7, of(unsealed.make(key(1), 7, PAYLOAD))) is None


def test_encrypted_payloads_show_nothing_and_never_repeat() -> None:
    formats = fmt(GcmSeal(SECRET))
    one, two = (formats.make(key(1), 7, PAYLOAD) for _ in range(2))
    assert one.payload != two.payload
    assert PAYLOAD[:16].tobytes() not in bytes(one.payload)


def test_namespaces_differ_by_fingerprint_size_and_secret_key() -> None:
    formats = [
        fmt(),
        fmt(fingerprint="model-2"),
        ObjectFormat("model-1", 2 * PAYLOAD_BYTES),
        *(fmt(kind(secret)) for kind in (MacSeal, GcmSeal) for secret in (SECRET, OTHER_SECRET)),
    ]
    assert len({made.namespace for made in formats}) == len(formats)
    assert len({made.name(key(1), 1) for made in formats}) == len(formats)
    assert formats[0].name(key(1), 1) != formats[0].name(key(1), 2) != formats[0].name(key(2), 2)
    for made in formats:
        assert SECRET.hex() not in made.name(key(1), 1) and made.name(key(1), 1).isascii()


def test_a_secret_key_has_32_bytes() -> None:
    for kind in (MacSeal, GcmSeal):
        with pytest.raises(ConfigError) as caught:
            kind(b"topsecret")
        assert "topsecret" not in str(caught.value)


def test_random_headers_are_refused(seal: Seal) -> None:
    for _ in range(200):
        buffer = arrived(os.urandom(HEADER_BYTES), os.urandom(PAYLOAD_BYTES))
        assert fmt(seal).verified(key(1), 7, buffer) is None


def test_every_byte_of_a_header_is_as_the_format_says() -> None:
    generation, secret_key = 77, os.urandom(32)
    for seal in (None, MacSeal(secret_key)):
        made = fmt(seal).make(key(5), generation, PAYLOAD)
        header = made.header
        label = b"" if seal is None else _hmac(secret_key, b"kvcascade remote mac")
        named = b"kvcascade remote\0model-1\0" + PAYLOAD_BYTES.to_bytes(8, "little") + label
        digest = hashlib.sha256(named).digest()
        assert header[:8] == b"KVCR" + struct.pack("<HH", 1, 0 if seal is None else 1)
        assert struct.unpack("<QQ", header[8:24]) == (PAYLOAD_BYTES, generation)
        assert header[24:56] == digest
        assert header[56:121] == bytes([len(key(5))]) + key(5).ljust(64, b"\0")
        assert header[121:133] == bytes(12)
        checksum = xxhash.xxh3_128(PAYLOAD, seed=xxhash.xxh3_64_intdigest(header[:133])).digest()
        assert header[133:149] == checksum
        tag = bytes(32) if seal is None else _hmac(secret_key, header[:133] + bytes(PAYLOAD))
        assert header[149:181] == tag and header[181:] == bytes(11)
        name = f"{digest[:16].hex()}/{generation:x}/{key(5)[:1].hex()}/{key(5).hex()}"
        assert fmt(seal).name(key(5), generation) == name


def _hmac(secret_key: bytes, data: bytes) -> bytes:
    return hmac.new(secret_key, data, hashlib.sha256).digest()
