"""No command and no log shows a credential of a remote tier, whatever the server says of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import call
from support.remote_servers import (
    HOST,
    PATIENT,
    S3Server,
    ServerProcess,
    free_port,
    redis_command,
)

PASSWORD, KEY_ID, SECRET_KEY = "hunter2-in-test", "id-in-test", "secret-in-test"
MAC_KEY = "5ec2e7" * 10 + "0a1b"
SECRETS = (PASSWORD, KEY_ID, SECRET_KEY, MAC_KEY)
COMMANDS = (("check",), ("doctor",), ("remote", "ls"), ("remote", "verify"), ("remote", "gc"))
PLACES = ("wrong_password", "right_password", "no_rights", "nobody", "no_bucket", "bucket")


@pytest.fixture(params=PLACES)
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Options of a remote tier, with every secret that it may have."""
    for name, value in (("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)):
        monkeypatch.setenv(name, value)
    for name, value in (("word", PASSWORD), ("mac", MAC_KEY)):
        (tmp_path / name).write_text(value)
    common = {"type": "remote", "mac_key_file": str(tmp_path / "mac"), **PATIENT}
    if "bucket" in request.param:
        pytest.importorskip("obstore")
        server: S3Server = request.getfixturevalue("s3")
        if request.param == "bucket":
            server.make_bucket("secrets-in-test")
        url = "s3://secrets-in-test/kv" if request.param == "bucket" else "s3://none-in-test"
        return {**common, "url": url, "endpoint": server.endpoint, "region": "us-east-1"}
    redis: ServerProcess = request.getfixturevalue("redis")
    users = {"right_password": "~* +@all", "no_rights": "+ping"}
    if request.param in users:
        words = ("on", f">{PASSWORD}", *users[request.param].split())
        redis_command(redis.port, "ACL", "SETUSER", "u", "reset", *words)
        request.addfinalizer(lambda: redis_command(redis.port, "ACL", "DELUSER", "u"))
    port = free_port() if request.param == "nobody" else redis.port
    word = {"username": "u", "password_file": str(tmp_path / "word")}
    return {**common, **word, "url": f"redis://{HOST}:{port}"}


def test_no_command_shows_a_credential(
    tmp_path: Path,
    remote: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "kv.json"
    tiers = [{"type": "cpu", "capacity": "64MiB"}, remote]
    path.write_text(json.dumps({"spec_name": "CascadeOffloadingSpec", "tiers": tiers}))
    said: list[str] = []
    for command in COMMANDS:
        for words in ((), ("--json",)):
            answer = call(*command, path, *words)
            assert answer.out or answer.err
            said += (answer.out, answer.err)
    captured = capfd.readouterr()
    text = "".join([*said, caplog.text, captured.out, captured.err])
    assert [secret for secret in SECRETS if secret in text] == []
