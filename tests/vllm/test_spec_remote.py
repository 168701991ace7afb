"""The spec over a remote tier on a real server: what hosts find of each other's blocks."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cache_rig import call
from support.kv_bytes import Shape, tiers
from support.open_tiers import remote_of
from support.remote_hosts import (
    CHUNKS,
    CPU,
    SHAPE,
    await_next_node,
    await_ready,
    hits_of,
    host,
    own_bucket,
    pid_of_node,
    serve,
)
from support.remote_servers import HOST, GuardedS3Server, ServerProcess, redis_server
from support.spec_driver import Driver
from support.waiting import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.errors import ConfigError
from kvcascade.manager.base import BlockEvent
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.remote.remote_options import open_remote_engine
from kvcascade.vllm.v0_26 import to_vllm_event

DEADLINE_S = 1.0
LIST_S = 10.0
SECRET = "hunter2-in-test"
KEY = "5ec2e7" * 10 + "0a1b"
"""32 bytes in hexadecimal digits."""


@pytest.fixture(scope="module")
def redis() -> Iterator[ServerProcess]:
    server = redis_server()
    yield server
    server.kill()


@pytest.fixture(params=["redis", "s3"])
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """Options of a remote tier."""
    if request.param == "redis":
        port = request.getfixturevalue("redis").port
        yield {"url": f"redis://{HOST}:{port}"}
        return
    with own_bucket(monkeypatch) as options:
        yield options


def reset(driver: Driver) -> None:
    """Reset an engine, and wait until the server was told."""
    await_ready(driver)
    driver.reset()
    await_ready(driver)


def test_hosts_find_each_others_blocks_until_one_is_reset(server: dict[str, Any]) -> None:
    with host("both", **server) as first, host("both", **server) as second:
        await_ready(first, second)
        assert serve(first, "text") == 0
        assert serve(second, "text") == CHUNKS
        assert second.counters.links[0].promoted_blocks == CHUNKS * len(SHAPE.groups)
        reset(second)
        assert serve(second, "text") == 0, "its own blocks and those of others are gone"
    with host("both", **server) as third, host("another", **server) as other:
        assert serve(third, "text") == 0, "it has the weights of the disk"
        assert serve(other, "text") == 0


def test_an_engine_serves_without_a_share_that_cannot_be_opened(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "a-file").touch()
    with host("share", url=f"file://{tmp_path}/a-file/kv") as driver:
        assert serve(driver, "text") == 0
        assert serve(driver, "text") == CHUNKS, "from the CPU tier"


def test_engines_that_were_reset_share_what_no_other_engine_finds(redis: ServerProcess) -> None:
    def engine() -> Driver:
        return host("reset", url=f"redis://{HOST}:{redis.port}")

    with engine() as second:
        reset(second)
        with engine() as first:
            reset(first)
            assert serve(first, "text") == 0
        os.kill(former := pid_of_node(second), signal.SIGKILL)
        await_next_node(second, former)
        assert serve(second, "text") == CHUNKS, "its next node knows of the reset"
        with engine() as third:
            assert serve(third, "text") == 0, "it has the weights of the disk"


@pytest.mark.parametrize("share_tp", [True, False])
def test_engines_of_other_sizes_share_what_all_ranks_hold(
    redis: ServerProcess, share_tp: bool
) -> None:
    """The driver compares every byte of every rank."""
    if not any(each.name == "replicated_layout" for each in fields(OffloadingConfig)):
        pytest.skip("this vLLM does not say what is replicated")
    two, four = (Shape(world=world, is_replicated=True) for world in (2, 4))
    remote: dict[str, Any] = {"url": f"redis://{HOST}:{redis.port}", "share_tp": share_tp}
    label = f"sizes {share_tp}"
    with host(label, two, **remote) as first, host(label, four, **remote) as second:
        await_ready(first, second)
        assert serve(first, "text") == 0
        assert serve(second, "text") == (CHUNKS if share_tp else 0)
        assert serve(second, "other") == 0
        assert serve(first, "other") == (CHUNKS if share_tp else 0)


def test_sharing_what_is_not_replicated_is_refused(redis: ServerProcess) -> None:
    with pytest.raises(ConfigError, match=r"share_tp: this vLLM does not say"):
        host("refused", Shape(world=2), url=f"redis://{HOST}:{redis.port}", share_tp=True)


def test_events_tell_local_blocks_from_remote_ones(redis: ServerProcess, tmp_path: Path) -> None:
    """A router that reads them prefers an engine whose blocks are near."""
    remote = {"type": "remote", "url": f"redis://{HOST}:{redis.port}", "writes": "through"}
    local = tiers(SHAPE, tmp_path, cpu=CPU, nvme=64)
    with Driver(SHAPE, [*local, remote], label="told", write_mode="through") as driver:
        await_ready(driver)
        serve(driver, "text")
        assert driver.told == {
            (Medium.CPU, Locality.LOCAL, None),
            (Medium.STORAGE, Locality.LOCAL, "nvme"),
            (Medium.STORAGE, Locality.REMOTE, "remote"),
        }
        assert driver.seen["nvme"] == driver.seen["remote"] == driver.seen["CPU"]


@pytest.mark.skipif(
    not hasattr(OffloadingEvent, "removal_expected"), reason="vLLM expects none up to 0.28"
)
@pytest.mark.parametrize("below", ["REMOTE", "NVME"])
def test_vllm_keeps_no_tokens_of_blocks_that_left_the_host(below: str) -> None:
    """With self-describing events it keeps them until the last removal that is expected."""
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    about = {"kv_cache_spec_kind": "full", "kv_cache_spec_sliding_window": None}
    group = SimpleNamespace(
        sliding_window_size_in_chunks=None,
        hashes_per_chunk=1,
        tokens_per_chunk=16,
        tokens_per_block=16,
        group_idx=0,
        kv_event_group_spec=SimpleNamespace(**about),
    )
    prompt = {"block_hashes": [bytes(32)], "all_token_ids": [*range(16)], "lora_request": None}
    key = make_offload_key(bytes(32), 0)
    tracker.record_store(cast(Any, SimpleNamespace(**prompt)), cast(Any, group), 0, key)
    block = (BlockHash(key),)
    stored = [BlockEvent(block, "CPU", False, "cpu"), BlockEvent(block, below, False, "below")]
    told: list[Any] = [*tracker.take_events(map(to_vllm_event, stored))]
    assert [event.token_ids for event in told] == [[*range(16)]] * 2
    removed = [replace(event, removed=True) for event in stored if event.medium != "REMOTE"]
    assert [*tracker.take_events(map(to_vllm_event, removed))]
    assert not tracker._pending_event_metadata


def test_a_stopped_server_costs_one_deadline(
    redis: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host("stopped", url=f"redis://{HOST}:{redis.port}", deadline_s=DEADLINE_S) as driver:
        await_ready(driver)
        port = remote_of(driver.cascade).port
        asked: list[object] = []
        submit = port._client.submit

        def count(order: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
            asked.append(order(0))
            return submit(order, on_end)

        def has_failed() -> bool:
            driver.step()
            return port.feed.has_failed

        monkeypatch.setattr(port._client, "submit", count)
        redis.stop()
        try:
            assert hits_of(driver, driver.request("first", CHUNKS)) == 0
            assert len(asked) == 1, "it waited for one answer"
            wait_until(has_failed)
            assert driver.look_up(driver.request("second", CHUNKS)) == 0, "nobody waits any more"
        finally:
            redis.go_on()


def test_a_wrong_password_is_one_line_of_the_log_and_shown_nowhere(
    redis: ServerProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The node is a process of its own, whose log goes to standard error."""
    monkeypatch.setenv("KVCASCADE_TEST_WORD", SECRET)
    said: list[str] = []

    def is_told() -> bool:
        said.append(capfd.readouterr().err)
        return "refuses the credentials" in "".join(said)

    url = f"redis://{HOST}:{redis.port}"
    with host("refused", url=url, password_env="KVCASCADE_TEST_WORD") as driver:
        wait_until(is_told)
        assert hits_of(driver, driver.request("text", CHUNKS)) == 0, "it serves without the server"
    text = "".join(said) + capfd.readouterr().err
    assert text.count("refuses the credentials") == 1 and "tiers[1].url: the server" in text
    assert SECRET not in text


@pytest.fixture(params=["redis", "s3"])
def guarded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Options of a remote tier on a server that asks who is there, and all secrets of it."""
    (tmp_path / "key").write_text(KEY)
    if request.param == "redis":
        monkeypatch.setenv("KVCASCADE_TEST_WORD", SECRET)
        redis = redis_server("--requirepass", SECRET)
        login = {"password_env": "KVCASCADE_TEST_WORD", "mac_key_file": str(tmp_path / "key")}
        yield {"url": f"redis://{HOST}:{redis.port}", **login}, [KEY, SECRET]
        redis.kill()
        return
    s3 = GuardedS3Server()
    for name, value in s3.writer.items():
        monkeypatch.setenv(name, value)
    at = {"endpoint": s3.endpoint, "region": "us-east-1"}
    key = {"encryption_key_file": str(tmp_path / "key")}
    yield {"url": "s3://guarded/kv", **at, **key}, [KEY, *s3.writer.values()]
    s3.kill()


def test_secrets_are_in_no_log_file_fingerprint_or_report(
    tmp_path: Path,
    guarded: tuple[dict[str, Any], list[str]],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine with NVMe and a guarded server serves and stops; then tools look at it."""
    caplog.set_level(logging.DEBUG)
    given, secrets = guarded
    remote = {"type": "remote", "writes": "through", **given}
    local = tiers(SHAPE, tmp_path / "kv", cpu=CPU, nvme=64)
    with Driver(SHAPE, [*local, remote], label="guarded") as driver:
        await_ready(driver)
        serve(driver, "text")
        said = [repr(driver.cascade), repr(vars(driver.cascade)), str(driver.metrics)]
    said.append(call("inspect", tmp_path / "kv", "--json").out)
    (found,) = json.loads(said[-1])["namespaces"]
    assert found["label"] == "guarded" and found["fields"], "or nothing was looked at"
    words = [f"--set={name}={value}" for name, value in given.items() if name != "url"]
    for command in ("ls", "verify", "gc"):
        answer = call("remote", command, given["url"], *words)
        assert answer.code == 0
        said += (answer.out, answer.err)
    engine, _ = open_remote_engine(parse_remote(At("tier"), given), os.environ)
    names = [each.name for batch in engine.list_objects("", LIST_S) for each in batch.entries]
    engine.close()
    assert len(names) >= CHUNKS, "or nothing was written"
    stored = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    captured = capfd.readouterr()
    everything = "".join([*said, *names, caplog.text, captured.out, captured.err])
    for secret in (*secrets, bytes.fromhex(KEY).decode("latin-1")):
        assert secret not in everything and secret.encode("latin-1") not in stored
