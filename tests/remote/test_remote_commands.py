"""`kvcascade remote ls`, `verify` and `gc`: against real servers, and a twin that fails."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from contract.remote_contract import LIMIT_S, an_object
from hypothesis import given
from hypothesis import strategies as st
from support.cache_rig import Answer, call
from support.children import left_by_a_killed_writer
from support.clock import ManualClock
from support.keys import key
from support.remote_rig import PAYLOAD_BYTES, content
from support.remote_servers import (
    HOST,
    PATIENT,
    PATIENT_WORDS,
    S3Server,
    ServerProcess,
    free_port,
    redis_command,
)
from support.remote_twin import RemoteTwin

from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.tiers.remote.base import FAILURES, RemoteEngine, RemoteObject, RemoteOutcome
from kvcascade.tiers.remote.objects import GcmSeal, MacSeal, ObjectFormat, Seal
from kvcascade.tiers.remote.remote_options import open_remote_engine
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.remote import open_remote
from kvcascade.tools.commands.remote.collect_remote import (
    AGE_STEP_S,
    STAGED_MAX_S,
    RemoteWish,
    collect_remote,
)
from kvcascade.tools.commands.remote.open_remote import FAILED_CALLS_MAX, RemoteServer
from kvcascade.tools.commands.remote.verify_remote import verify_remote

OK = RemoteOutcome.OK
SECRET = "hunter2-in-test"
SIZE = PAYLOAD_BYTES + 192
TWIN_URL = "s3://bucket/twin"
COUNTER = 2000
OLD, NOW = 2 * 1000, 2 * COUNTER
"""Generations."""
NAMESPACE = "0123456789abcdef" * 2
USUAL_WAYS = ("lifecycle", "allkeys-lru", "run this command regularly")
"""Words of the note of each kind of server."""


@dataclass
class Place:
    """A remote tier with blocks in it."""

    engine: RemoteEngine
    words: list[str] = field(default_factory=list)
    """Arguments that name it."""

    def fill(
        self, n: int, generation: int = NOW, fingerprint: str = "model-1", seal: Seal | None = None
    ) -> list[str]:
        """Store blocks of a namespace; returns their names."""
        made = ObjectFormat(fingerprint, PAYLOAD_BYTES, seal)
        names = [made.name(key(i), generation) for i in range(n)]
        objects = [made.make(key(i), generation, memoryview(content(key(i)))) for i in range(n)]
        assert self.engine.put(names, objects, LIMIT_S) == [OK] * n
        assert self.engine.counter(made.counter_name, COUNTER, LIMIT_S).value == COUNTER
        return names

    def replace(self, name: str, change: Callable[[bytearray], object]) -> None:
        """Change the bytes of an object."""
        made = _read(self.engine, name)
        change(made)
        self.engine.remove([name], LIMIT_S)
        written = RemoteObject(bytes(made[:192]), memoryview(bytes(made[192:])))
        assert self.engine.put([name], [written], LIMIT_S) == [OK]

    def held(self, names: list[str]) -> list[bool]:
        """Whether each object is there."""
        return [found is OK for found in self.engine.exist_many(names, LIMIT_S)]

    def call(self, command: str, *words: object) -> Answer:
        """Run a command on it."""
        return call("remote", command, *self.words, *words)


def _read(engine: RemoteEngine, name: str) -> bytearray:
    from kvcascade.tiers.remote.base import PrivateBuffer

    buffer = PrivateBuffer(PAYLOAD_BYTES)
    assert engine.get_into([name], [buffer], LIMIT_S) == [OK]
    return bytearray(bytes(buffer.header) + bytes(buffer.payload))


SIZES_DIFFER = 0.01
"""Keys in a Valkey server take almost equal sizes."""


def place_at(url: str, **options: object) -> Place:
    """A place at a URL; commands get the same options."""
    given = {"url": url, **PATIENT, **options}
    engine, _ = open_remote_engine(parse_remote(At("t"), given), os.environ)
    words = [word for name in options for word in ("--set", f"{name}={options[name]}")]
    return Place(engine, [url, *PATIENT_WORDS, *words])


@pytest.fixture(params=["folder", "s3", "redis", "valkey", "twin"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with ExitStack() as stack:
        yield _place(request, tmp_path, monkeypatch, stack)


def _place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stack: ExitStack,
) -> Place:
    options: dict[str, object] = {}
    if request.param == "twin":
        return of_twin(RemoteTwin(), monkeypatch)
    if request.param in ("redis", "valkey"):
        url = f"{request.param}://{HOST}:{request.getfixturevalue(request.param).port}"
    elif request.param == "folder":
        pytest.importorskip("obstore")
        (tmp_path / "kv").mkdir()
        url = (tmp_path / "kv").as_uri()
    else:
        pytest.importorskip("obstore")
        server: S3Server = request.getfixturevalue("s3")
        server.make_bucket(bucket := uuid.uuid4().hex)
        url = f"s3://{bucket}/kv"
        options = {"endpoint": server.endpoint, "region": "us-east-1"}
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, SECRET)
    place = place_at(url, **options)
    stack.callback(place.engine.close)
    return place


def of_twin(twin: RemoteTwin, monkeypatch: pytest.MonkeyPatch, seal: Seal | None = None) -> Place:
    """A place in memory, which the commands open by a URL."""
    monkeypatch.setattr(open_remote, "open_remote_engine", lambda options, env: (twin, seal))
    monkeypatch.setattr(open_remote, "missing_extra", lambda options: None)
    return Place(twin, [TWIN_URL])


# -- ls ------------------------------------------------------------------------------------------


def test_ls_counts_namespaces_and_generations(place: Place) -> None:
    old, new, other = place.fill(3, OLD), place.fill(5), place.fill(2, fingerprint="model-2")
    place.fill(1, NOW + 1, fingerprint="model-2")
    place.engine.put(["of/somebody/else"], [an_object(1, 100)], LIMIT_S)
    found = place.call("ls", "--json").document
    assert found["schema"] == "kvcascade.remote-ls" and found["url"] == place.words[0]
    rows = {(r["namespace"], r["generation"]): r for r in found["generations"]}
    ours, theirs = old[0].partition("/")[0], other[0].partition("/")[0]
    states = {place: (row["state"], row["blocks"]) for place, row in rows.items()}
    assert states == {
        (ours, OLD): ("old", 3),
        (ours, NOW): ("current", 5),
        (theirs, NOW): ("current", 2),
        (theirs, NOW + 1): ("current", 1),
    }
    assert [place for place, row in rows.items() if row["was_reset"]] == [(theirs, NOW + 1)]
    row = rows[ours, NOW]
    assert len(new) * SIZE <= row["size_bytes"] < len(new) * SIZE * 1.5, "memory, on a server"
    assert 0.0 <= row["newest_age_s"] <= row["oldest_age_s"] < 60.0
    assert found["other_objects"] >= 1
    shown = place.call("ls").out
    assert ours[:12] in shown and "11 blocks" in shown and "1970-01-01" in shown
    for digits in (theirs, theirs[:9]):
        found = place.call("ls", "-n", digits, "--json").document
        assert [row["blocks"] for row in found["generations"]] == [2, 1]


def test_a_place_without_blocks(place: Place) -> None:
    assert place.call("ls").out == "no blocks there\n"
    assert place.call("verify").code == place.call("gc").code == ExitCode.OK


def test_a_lost_counter_makes_no_block_old(place: Place) -> None:
    made = ObjectFormat("model-1", PAYLOAD_BYTES)
    names = [made.name(key(i), OLD) for i in range(2)]
    place.engine.put(names, [an_object(i) for i in range(2)], LIMIT_S)
    (row,) = place.call("ls", "--json").document["generations"]
    assert row["state"] == "unknown"
    assert place.call("gc", "--json").document["namespaces"][0]["blocks_removed"] == 0
    assert place.held(names) == [True, True]


# -- verify --------------------------------------------------------------------------------------


def flip(at: int) -> Callable[[bytearray], object]:
    """A change of one bit."""

    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


DAMAGE: dict[str, Callable[[bytearray], object]] = {
    "magic": flip(0),
    "version": flip(4),
    "flags": flip(6),
    "namespace": flip(50),
    "key": flip(60),
    "checksum": flip(140),
    "tag": flip(170),
    "padding": flip(190),
    "payload": flip(500),
    "last byte": flip(SIZE - 1),
    "short": lambda data: data.pop(),
    "long": lambda data: data.append(0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_removed_if_wanted(place: Place, damage: str) -> None:
    names = place.fill(4)
    assert place.call("verify").code == ExitCode.OK
    place.replace(names[2], DAMAGE[damage])
    answer = place.call("verify", "--json")
    found = answer.document
    assert answer.code == ExitCode.PROBLEMS and not found["is_clean"]
    assert found["damaged"] == [names[2]] and found["removed"] == 0
    assert found["outcomes"] == {"ok": 3, "corrupt": 1} and found["listed"] == found["read"] == 4
    assert place.held(names) == [True] * 4, "nothing is removed without being asked to"
    answer = place.call("verify", "--remove")
    assert answer.code == ExitCode.PROBLEMS and f"damaged: {names[2]}" in answer.out
    assert place.held(names) == [True, True, False, True]
    assert "no problems found" in place.call("verify").out


def test_an_object_under_another_name_is_damaged(place: Place) -> None:
    names = place.fill(2)
    header_and_payload = _read(place.engine, names[0])

    def swap(data: bytearray) -> None:
        data[:] = header_and_payload

    place.replace(names[1], swap)
    assert place.call("verify", "--json").document["damaged"] == [names[1]]


def test_objects_that_are_too_short_to_be_any(place: Place) -> None:
    made = ObjectFormat("model-1", PAYLOAD_BYTES)
    name = made.name(key(1), NOW)
    place.engine.put([name], [RemoteObject(bytes(192), memoryview(b""))], LIMIT_S)
    assert place.call("verify", "--json").document["damaged"] == [name]


def test_what_is_larger_than_any_block_is_damaged_and_not_read(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with open_remote.opened(tmp_path.as_uri(), None) as tier:
        place = Place(tier.engine, [tmp_path.as_uri()])
        names = place.fill(2)
        os.truncate(tmp_path / names[0], 1 << 40)
        taken: list[int] = []
        found = verify_remote(tier, "", taken.append, sample=None, may_remove=False)
        assert found.damaged == names[:1] and found.bytes_read == sum(taken) == SIZE
        assert place.call("verify", "--remove").code == ExitCode.PROBLEMS
        assert place.held(names) == [False, True]


def test_a_sample(place: Place) -> None:
    names = place.fill(20)
    place.replace(names[7], flip(300))
    for n in (1, 20, 100):
        found = place.call("verify", "--sample", n, "--json").document
        assert found["listed"] == 20 and found["read"] == min(n, 20)
        assert sum(found["outcomes"].values()) == min(n, 20)
    assert found["outcomes"]["corrupt"] == 1


@pytest.mark.parametrize("kind", [MacSeal, GcmSeal])
def test_secret_keys(
    kind: Callable[[bytes], Seal], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    pytest.importorskip("obstore")
    option = "mac_key_file" if kind is MacSeal else "encryption_key_file"
    place = place_at((tmp_path / "kv").as_uri())
    names = place.fill(3, seal=kind(b"\1" * 32))
    place.replace(names[0], flip(700))
    for secret, wanted in ((b"\1", "ok"), (b"\2", "other_key")):
        path = tmp_path / "key"
        path.write_text((secret * 32).hex())
        found = place.call("verify", "--set", f"{option}={path}", "--json").document
        assert found["outcomes"] == {wanted: 2, "corrupt": 1}
        assert (secret * 32).hex() not in json.dumps(found)
    assert place.call("verify", "--json").document["outcomes"] == {"no_key": 2, "corrupt": 1}
    place.call("verify", "--set", f"{option}={path}", "--remove")
    assert place.held(names) == [False, True, True], "a block of another key stays"
    place.engine.close()


# -- gc ------------------------------------------------------------------------------------------


def test_blocks_of_old_generations_leave(place: Place) -> None:
    old, new, other = place.fill(3, OLD), place.fill(2), place.fill(1, fingerprint="model-2")
    would = place.call("gc", "--dry-run", "--json").document
    assert all(place.held(old + new + other))
    did = place.call("gc", "--json").document
    assert would == did | {"is_dry_run": True}
    assert place.held(old) == [False] * 3 and all(place.held(new + other))
    by_name = {row["namespace"]: row for row in did["namespaces"]}
    ours = by_name[old[0].partition("/")[0]]
    assert ours == {
        "namespace": ours["namespace"],
        "blocks_before": 5,
        "bytes_before": ours["bytes_before"],
        "blocks_removed": 3,
        "old_blocks_removed": 3,
        "bytes_freed": pytest.approx(ours["bytes_before"] * 3 / 5, rel=SIZES_DIFFER),
    }
    assert ours["bytes_before"] >= 5 * SIZE
    made = ObjectFormat("model-1", PAYLOAD_BYTES)
    assert place.engine.counter(made.counter_name, None, LIMIT_S).value == COUNTER, "counters stay"
    assert place.call("gc", "--json").document["failed"] == 0


def test_a_size_and_an_age(place: Place) -> None:
    names = place.fill(10)
    all_bytes = place.call("ls", "--json").document["generations"][0]["size_bytes"]
    did = place.call("gc", "--older-than", "1h", "--max-size", all_bytes, "--json").document
    assert did["namespaces"][0]["blocks_removed"] == 0, "they fit, and are young"
    did = place.call("gc", "--max-size", all_bytes * 9 // 20, "--json").document
    assert did["namespaces"][0]["blocks_removed"] == 6 and sum(place.held(names)) == 4
    shown = place.call("gc", "--older-than", "0s", "--dry-run").out
    assert "Would be removed" in shown and any(word in shown for word in USUAL_WAYS)
    place.call("gc", "--older-than", "0s")
    assert not any(place.held(names))


def test_the_oldest_files_leave_first(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    place = place_at((tmp_path / "kv").as_uri())
    names = place.fill(6)
    now_s = time.time()
    for i, name in enumerate(names):
        os.utime(tmp_path / "kv" / name, (0, now_s - 86_400 * (i + 1)))
    place.call("gc", "--older-than", "5d")
    assert place.held(names) == [True] * 4 + [False] * 2
    place.call("gc", "--max-size", 2 * SIZE)
    assert place.held(names) == [True] * 2 + [False] * 4
    (row,) = place.call("ls", "--json").document["generations"]
    assert row["newest_age_s"] == pytest.approx(86_400, abs=60)
    assert row["oldest_age_s"] == pytest.approx(2 * 86_400, abs=60)
    place.engine.close()


def test_commands_are_no_use_of_the_blocks_of_a_valkey_server(redis: ServerProcess) -> None:
    """The server evicts what was not used for long, and must not take a list for a use."""
    place = place_at(f"redis://{HOST}:{redis.port}")
    names = place.fill(3)
    for days, name in enumerate(names, start=1):
        for value in (f"{{{name}}}", f"{{{name}}}:h"):
            dumped = redis_command(redis.port, "DUMP", value).partition(b"\r\n")[2][:-2]
            idle = ("REPLACE", "IDLETIME", str(days * 86_400))
            redis_command(redis.port, "RESTORE", value, "0", dumped.decode("latin-1"), *idle)
    for _ in range(2):
        (row,) = place.call("ls", "--json").document["generations"]
        assert row["newest_age_s"] == pytest.approx(86_400, abs=60)
        assert row["oldest_age_s"] == pytest.approx(3 * 86_400, abs=60)
        place.call("gc", "--older-than", "36h", "--max-size", "1kB", "--dry-run")
    place.call("gc", "--older-than", "60h")
    assert place.held(names) == [True, True, False]
    block_bytes = place.call("ls", "--json").document["generations"][0]["size_bytes"] // 2
    place.call("gc", "--max-size", block_bytes)
    assert place.held(names) == [True, False, False]
    place.engine.close()


def test_valkey_counts_uses(redis: ServerProcess) -> None:
    place = place_at(f"redis://{HOST}:{redis.port}")
    place.fill(2)
    redis_command(redis.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    try:
        found = place.call("gc", "--older-than", "0s", "--max-size", 1, "--json").document
        shown = " ".join(place.call("gc", "--older-than", "0s").out.split())
        (row,) = place.call("ls", "--json").document["generations"]
    finally:
        redis_command(redis.port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert found["unknown_ages"] == 2 and found["namespaces"][0]["blocks_removed"] == 0
    assert "knows no age of 2 blocks" in shown and row["oldest_age_s"] is None
    place.engine.close()


Drawn = tuple[int, int | None]
"""Generation and age in minutes."""


@given(
    st.lists(st.tuples(st.sampled_from([OLD, NOW]), st.none() | st.integers(0, 9)), max_size=30),
    st.none() | st.integers(0, 10),
    st.none() | st.integers(0, 30),
)
def test_what_leaves_is_old_and_no_more_than_needed(
    blocks: list[Drawn], older_than_min: int | None, max_blocks: int | None
) -> None:
    twin, made = RemoteTwin(), ObjectFormat("model-1", PAYLOAD_BYTES)
    now_s = time.time() // AGE_STEP_S * AGE_STEP_S  # a block of age n is n and a half steps old
    clock = ManualClock(now_s)
    twin.counters[made.counter_name] = COUNTER
    ages: dict[str, Drawn] = {}
    for number, (generation, age) in enumerate(blocks):
        name = made.name(key(number), generation)
        twin.held[name], ages[name] = bytes(SIZE), (generation, age)
        middle_s = now_s - AGE_STEP_S / 2
        twin.touched_s[name] = None if age is None else middle_s - age * AGE_STEP_S
    tier = RemoteServer(parse_remote(At("t"), {"url": "s3://b"}), twin, None)
    wish = RemoteWish(
        None if older_than_min is None else older_than_min * AGE_STEP_S,
        None if max_blocks is None else max_blocks * SIZE,
    )
    would = collect_remote(tier, "", wish, lambda count: None, is_dry_run=True, clock=clock)
    assert len(twin.held) == len(blocks)
    did = collect_remote(tier, "", wish, lambda count: None, is_dry_run=False, clock=clock)
    gone = [ages[name] for name in ages if name not in twin.held]
    left = [ages[name] for name in twin.held]
    assert did.namespaces == would.namespaces and did.failed == 0
    assert sum(row.blocks_removed for row in did.namespaces) == len(gone)
    assert all(generation == NOW for generation, _ in left)
    for_size = [age for generation, age in gone if generation == NOW]
    assert None not in for_size
    known_gone, known_left = (
        [a for a in for_size if a is not None],
        [a for _, a in left if a is not None],
    )
    if older_than_min is not None:
        assert all(age < older_than_min for age in known_left)
        known_gone = [age for age in known_gone if age < older_than_min]
    if known_gone:
        assert max_blocks is not None and min(known_gone) >= max(known_left, default=0)
        assert len(left) == max_blocks or not known_left
    elif max_blocks is not None:
        assert len(left) <= max_blocks or not known_left


def test_options_that_are_text_may_look_like_numbers() -> None:
    answer = call("remote", "ls", "valkey://127.0.0.1:1", "--set", "username=2024")
    assert answer.code == ExitCode.USAGE and "set password_env" in answer.err


def test_gc_removes_what_a_killed_writer_left_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    engine, _ = open_remote_engine(parse_remote(At("t"), {"url": tmp_path.as_uri()}), os.environ)
    space = tmp_path / NAMESPACE
    left = left_by_a_killed_writer(tmp_path, space / "1" / "00" / "0")
    young, strange = space / "generation#1", tmp_path / "of-others#1"
    for path in (young, strange):
        path.write_bytes(b"12345")
    for path in (left, strange):
        os.utime(path, (old_s := time.time() - 2 * STAGED_MAX_S, old_s))
    assert engine.sweep("f" * 32, 0, lambda generation: True, is_dry_run=False) == []
    for words, is_there in ((["--dry-run"], True), ([], False)):
        found = call("remote", "gc", tmp_path.as_uri(), "--json", *words).document
        assert found["staged_removed"] == 1 and left.exists() == is_there
        assert "folder" in found["note"] and "bucket" not in found["note"]
    assert young.exists() and strange.exists()
    engine.close()


def test_gc_leaves_no_folders_of_old_generations(tmp_path: Path) -> None:
    """Each reset left one for every first byte of a key."""
    pytest.importorskip("obstore")
    place = place_at(tmp_path.as_uri())
    old, current = place.fill(20, OLD), place.fill(20, NOW)
    space = tmp_path / old[0].partition("/")[0]
    of_old, of_current, of_earlier_gc = (space / f"{number:x}" for number in (OLD, NOW, OLD + 1))
    staying = [of_current / "empty", of_current / "no", tmp_path / "others" / f"{OLD:x}" / "00"]
    staying += [space / f"{OLD + 2:x}" / "00"]
    for folder in (of_earlier_gc / "00", of_earlier_gc / "ff", *staying):
        folder.mkdir(parents=True)
    (staying[-1] / "0#1").touch()  # somebody writes it
    for path in current:
        place.engine.remove([path], LIMIT_S)
    call("remote", "gc", *place.words, "--dry-run", "-n", "f" * 32)
    call("remote", "gc", *place.words, "--dry-run")
    call("remote", "gc", *place.words, "-n", "f" * 32)
    assert of_earlier_gc.exists() and all((tmp_path / name).exists() for name in old)
    call("remote", "gc", *place.words)
    assert not of_old.exists() and not of_earlier_gc.exists()
    assert all(folder.exists() for folder in staying)
    assert all((tmp_path / name).parent.exists() for name in current)
    assert place.held(place.fill(20, OLD)) == [True] * 20, "a late writer makes them again"
    place.engine.close()


# -- what goes wrong -----------------------------------------------------------------------------


COMMANDS = ("ls", "verify", "gc")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_down(command: str) -> None:
    answer = call("remote", command, f"redis://{HOST}:{free_port()}")
    assert answer.code == ExitCode.CANNOT_OPEN and answer.out == ""
    assert answer.err.startswith("kvcascade: remote.url: the server cannot be reached")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_there(command: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    url = (tmp_path / "share" / "kv").as_uri()
    answer = call("remote", command, url, "--json")
    assert answer.code == ExitCode.CANNOT_OPEN and answer.document["error"] == "cannot_open"
    assert "share/kv' does not exist; mount the share" in answer.document["message"]
    assert not [*tmp_path.iterdir()], "nothing is created"
    (tmp_path / "share").touch()
    answer = call("remote", command, (tmp_path / "share").as_uri())
    assert answer.code == ExitCode.CANNOT_OPEN and "is a file, not a folder" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bucket_that_is_not_there(
    command: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    words = (
        "s3://nowhere-in-test",
        "--set",
        f"endpoint={s3.endpoint}",
        "--set",
        "region=us-east-1",
        *PATIENT_WORDS,
    )
    answer = call("remote", command, *words)
    assert answer.code == ExitCode.CANNOT_OPEN and "has no such bucket" in answer.err
    assert SECRET not in answer.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_password(
    command: str, redis: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORD", SECRET)
    url = f"redis://{HOST}:{redis.port}"
    words = ("--set", "password_env=WORD", *PATIENT_WORDS)
    answer = call("remote", command, url, *words, "--json")
    assert answer.code == ExitCode.CANNOT_OPEN and SECRET not in answer.out + answer.err
    assert answer.document["error"] == "cannot_open"
    assert "refuses the credentials" in answer.document["message"]


@pytest.mark.parametrize("outcome", sorted(FAILURES))
@pytest.mark.parametrize("command", COMMANDS)
def test_a_list_that_ends_early_is_an_error(
    command: str, outcome: RemoteOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = RemoteTwin()
    place = of_twin(twin, monkeypatch)
    names = place.fill(9, OLD)
    twin.fails["list_objects"] = outcome
    answer = place.call(command)
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1
    assert all(place.held(names)), "nothing is removed by half of a list"


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_a_generation_that_cannot_be_read_is_an_error(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = RemoteTwin()
    place = of_twin(twin, monkeypatch)
    names = place.fill(3, OLD)
    twin.fails["counter"] = RemoteOutcome.TIMED_OUT
    assert place.call(command).code == ExitCode.CANNOT_OPEN and all(place.held(names))


@pytest.mark.parametrize(
    ("command", "method"), [("verify", "get_into"), ("verify", "measure"), ("gc", "remove")]
)
def test_a_server_that_fails_all_the_time_is_given_up(
    command: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = RemoteTwin()
    place = of_twin(twin, monkeypatch)
    place.fill(2000, OLD)
    twin.fails[method] = RemoteOutcome.TIMED_OUT
    answer = place.call(command)
    assert answer.code == ExitCode.CANNOT_OPEN and "does not answer in time" in answer.err
    assert twin.calls[method] == FAILED_CALLS_MAX


def test_reads_and_removals_that_fail_now_and_then_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = RemoteTwin()
    place = of_twin(twin, monkeypatch)
    place.fill(2, OLD)
    twin.fails["get_into"] = RemoteOutcome.TIMED_OUT
    answer = place.call("verify", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.document["outcomes"] == {"timed_out": 2}
    twin.fails["remove"] = RemoteOutcome.DENIED
    answer = place.call("gc", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.document["failed"] == 2
    assert "2 blocks could not be removed" in place.call("gc").out


def test_an_object_that_leaves_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = RemoteTwin()
    place = of_twin(twin, monkeypatch)
    names = place.fill(2)

    def leave(method: str) -> None:
        if method == "get_into":
            twin.held.pop(names[0], None)

    twin.before = leave
    found = place.call("verify", "--json").document
    assert found["outcomes"] == {"ok": 1, "absent": 1} and found["is_clean"]


# -- how it is called ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://host/kv"], "remote.url: unknown scheme 'ftp'"),
        (["valkey://cache.example.org"], "has no TLS"),
        ([f"valkeys://u:{SECRET}@host"], "holds credentials"),
        ([f"u:{SECRET}@host"], "neither a URL nor a file"),
        (["redis://127.0.0.1", "--set", f"password={SECRET}"], "credentials are no options"),
        (["redis://127.0.0.1", "--set", "deadline_s"], "is not KEY=VALUE"),
        (["redis://127.0.0.1", "--set", "password_env=NOT_SET_IN_TEST"], "is not set"),
        (["s3://bucket", "--set", "ttl_s=5"], "does not apply"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_calls(command: str, words: list[str], said: str) -> None:
    answer = call("remote", command, *words)
    assert answer.code == ExitCode.USAGE and said in answer.err and answer.err.count("\n") == 1
    assert SECRET not in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ["verify", TWIN_URL, "--sample", "0"],
        ["verify", TWIN_URL, "--bwlimit", "fast"],
        ["gc", TWIN_URL, "--older-than", "soon"],
        ["gc", TWIN_URL, "--max-size", "much"],
    ],
)
def test_wrong_values(words: list[str]) -> None:
    assert call("remote", *words).code == ExitCode.USAGE


def test_a_missing_package_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_remote, "missing_extra", lambda options: "install it.")
    answer = call("remote", "ls", "s3://bucket")
    assert (answer.code, answer.err) == (ExitCode.MISSING, "kvcascade: install it.\n")


def test_a_configuration_names_the_tier(tmp_path: Path, redis: ServerProcess) -> None:
    url = f"redis://{HOST}:{redis.port}"
    path = tmp_path / "kv.json"
    cpu: dict[str, Any] = {"type": "cpu", "capacity": "64MiB"}
    tiers = [cpu, {"type": "remote", "url": url, **PATIENT}]
    extra = {"spec_name": "CascadeOffloadingSpec", "tiers": tiers}
    path.write_text(json.dumps(extra))
    assert call("remote", "ls", path, "--json").document["url"] == url
    answer = call("remote", "ls", path, "--set", "deadline_s=3")
    assert answer.code == ExitCode.USAGE and "write it into the file" in answer.err
    path.write_text(json.dumps(extra | {"tiers": [cpu]}))
    assert "has no remote tier" in call("remote", "ls", path).err
    path.write_text("{")
    assert "is not JSON" in call("remote", "ls", path).err
