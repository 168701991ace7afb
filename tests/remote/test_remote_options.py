"""Options of a remote tier: what is refused, in one sentence, and that no credential is shown."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
from contract.remote_contract import LIMIT_S, an_object, names
from cryptography.hazmat.primitives import serialization
from support.certificates import loopback_certificate
from support.remote_servers import HOST, PATIENT, ServerProcess, redis_server
from support.remote_twin import RemoteTwin

from kvcascade.config import remote
from kvcascade.config.options import At
from kvcascade.config.remote import RemoteTierOptions, WriteWhen, parse_remote
from kvcascade.errors import ConfigError
from kvcascade.tiers.remote import remote_options
from kvcascade.tiers.remote.base import FAILURES, EngineKind, RemoteOutcome
from kvcascade.tiers.remote.engines.opened_folder import folder_of_url
from kvcascade.tiers.remote.engines.valkey import ValkeyEngine
from kvcascade.tiers.remote.objects import GcmSeal, MacSeal
from kvcascade.tiers.remote.remote_options import (
    check_openable,
    missing_extra,
    open_remote_engine,
    store_options,
)
from kvcascade.tools.commands.check.config_check import probe_remote

SECRET = "hunter2-in-test"
AT = At("tiers[2]")


def parse(**options: object) -> RemoteTierOptions:
    return parse_remote(AT, options)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket", "s3://bucket/a/prefix", "gs://bucket/p", "az://container/p"),
        *("file:///mnt/share/kv", "valkey://127.0.0.1", "redis://localhost:7000/3"),
        *("valkeys://cache.example.org:6380", "rediss://[::1]:6380"),
    ],
)
def test_urls_that_are_right(url: str) -> None:
    read = parse(url=url)
    assert read.url == url and read.writes is WriteWhen.SECOND_TOUCH
    assert store_options(read).queue_bytes == 256 << 20 and store_options(read).deadline_s == 2.0


def test_the_url_of_a_folder_is_read_as_urls_are(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    folder = tmp_path / "my share"
    assert folder_of_url(parse(url=folder.as_uri()).url) == folder
    engine, _ = open_remote_engine(parse(url=folder.as_uri()), {})
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.OK]
    assert (folder / names(1)[0]).exists()
    engine.close()


@pytest.mark.parametrize(
    "options, place",
    [
        ({}, "url"),
        ({"url": 7}, "url"),
        ({"url": ""}, "url"),
        ({"url": "s3:/bucket"}, "url"),
        ({"url": "bucket/prefix"}, "url"),
        ({"url": "ftp://host/kv"}, "url"),
        ({"url": "valky://127.0.0.1"}, "url"),
        ({"url": "valkey://127.0.0.1:99999"}, "url"),
        ({"url": "valkey://127.0.0.1/abc"}, "url"),
        ({"url": "s3://bucket:9000"}, "url"),
        ({"url": "file://host/kv"}, "url"),
        ({"url": f"valkeys://user:{SECRET}@host"}, "url"),
        ({"url": f"s3://bucket/p?X-Amz-Signature={SECRET}"}, "url"),
        ({"url": f"s3://bucket/p#{SECRET}"}, "url"),
        ({"url": "valkey://cache.example.org"}, "url"),
        ({"url": "redis://10.0.0.1"}, "url"),
        ({"url": "s3://b", "endpoint": "http://minio.example.org:9000"}, "endpoint"),
        ({"url": "s3://b", "endpoint": f"https://u:{SECRET}@host"}, "endpoint"),
        ({"url": "s3://b", "endpoint": "minio:9000"}, "endpoint"),
        ({"url": "s3://b", "password": SECRET}, "password"),
        ({"url": "s3://b", "passwd": SECRET}, "passwd"),
        ({"url": "s3://b", "secret_access_key": SECRET}, "secret_access_key"),
        ({"url": "s3://b", "aws_session_token": SECRET}, "aws_session_token"),
        ({"url": "valkey://127.0.0.1", "password_env": f"${SECRET}"}, "password_env"),
        ({"url": "valkey://127.0.0.1", "password_env": 7}, "password_env"),
        ({"url": "valkey://127.0.0.1", "password_file": SECRET}, "password_file"),
        ({"url": "s3://b", "mac_key_file": SECRET}, "mac_key_file"),
        ({"url": "s3://b", "encryption_key_file": f"{SECRET}\0"}, "encryption_key_file"),
        ({"url": "valkey://127.0.0.1", "username": "kv"}, "username"),
        ({"url": "s3://b", "ttl_s": 5}, "ttl_s"),
        ({"url": "gs://b", "endpoint": "https://host"}, "endpoint"),
        ({"url": "s3://b", "mac_key_env": "A", "mac_key_file": "/a"}, "mac_key_env"),
        ({"url": "s3://b", "mac_key_env": "A", "encryption_key_env": "B"}, "mac_key"),
        ({"url": "s3://b", "writes": "always"}, "writes"),
        ({"url": "s3://b", "deadline_s": 0}, "deadline_s"),
        ({"url": "s3://b", "capacity": "1TiB"}, "capacity"),
        ({"url": "valkey://127.0.0.1", "ca_file": "/file"}, "ca_file"),
        ({"url": "s3://b", "client_cert_file": "/file"}, "client_cert_file"),
        ({"url": "valkeys://host", "client_key_file": "/file"}, "client_key_file"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**options)
    said = str(caught.value)
    assert said.startswith("tiers[2]") and place in said
    assert said.endswith(".") and "\n" not in said and SECRET not in said


@pytest.mark.parametrize("option", ["password_env", "password_file"])
def test_a_secret_in_place_of_its_name_is_refused_with_the_remedy(option: str) -> None:
    with pytest.raises(ConfigError, match="; give the (name|path) of .* secret"):
        parse(url="valkey://127.0.0.1", **{option: f"${SECRET}"})


def test_without_tls_only_where_it_is_said() -> None:
    assert parse(url="valkey://cache.example.org", insecure=True).insecure
    assert parse(url="s3://b", endpoint="http://127.0.0.1:9000").endpoint


@pytest.mark.parametrize(
    "options, package, extra",
    [
        ({"url": "s3://b"}, "obstore", "kvcascade[s3]"),
        ({"url": "file:///kv"}, "obstore", "kvcascade[s3]"),
        (
            {"url": "valkey://127.0.0.1", "encryption_key_env": "K"},
            "cryptography",
            "kvcascade[encryption]",
        ),
    ],
)
def test_a_missing_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], package: str, extra: str
) -> None:
    monkeypatch.setattr(remote_options, "find_spec", lambda name: None)
    read = parse(**options)
    said = missing_extra(read)
    assert said and package in said and extra in said and said.endswith(".")
    with pytest.raises(ConfigError):
        open_remote_engine(read, {"K": "00" * 32})


def test_valkey_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_options, "find_spec", lambda name: None)
    assert missing_extra(parse(url="valkey://127.0.0.1", mac_key_env="K")) is None


def test_a_third_engine_is_a_file_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page docs/extending/remote-engine.md says so."""
    file = ModuleType("kvcascade.tiers.remote.engines.mem")
    kind = EngineKind(lambda options, secret: RemoteTwin(), "no_such_package", "mem")
    monkeypatch.setattr(file, "KIND", kind, raising=False)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(remote.SCHEMES, "mem", remote.Scheme("mem"))
    with pytest.raises(ConfigError, match="has no TLS; set insecure to true"):
        parse(url="mem://cache.example.org")
    with pytest.raises(ConfigError, match="ttl_s: does not apply to mem://"):
        parse(url="mem://localhost", ttl_s=5)
    options = parse(url="mem://localhost")
    said = missing_extra(options)
    assert said and "mem:// needs the package no_such_package; install kvcascade[mem]." in said
    monkeypatch.setattr(remote_options, "find_spec", lambda name: object())
    check_openable(options, {})
    engine, _ = open_remote_engine(options, {})
    assert isinstance(engine, RemoteTwin) and probe_remote(options, {}) is None
    assert store_options(options).reads_at_a_time == kind.reads_at_a_time


class TestSecrets:
    def test_keys_come_from_environment_or_file(self, tmp_path: Path) -> None:
        (tmp_path / "raw").write_bytes(bytes(range(32)))
        (tmp_path / "hex").write_text(bytes(range(32)).hex() + "\n")
        labels = set()
        for how in (
            {"mac_key_env": "K"},
            {"mac_key_file": str(tmp_path / "raw")},
            {"mac_key_file": str(tmp_path / "hex")},
        ):
            engine, seal = open_remote_engine(
                parse(url="valkey://127.0.0.1", **how), {"K": bytes(range(32)).hex()}
            )
            assert isinstance(engine, ValkeyEngine) and isinstance(seal, MacSeal)
            labels.add(seal.label)
            engine.close()
        assert len(labels) == 1
        options = parse(url="valkey://127.0.0.1", encryption_key_env="K")
        assert isinstance(open_remote_engine(options, {"K": "ab" * 32})[1], GcmSeal)

    @pytest.mark.parametrize("value", ["", SECRET, "ab" * 31, "zz" * 32])
    def test_a_key_that_is_none_is_refused_and_not_shown(self, value: str) -> None:
        options = parse(url="valkey://127.0.0.1", mac_key_env="K")
        with pytest.raises(ConfigError) as caught:
            open_remote_engine(options, {"K": value})
        assert not value or value not in str(caught.value)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        for name in ("missing", "empty"):
            options = parse(url="valkey://127.0.0.1", password_file=str(tmp_path / name))
            with pytest.raises(ConfigError, match=name):
                open_remote_engine(options, {})
        options = parse(url="valkeys://127.0.0.1", ca_file=str(tmp_path / "missing"))
        with pytest.raises(ConfigError, match="ca_file"):
            open_remote_engine(options, {})
        files = loopback_certificate(tmp_path)
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        (tmp_path / "locked").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"word"),
            )
        )
        for key_file in ("missing", "empty", "locked", "certificate.pem"):
            options = parse(
                url="valkeys://127.0.0.1",
                client_cert_file=str(files.certificate),
                client_key_file=str(tmp_path / key_file),
            )
            with pytest.raises(ConfigError, match="client_cert_file: cannot be read"):
                open_remote_engine(options, {})

    def test_a_password_is_used_and_shown_nowhere(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        server = redis_server("--requirepass", SECRET)
        try:
            (tmp_path / "password").write_text(SECRET + "\n")
            for how in ({"password_env": "P"}, {"password_file": str(tmp_path / "password")}):
                options = parse(url=f"valkey://{HOST}:{server.port}", **how, **PATIENT)
                engine, _ = open_remote_engine(options, {"P": SECRET})
                assert engine.exist_many(names(1), LIMIT_S) == [RemoteOutcome.ABSENT]
                assert isinstance(engine, ValkeyEngine)
                shown = repr(options) + repr(engine) + repr(vars(engine))
                shown += repr(vars(engine._nodes)) + caplog.text
                assert SECRET not in shown
                engine.close()
        finally:
            server.kill()

    def test_a_database_is_selected(self, redis: ServerProcess) -> None:
        first, second = (
            open_remote_engine(parse(url=f"valkey://{HOST}:{redis.port}{path}", **PATIENT), {})[0]
            for path in ("", "/5")
        )
        assert first.counter("a", 1, LIMIT_S).value == 1
        assert second.counter("a", 2, LIMIT_S).value == 2
        first.close()
        second.close()


@pytest.mark.parametrize(
    "name, said",
    [
        ("a-file", "'{}/a-file' is a file, not a folder."),
        ("a-file/kv", "'{}/a-file/kv' cannot be read (Not a directory)."),
        ("kv\0", "'{}/kv\\x00' has a null byte; correct the url."),
    ],
)
def test_what_is_no_folder_is_one_sentence_and_no_error(
    tmp_path: Path, name: str, said: str
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "a-file").touch()
    options = parse(url=f"file://{tmp_path}/{name}")
    assert probe_remote(options, {}) == f"tiers[2].url: {said.format(tmp_path)}"
    engine, _ = open_remote_engine(options, {})
    assert engine.exist_many(names(1), LIMIT_S)[0] in FAILURES | {RemoteOutcome.ABSENT}
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.IO_ERROR]
    engine.close()


def test_a_folder_is_used_once_it_can_be(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "share").touch()
    engine, _ = open_remote_engine(parse(url=f"file://{tmp_path}/share/kv"), {})
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.IO_ERROR]
    assert [each.outcome for each in engine.list_objects("", LIMIT_S)] == [RemoteOutcome.IO_ERROR]
    (tmp_path / "share").unlink()
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.OK]
    engine.close()
