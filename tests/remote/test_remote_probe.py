"""What `kvcascade check` says of the server of a remote tier: one sentence, without credentials."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from contract.remote_contract import LIMIT_S, an_object, names
from support.cache_rig import call
from support.certificates import loopback_certificate
from support.remote_servers import (
    HOST,
    PATIENT,
    PATIENT_WORDS,
    GuardedS3Server,
    S3Server,
    ServerProcess,
    answering_always,
    free_port,
    redis_command,
    redis_server,
)
from support.remote_twin import RemoteTwin
from support.small_disk import Filler, on_small_disk

from kvcascade.config.options import At
from kvcascade.config.remote import RemoteTierOptions, WriteWhen, parse_remote
from kvcascade.tiers.remote.base import FAILURES, Cause, RemoteObject, RemoteOutcome
from kvcascade.tiers.remote.remote_options import open_remote_engine
from kvcascade.tiers.remote.remote_probe import (
    FOLDER,
    FULL_BYTES,
    finding_of,
)
from kvcascade.tools.commands.check.config_check import probe_remote, problem_of
from kvcascade.tools.commands.check.transfer_config import EXTRA

SECRET = "hunter2-in-test"
OF_ENGINES = "+@read +@write"
"""Rights that docs/remote.md names."""
REMOTE_PAGE = Path(__file__).resolve().parents[2] / "docs" / "remote.md"
AWS = {"AWS_ACCESS_KEY_ID": "key-in-test", "AWS_SECRET_ACCESS_KEY": SECRET}


def options(**given: object) -> RemoteTierOptions:
    return parse_remote(At("tiers[1]"), {**PATIENT, **given})


@pytest.fixture
def evicting() -> Iterator[ServerProcess]:
    """A server that makes room by itself."""
    server = redis_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.kill()


def said_of(env: Mapping[str, str] | None = None, **given: object) -> str:
    """The sentence; no part of it is a credential."""
    found = probe_remote(options(**given), env or {})
    assert found is not None and found.startswith("tiers[1].url: the server ")
    assert found.endswith(".") and "\n" not in found
    assert not [word for word in (SECRET, *(env or {}).values()) if word in found]
    return found


def test_a_server_that_takes_objects_is_right(evicting: ServerProcess) -> None:
    assert probe_remote(options(url=f"redis://{HOST}:{evicting.port}"), {}) is None
    assert redis_command(evicting.port, "DBSIZE") == b":0\r\n", "nothing is left there"


def test_a_folder_is_right(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    for folder in (tmp_path / "not" / "there", tmp_path):
        assert probe_remote(options(url=folder.as_uri()), {}) is None
        assert not [*tmp_path.iterdir()], "nothing is left there"


def test_a_folder_that_others_use_stays(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / FOLDER).mkdir()
    assert probe_remote(options(url=tmp_path.as_uri()), {}) is None
    assert [*tmp_path.iterdir()] == [tmp_path / FOLDER]


def test_an_engine_keeps_its_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    given = options(url=(tmp_path / "kv").as_uri())
    engine, _ = open_remote_engine(given, {})
    engine.exist_many(["any"], LIMIT_S)
    assert problem_of(engine, given) is None
    engine.close()
    assert [*tmp_path.rglob("*")] == [tmp_path / "kv"]


def full_and_read_only(folder: Path) -> None:
    """On a file system of its own: see `on_small_disk`."""
    given = options(url=folder.as_uri())
    engine, _ = open_remote_engine(given, {})
    assert problem_of(engine, given) is None
    filler = Filler(folder, leave_bytes=64 << 10)
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.NO_SPACE]
    found = problem_of(engine, given)
    assert found is not None and "is full, " in found, "though the probe is stored"
    assert "; make room" in found
    filler.remove()
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.DENIED]
    found = problem_of(engine, given)
    assert found is not None and "allow writes" in found
    assert problem_of(engine, replace(given, writes=WriteWhen.OFF)) is None
    missing = replace(given, url=f"{given.url}/not/there")
    found = probe_remote(missing, {})
    assert found is not None and "create or read the folder" in found
    engine.close()


def test_a_full_folder_and_a_read_only_one_are_said_to_be(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    on_small_disk(full_and_read_only, tmp_path, 4 * FULL_BYTES)


def test_a_server_that_is_down_is_said_to_be() -> None:
    assert "cannot be reached" in said_of(url=f"redis://{HOST}:{free_port()}")


def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    files = loopback_certificate(tmp_path)
    server = redis_server(
        *("--tls-port", str(port := free_port())),
        *("--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key)),
        *("--tls-ca-cert-file", str(files.certificate), "--tls-auth-clients", "no"),
        port=port,
    )
    try:
        url = f"valkeys://{HOST}:{server.port}"
        assert 'set "ca_file"' in said_of(url=url)
        trusting = options(url=url, ca_file=str(files.certificate), writes="off")
        assert probe_remote(trusting, {}) is None
    finally:
        server.kill()


def test_a_server_that_asks_its_clients_for_a_certificate(tmp_path: Path) -> None:
    """As Redis does unless it is told not to; it may break off at either end of the handshake."""
    files = loopback_certificate(tmp_path)
    pair = {"client_cert_file": str(files.certificate), "client_key_file": str(files.key)}
    server = redis_server(
        *("--tls-port", str(port := free_port())),
        *("--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key)),
        *("--tls-ca-cert-file", str(files.certificate)),
        port=port,
    )
    try:
        url = f"valkeys://{HOST}:{server.port}"
        given = {"url": url, "ca_file": str(files.certificate), "writes": "off"}
        for env, word in ({}, {}), ({"WORD": SECRET}, {"password_env": "WORD"}):
            assert 'set "client_cert_file"' in said_of(env, **given, **word)
        assert probe_remote(options(**given, **pair), {}) is None
    finally:
        server.kill()


@pytest.mark.parametrize(
    "configured, ttl_s, is_told",
    [
        ((), None, True),
        (("--maxmemory", "50mb", "--maxmemory-policy", "noeviction"), None, True),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), None, True),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), 60.0, False),
        (("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lfu"), None, False),
    ],
)
def test_a_server_that_will_be_full_is_told_of(
    configured: tuple[str, ...], ttl_s: float | None, is_told: bool
) -> None:
    server = redis_server(*configured)
    try:
        given = {"url": f"redis://{HOST}:{server.port}", **({"ttl_s": ttl_s} if ttl_s else {})}
        found = probe_remote(options(**given), {})
        assert ("maxmemory-policy allkeys-lru" in (found or "")) is is_told
        assert probe_remote(options(**given, writes="off"), {}) is None, "somebody else writes"
    finally:
        server.kill()


def test_a_server_that_refuses_the_password_has_no_hint() -> None:
    server = redis_server()
    given = options(url=f"redis://{HOST}:{server.port}")
    engine, _ = open_remote_engine(given, {})
    try:
        found = finding_of(engine, given)
        assert found is not None and found.is_hint and "maxmemory" in found.text
        for command in ("CLIENT KILL TYPE normal", f"CONFIG SET requirepass {SECRET}"):
            redis_command(server.port, *command.split())
        found = finding_of(engine, given)
        assert found is not None and not found.is_hint and "refuses the credentials" in found.text
    finally:
        engine.close()
        server.kill()


class TestRedisLogin:
    def test_a_wrong_password(self, redis: ServerProcess) -> None:
        given = {"url": f"redis://{HOST}:{redis.port}", "password_env": "WORD"}
        for user in ({}, {"username": "u"}):
            assert "refuses the credentials" in said_of({"WORD": SECRET}, **given, **user)

    def test_a_missing_password(self) -> None:
        server = redis_server("--requirepass", SECRET)
        try:
            assert "refuses the credentials" in said_of(url=f"redis://{HOST}:{server.port}")
        finally:
            server.kill()

    def test_a_database_that_is_not_there(self, redis: ServerProcess) -> None:
        assert "has no such database" in said_of(url=f"redis://{HOST}:{redis.port}/99")

    def test_rights(self, redis: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        given = {"url": f"redis://{HOST}:{redis.port}", "username": "u", "password_env": "WORD"}
        env = {"WORD": SECRET}
        try:
            for rights, wanted in (
                ("+ping", "does not let this user read"),
                ("+exists +info", "does not let this user read"),
                ("+@read", 'set writes to "off"'),
                ("+@read +@write -msetnx", "takes no objects from this user"),
                ("+@read +@write -unlink", "remove objects"),
            ):
                user = ("on", f">{SECRET}", "~*", *rights.split())
                redis_command(redis.port, "ACL", "SETUSER", "u", "reset", *user)
                assert wanted in said_of(env, **given)
            for rights, writes in (("+@read", "off"), (OF_ENGINES, "through")):
                user = ("on", f">{SECRET}", "~*", *rights.split())
                redis_command(redis.port, "ACL", "SETUSER", "u", "reset", *user)
                assert probe_remote(options(**given, writes=writes), env) is None
            assert OF_ENGINES in REMOTE_PAGE.read_text()
            monkeypatch.setenv("WORD", SECRET)
            words = ("--set", "username=u", "--set", "password_env=WORD", *PATIENT_WORDS)
            for command in ("ls", "verify", "gc"):
                assert call("remote", command, given["url"], *words).code == 0
        finally:
            redis_command(redis.port, "ACL", "DELUSER", "u")


class TestBucket:
    def said(
        self, monkeypatch: pytest.MonkeyPatch, endpoint: str, env: Mapping[str, str], bucket: str
    ) -> str | None:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        given = options(url=f"s3://{bucket}/kv", endpoint=endpoint, region="us-east-1")
        found = probe_remote(given, env)
        assert not [word for word in (SECRET, *env.values()) if word in (found or "")]
        return found

    def test_rights(self, guarded: GuardedS3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        writer, at = guarded.writer, guarded.endpoint
        assert self.said(monkeypatch, at, writer, "guarded") is None
        found = self.said(monkeypatch, at, guarded.reader, "guarded")
        assert found is not None and "allow writes" in found and 'or set writes to "off"' in found
        for wrong in (
            {**writer, "AWS_SECRET_ACCESS_KEY": SECRET},
            {**writer, "AWS_ACCESS_KEY_ID": "nobody-in-test"},
        ):
            found = self.said(monkeypatch, at, wrong, "guarded")
            assert found is not None and "refuses the credentials" in found

    def test_a_bucket_that_is_not_there(
        self, s3: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = self.said(monkeypatch, s3.endpoint, AWS, "nowhere-in-test")
        assert found is not None and "has no such bucket; create it" in found

    def test_a_certificate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Clients of buckets trust what the system does, and a file of the environment."""
        pytest.importorskip("obstore")
        files = loopback_certificate(tmp_path)
        server = S3Server(certificate=files)
        try:
            server.make_bucket("protected-in-test")
            found = self.said(monkeypatch, server.endpoint, AWS, "protected-in-test")
            assert found is not None and "SSL_CERT_FILE (a bucket)" in found
            trusting = {**AWS, "SSL_CERT_FILE": str(files.certificate)}
            assert self.said(monkeypatch, server.endpoint, trusting, "protected-in-test") is None
        finally:
            server.kill()

    @pytest.mark.parametrize(
        "status, code, wanted",
        [
            (403, "RequestTimeTooSkewed", "the clock of this machine"),
            (403, "ExpiredToken", "refuses the credentials"),
            (403, "AccessDenied", "does not let this user read"),
            (400, "AuthorizationHeaderMalformed", "in another region"),
            (403, "SomethingNew", "set them right"),
            (503, "SlowDown", "come back later"),
        ],
    )
    def test_what_moto_never_says(
        self, monkeypatch: pytest.MonkeyPatch, status: int, code: str, wanted: str
    ) -> None:
        pytest.importorskip("obstore")
        with answering_always(status, f"<Error><Code>{code}</Code><K>{SECRET}</K></Error>") as port:
            found = self.said(monkeypatch, f"http://{HOST}:{port}", AWS, "bucket")
        assert found is not None and wanted in found


class TestTwin:
    """What no server at hand does."""

    def test_a_server_that_replaces_objects(self) -> None:
        class Overwriting(RemoteTwin):
            def _put(
                self, name: str, objects: Sequence[RemoteObject], number: int
            ) -> RemoteOutcome:
                self.held.pop(name, None)
                return super()._put(name, objects, number)

        twin = Overwriting()
        found = problem_of(twin, options(url="s3://bucket"))
        assert found is not None and "replaces objects" in found and not twin.held

    def test_a_server_that_answers_and_fails_to_store(self) -> None:
        """Such as one that knows no conditional writes (501), or a folder without hard links."""
        twin = RemoteTwin()
        twin.fails["put"] = RemoteOutcome.IO_ERROR
        found = problem_of(twin, options(url="s3://bucket"))
        assert found is not None and "fails to store" in found and "reached" not in found
        assert "hard links" in found

    @pytest.mark.parametrize("cause", list(Cause))
    def test_every_cause_has_its_sentence(self, cause: Cause) -> None:
        twin = RemoteTwin()
        twin.cause = cause
        found = problem_of(twin, options(url="s3://bucket"))
        assert found is not None and len(found.split()) <= 30 and found.count(";") == 1
        assert not twin.held

    @pytest.mark.parametrize("outcome", sorted(FAILURES))
    @pytest.mark.parametrize("method", ["exist_many", "counter", "put", "remove"])
    def test_every_failure_has_its_sentence(self, method: str, outcome: RemoteOutcome) -> None:
        twin = RemoteTwin()
        twin.fails[method] = outcome
        found = problem_of(twin, options(url="s3://bucket"))
        assert found is not None and found.startswith("tiers[1].url: the server ")


@pytest.mark.parametrize("is_up", [True, False])
def test_check_and_doctor_ask_the_server(
    tmp_path: Path, evicting: ServerProcess, is_up: bool
) -> None:
    port = evicting.port if is_up else free_port()
    remote = {"type": "remote", "url": f"redis://{HOST}:{port}", **PATIENT}
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
    found = [each["found"] for each in call("doctor", path, "--json").document["findings"]]
    assert any("cannot be reached" in each for each in found) is not is_up
