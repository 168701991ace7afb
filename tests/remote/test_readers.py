"""Hosts with `"writes": "off"`: the right to read is enough, and nothing is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from contract.remote_contract import LIMIT_S
from support.keys import keys
from support.remote_rig import RemoteRig
from support.remote_servers import HOST, PATIENT, ServerProcess, redis_command

from kvcascade.config.options import At
from kvcascade.config.remote import WriteWhen, parse_remote
from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.remote_options import open_remote_engine
from kvcascade.tiers.remote.shared_generation import GENERATION_FRESH_S

OK, ABSENT = RemoteOutcome.OK, RemoteOutcome.ABSENT
OFF = WriteWhen.OFF
FORGOTTEN_S = GENERATION_FRESH_S + 1.0
"""Time after which neither absence nor generation is remembered."""


def test_no_counter_is_begun_and_the_blocks_of_others_are_found() -> None:
    reader = RemoteRig(when=OFF)
    assert reader.look(keys(2)) == [ABSENT] * 2
    assert not reader.twin.counters and not reader.twin.calls["advance"]
    writer = reader.host()
    assert writer.write(keys(2)) == [OK] * 2
    reader.clock.advance(FORGOTTEN_S)
    assert reader.look(keys(2)) == reader.read(keys(2)) == [OK] * 2


def test_a_reset_reaches_a_host_that_began_before_there_was_anything() -> None:
    reader = RemoteRig(when=OFF)
    assert reader.look(keys(1)) == [ABSENT]
    writer = reader.host()
    writer.write(keys(1))
    reader.clock.advance(FORGOTTEN_S)
    assert reader.look(keys(1)) == [OK]
    writer.store.reset()
    assert writer.look(keys(1)) == [ABSENT]
    reader.clock.advance(FORGOTTEN_S)
    assert reader.read(keys(1)) == [ABSENT]


def test_counters_that_the_server_lost_are_left_to_those_who_write() -> None:
    reader = RemoteRig(when=OFF)
    writer = reader.host()
    writer.write(keys(1))
    assert reader.look(keys(1)) == [OK]
    reader.twin.counters.clear()
    for _ in range(3):
        reader.clock.advance(FORGOTTEN_S)
        assert reader.read(keys(1)) == [ABSENT]
    assert not reader.twin.counters and not reader.twin.calls["advance"]
    assert not sum(reader.store.state().openings.values())
    assert writer.write(keys(2)) == [OK] * 2
    reader.clock.advance(FORGOTTEN_S)
    assert reader.read(keys(2)) == [OK] * 2


def test_the_right_to_read_is_enough_before_anything_is_stored(redis: ServerProcess) -> None:
    redis_command(redis.port, "ACL", "SETUSER", "reader", "reset", "on", ">word", "~*", "+@read")
    url = f"redis://{HOST}:{redis.port}"
    given = {"url": url, "username": "reader", "password_env": "WORD", "writes": "off"}
    options = parse_remote(At("tiers[1]"), {**PATIENT, **given})
    engine, _ = open_remote_engine(options, {"WORD": "word"})
    try:
        rig = RemoteRig(engine, when=OFF, deadline_s=LIMIT_S)
        assert rig.look(keys(2)) == [ABSENT] * 2
        assert not sum(rig.store.state().openings.values())
    finally:
        engine.close()
        redis_command(redis.port, "ACL", "DELUSER", "reader")


@pytest.mark.parametrize("writes", ["off", "through"])
def test_only_who_writes_renews_a_counter(tmp_path: Path, writes: str) -> None:
    pytest.importorskip("obstore")
    given = {"url": tmp_path.as_uri(), "writes": writes}
    engine, _ = open_remote_engine(parse_remote(At("tiers[1]"), given), {})
    try:
        assert engine.counter("space/generation", 1000, LIMIT_S).value == 1000
        begin = tmp_path / "space/generation/begin"
        os.utime(begin, (0, 0))
        assert engine.counter("space/generation", None, LIMIT_S).value == 1000
        is_new = begin.stat().st_mtime > time.time() / 2
        assert is_new is (writes == "through")
    finally:
        engine.close()
