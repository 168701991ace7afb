"""What `kvcascade check` says of the server of a remote tier: one sentence, without credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cache_rig import call
from support.remote_servers import HOST, S3Server, ServerProcess, free_port, redis_command

from kvcascade.config.options import At
from kvcascade.config.remote import RemoteTierOptions, parse_remote
from kvcascade.tiers.remote.remote_probe import probe_remote
from kvcascade.tools.commands.check.transfer_config import EXTRA

SECRET = "hunter2-in-test"
AWS = {"AWS_ACCESS_KEY_ID": "key-in-test", "AWS_SECRET_ACCESS_KEY": SECRET}


def options(**given: object) -> RemoteTierOptions:
    return parse_remote(At("tiers[1]"), {"deadline_s": 5.0, **given})


def test_a_server_that_takes_objects_is_right(redis: ServerProcess) -> None:
    assert probe_remote(options(url=f"redis://{HOST}:{redis.port}"), {}) is None
    assert redis_command(redis.port, "DBSIZE") == b":0\r\n", "nothing is left there"


def test_a_folder_is_right(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    assert probe_remote(options(url=f"file://{tmp_path}/kv"), {}) is None


def test_a_server_that_is_down_is_said_to_be() -> None:
    found = probe_remote(options(url=f"redis://{HOST}:{free_port()}"), {})
    assert found is not None and found.startswith("tiers[1].url: the server cannot be reached")


def test_a_wrong_password_is_not_shown(redis: ServerProcess) -> None:
    given = options(url=f"redis://{HOST}:{redis.port}", username="u", password_env="WORD")
    found = probe_remote(given, {"WORD": SECRET})
    assert found is not None and "refuses the credentials" in found and SECRET not in found


def test_a_user_who_may_only_read_is_told_to_switch_writes_off(redis: ServerProcess) -> None:
    redis_command(redis.port, "ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read")
    try:
        given = {"url": f"redis://{HOST}:{redis.port}", "username": "reader"}
        env = {"WORD": SECRET}
        found = probe_remote(options(**given, password_env="WORD"), env)
        assert found is not None and 'set writes to "off"' in found and SECRET not in found
        assert probe_remote(options(**given, password_env="WORD", writes="off"), env) is None
    finally:
        redis_command(redis.port, "ACL", "DELUSER", "reader")


def test_a_bucket_that_is_not_there(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    given = {"endpoint": s3.endpoint, "region": "us-east-1"}
    s3.make_bucket("probed")
    assert probe_remote(options(url="s3://probed/kv", **given), AWS) is None
    found = probe_remote(options(url="s3://nowhere-in-test/kv", **given), AWS)
    assert found is not None and "create the bucket" in found and SECRET not in found


@pytest.mark.parametrize("is_up", [True, False])
def test_check_asks_the_server(tmp_path: Path, redis: ServerProcess, is_up: bool) -> None:
    port = redis.port if is_up else free_port()
    remote = {"type": "remote", "url": f"redis://{HOST}:{port}"}
    extra = {
        "spec_name": "CascadeOffloadingSpec",
        "tiers": [{"type": "cpu", "capacity": "64MiB"}, remote],
    }
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", EXTRA: extra}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    answer = call("check", path, "--json")
    report = answer.document
    assert answer.code == 0 and report["problem"] is None
    assert (report["tiers"][1]["tier"], report["tiers"][1]["where"]) == ("remote", remote["url"])
    assert report["write_mode"] == "through"
    assert any("cannot be reached" in doubt for doubt in report["doubts"]) is not is_up
