"""The engine for buckets and folders, against moto and a folder."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
from contract.remote_contract import LIMIT_S, RemoteContract, an_object, buffers, names
from support.clock import ManualClock
from support.keys import key, keys
from support.remote_rig import RemoteRig, content
from support.remote_servers import HOST, S3Server, answering_always, free_port
from support.thread_limit import Limited
from support.waiting import WAIT_LIMIT_S, wait_until

from kvcascade.errors import ConfigError, TierIOError
from kvcascade.tiers.remote.base import (
    MAX_COUNTER,
    Cause,
    CounterAnswer,
    RemoteEngine,
    RemoteOutcome,
)
from kvcascade.tiers.remote.remote_store import most_per_call

pytest.importorskip("obstore", reason='no object stores: install obstore (extra "s3")')

from kvcascade.tiers.remote.engines import object_store  # noqa: E402 - needs obstore
from kvcascade.tiers.remote.engines.object_store import (  # noqa: E402 - as above
    RENEW_AFTER_S,
    REQUESTS_AT_A_TIME,
    ObjectStoreEngine,
    open_object_store,
)

OK, ABSENT, DENIED = RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.DENIED
BUSY, EXISTS = RemoteOutcome.BUSY, RemoteOutcome.EXISTS
TIMED_OUT, IO_ERROR = RemoteOutcome.TIMED_OUT, RemoteOutcome.IO_ERROR
SECRETS = {"access_key_id": "id-in-test", "secret_access_key": "secret-in-test"}
CALLS_MAX = 12
SLACK_S = 6.0
"""Time by which a loaded machine may exceed a limit: less than one limit after the other takes."""


def bucket_at(
    endpoint: str, bucket: str, timeout_s: float = 10.0, **settings: str
) -> ObjectStoreEngine:
    return open_object_store(
        f"s3://{bucket}/pre/fix",
        timeout_s,
        timeout_s,
        endpoint=endpoint,
        region="us-east-1",
        settings=SECRETS | settings,
    )


class ObjectsContract(RemoteContract):
    """The contract, and what only objects in a bucket or a folder can do to a counter."""

    @pytest.mark.parametrize("data", [b"", b"12x", b"9" * 19, b"9" * 200])
    def test_a_counter_whose_begin_is_damaged_goes_on(
        self, engine: RemoteEngine, data: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A host that lost power, or a share that was full, leaves it without content."""
        for name in ("space/generation", "other/generation"):
            self.spoil(engine, f"{name}/begin", data)
        assert engine.counter("space/generation", None, LIMIT_S).outcome is ABSENT
        assert engine.counter("space/generation", None, LIMIT_S).outcome is ABSENT
        assert caplog.text.count("space/generation/begin") == 1
        assert engine.counter("space/generation", 1000, LIMIT_S).value == 1000
        assert engine.counter("space/generation", 5, LIMIT_S).value == 1000
        assert engine.advance("space/generation", 7, LIMIT_S).value == 1001
        assert engine.advance("other/generation", 70, LIMIT_S).value == 70
        assert engine.counter("other/generation", 1, LIMIT_S).value == 70

    def test_hosts_that_mend_a_counter_at_once_agree_in_the_end(self, engine: RemoteEngine) -> None:
        self.spoil(engine, "space/generation/begin", b"")
        barrier = threading.Barrier(6)

        def mend(first: int) -> int:
            barrier.wait(LIMIT_S)
            if first % 2:
                return engine.counter("space/generation", 100 + first, LIMIT_S).value
            return engine.advance("space/generation", 100 + first, LIMIT_S).value

        with ThreadPoolExecutor(6) as threads:
            found = [*threads.map(mend, range(6))]
        assert min(found) >= 100
        last = engine.counter("space/generation", 1, LIMIT_S).value
        assert last == max(found), "nobody goes on with a smaller one"


class TestFolder(ObjectsContract):
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[RemoteEngine]:
        self.folder = tmp_path / "made" / "here"
        made = open_object_store(self.folder.as_uri(), 10.0, 10.0)
        yield made
        made.close()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def test_a_slow_folder_is_busy_once_it_moved_a_file(
        self, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files of a call come one after the other, and those that would begin too late do not."""
        assert most_per_call(engine, 512 << 10) == 4
        clock = ManualClock()
        engine.put(names(4), [an_object(1)] * 4, LIMIT_S)
        monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=clock))
        read = partial(engine.get_into, names(4), buffers(4), 1.0)
        assert read(lambda number: clock.advance(0.6)) == [OK, OK, BUSY, BUSY]
        assert read() == [OK] * 4
        put = partial(engine.put, names(4), [an_object(1)] * 4, 1.0)

        def find_one(*_: object) -> RemoteOutcome:
            clock.advance(0.6)
            return EXISTS

        monkeypatch.setattr(engine, "_create", find_one)
        assert put() == [EXISTS, EXISTS, BUSY, BUSY], "it answers"
        assert engine.get_into(names(4), buffers(4), 0.0) == [TIMED_OUT] * 4

    def test_only_what_is_old_is_written_again(self, engine: RemoteEngine) -> None:
        engine.put(names(2), [an_object(1), an_object(2)], LIMIT_S)
        engine.counter("space/generation", 1000, LIMIT_S)
        old, young = (self.folder / name for name in names(2))
        begin = self.folder / "space/generation/begin"
        days_ago_s = time.time() - 2 * RENEW_AFTER_S
        for path in (old, begin):
            os.utime(path, (days_ago_s, days_ago_s))
        young_s = young.stat().st_mtime_ns
        assert engine.renew(names(2), [an_object(1), an_object(2)], LIMIT_S) == [EXISTS] * 2
        assert old.stat().st_mtime > days_ago_s + RENEW_AFTER_S
        assert young.stat().st_mtime_ns == young_s
        assert engine.counter("space/generation", None, LIMIT_S).value == 1000
        assert begin.stat().st_mtime > days_ago_s + RENEW_AFTER_S
        assert engine.advance("space/generation", 5000, LIMIT_S).value == 5000
        (last,) = (path for path in begin.parent.iterdir() if path != begin)
        os.utime(last, (days_ago_s, days_ago_s))
        assert engine.counter("space/generation", None, LIMIT_S).value == 5000
        assert last.stat().st_mtime > days_ago_s + RENEW_AFTER_S

    def test_a_limit_of_processes_that_is_reached_later_fails_no_call(
        self, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Limited(monkeypatch).left = 0
        assert engine.exist_many(names(80), LIMIT_S) == [ABSENT] * 80
        with pytest.raises(TierIOError, match="raise the limit"):
            open_object_store(self.folder.as_uri(), 10.0, 10.0)

    @pytest.mark.parametrize("kind", ["pipe", "link"])
    def test_what_is_no_file_holds_up_nobody(self, engine: RemoteEngine, kind: str) -> None:
        """The other end of such a pipe is never opened."""
        assert engine.put(names(2), [an_object(1)] * 2, LIMIT_S) == [OK] * 2
        odd, whole = (self.folder / name for name in names(2))
        odd.unlink()
        if kind == "pipe":
            os.mkfifo(odd)
        else:
            odd.symlink_to(whole)
        (self.folder / "kvcascade-check").mkdir()
        os.mkfifo(self.folder / "kvcascade-check/explain")
        assert engine.exist_many(names(2), LIMIT_S) == [OK] * 2
        assert engine.get_into(names(2), buffers(2), LIMIT_S) == [RemoteOutcome.CORRUPT, OK]
        assert engine.renew(names(2), [an_object(1)] * 2, LIMIT_S) == [EXISTS] * 2
        assert isinstance(engine, ObjectStoreEngine) and engine.explain(LIMIT_S) is None
        assert engine.remove(names(1), LIMIT_S) == [OK]
        assert engine.exist_many(names(2), LIMIT_S) == [ABSENT, OK]

    def test_a_list_passes_over_folders_of_others(self, engine: RemoteEngine) -> None:
        """A share may have `lost+found`, links in a circle, and names that are no text."""
        ours = f"{0xAB:032x}/1/00/00"
        engine.put([ours], [an_object(1)], LIMIT_S)
        for name in ("lost+found", os.fsdecode(b"caf\xe9"), "photos/inside"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / os.fsdecode(b"\xe9")).touch()
            (self.folder / name / "circle").symlink_to(self.folder)
        batches = [*engine.list_objects("", LIMIT_S)]
        assert {batch.outcome for batch in batches} == {OK}
        assert {each.name for batch in batches for each in batch.entries} == {ours}

    def test_a_counter_of_many_values_is_found_out_at_last(
        self, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each reset leaves an object, and one call has no time to list them all."""
        monkeypatch.setattr(object_store, "LISTED_AT_A_TIME", 16)
        last = [engine.advance("space/generation", 1000, LIMIT_S).value for _ in range(40)][-1]
        assert isinstance(engine, ObjectStoreEngine)
        engine._largest.clear()
        found = engine.counter("space/generation", None, 0.0)
        for _ in range(40):
            if found.outcome is OK:
                break
            assert found.outcome is TIMED_OUT
            found = engine.counter("space/generation", None, 0.0)
        assert found.value == last
        for path in (self.folder / "space/generation").iterdir():
            if int(path.name) > 1005:
                path.unlink()
        assert engine.counter("space/generation", None, LIMIT_S).value == 1005

    def test_a_name_that_is_no_value_of_a_counter_is_passed_over(
        self, engine: RemoteEngine
    ) -> None:
        assert engine.advance("space/generation", 1000, LIMIT_S).value == 1000
        for name in ("9" * 19, "9" * 25, "9" * 200, "-7", "x"):
            (self.folder / "space/generation" / name).touch()
        assert engine.counter("space/generation", None, LIMIT_S).value == 1000
        (self.folder / "space/generation" / str(MAX_COUNTER)).touch()
        assert engine.counter("space/generation", None, LIMIT_S).value == MAX_COUNTER
        assert engine.advance("space/generation", 1, LIMIT_S).outcome is RemoteOutcome.CORRUPT

    def test_what_was_stored_before_a_counter_was_damaged_does_not_come_back(
        self, engine: RemoteEngine
    ) -> None:
        rig = RemoteRig(engine)
        other = RemoteRig(engine, clock=rig.clock)
        assert rig.write(keys(2)) == [OK] * 2 == other.read(keys(2))
        for name in (rig.objects.counter_name, rig.objects.marks_name):
            (self.folder / name).mkdir(exist_ok=True)
            (self.folder / name / "begin").write_bytes(b"")
        rig.clock.advance(6.0)
        late = RemoteRig(engine, clock=rig.clock)
        assert late.look(keys(2)) == rig.read(keys(2)) == other.read(keys(2)) == [ABSENT] * 2
        assert late.write(keys(1)) == rig.read(keys(1)) == other.read(keys(1)) == [OK]
        late.store.reset()
        assert not late.store.state().is_reset_pending
        rig.clock.advance(6.0)
        assert rig.read(keys(2)) == [ABSENT] * 2


class TestS3(ObjectsContract):
    @pytest.fixture
    def engine(self, s3: S3Server) -> Iterator[RemoteEngine]:
        self.at = f"{s3.endpoint}/{(bucket := uuid.uuid4().hex)}"
        s3.make_bucket(bucket)
        made = bucket_at(s3.endpoint, bucket)
        yield made
        made.close()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        asked = urllib.request.Request(f"{self.at}/pre/fix/{name}", data=data, method="PUT")
        urllib.request.urlopen(asked, timeout=10).close()


def test_requests_for_a_counter_are_counted(s3: S3Server) -> None:
    bucket = uuid.uuid4().hex
    s3.make_bucket(bucket)
    engine = bucket_at(s3.endpoint, bucket)
    asked = 0
    real = engine._asked

    def counting(request: Callable[[], object]) -> object:
        nonlocal asked
        asked += 1
        return real(request)

    engine._asked = counting  # type: ignore[assignment, method-assign]
    calls: tuple[tuple[Callable[[], CounterAnswer], int], ...] = (
        (lambda: engine.counter("space/generation", None, LIMIT_S), 1),
        (lambda: engine.counter("space/generation", 1000, LIMIT_S), 4),  # LIST, PUT, LIST, GET
        (lambda: engine.counter("space/generation", 1000, LIMIT_S), 1),
        (lambda: engine.advance("space/generation", 1, LIMIT_S), 2),
        (lambda: engine.counter("space/generation", 1000, LIMIT_S), 1),
    )
    for call, wanted in calls:
        asked = 0
        assert call().requests == asked == wanted
    engine.close()


def test_a_bucket_that_does_not_exist_is_denied(s3: S3Server) -> None:
    engine = bucket_at(s3.endpoint, "nobody-made-this")
    assert engine.get_into(names(1), buffers(1), LIMIT_S) == [DENIED]
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [DENIED]
    assert engine.counter("space/generation", 1, LIMIT_S).outcome in (DENIED, IO_ERROR)
    assert [batch.outcome for batch in engine.list_objects("", LIMIT_S)] == [DENIED]
    assert engine.explain(LIMIT_S) is Cause.NO_BUCKET
    engine.close()


def test_nothing_is_sent_in_plain_because_the_environment_says_so(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.make_bucket(bucket := uuid.uuid4().hex)
    monkeypatch.setenv("AWS_ENDPOINT", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_it = partial(
        open_object_store, f"s3://{bucket}", 10.0, 10.0, region="us-east-1", settings=SECRETS
    )
    plain, engine = open_it(endpoint=s3.endpoint), open_it()
    assert plain.exist_many(names(1), LIMIT_S) == [ABSENT]
    assert engine.exist_many(names(1), LIMIT_S) == [IO_ERROR]
    for each in (plain, engine):
        each.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_list_that_is_refused_is_a_refusal(status: int) -> None:
    with answering_always(status, "<Error><Code>SomethingNew</Code></Error>") as port:
        engine = bucket_at(f"http://{HOST}:{port}", "bucket")
        assert [batch.outcome for batch in engine.list_objects("", LIMIT_S)] == [DENIED]
        assert engine.counter("space/generation", 1, LIMIT_S).outcome is DENIED
        engine.close()


def test_memory_of_a_read_is_let_go(s3: S3Server) -> None:
    s3.make_bucket(bucket := uuid.uuid4().hex)
    engine = bucket_at(s3.endpoint, bucket)
    rig = RemoteRig(engine)
    assert rig.write(keys(2)) == rig.read(keys(2)) == [OK] * 2
    spare = rig.store._reads._spare
    assert spare and not any(buffer.payload.nbytes for buffer in spare)
    engine.close()


def test_nobody_there_is_an_outcome() -> None:
    engine = bucket_at(f"http://{HOST}:{free_port()}", "bucket")
    assert engine.exist_many(names(3), LIMIT_S) == [IO_ERROR] * 3
    assert engine.get_into(names(1), buffers(1), LIMIT_S) == [IO_ERROR]
    assert engine.put(names(2), [an_object(1)] * 2, LIMIT_S) == [IO_ERROR] * 2
    assert engine.remove(names(1), LIMIT_S) == [IO_ERROR]
    assert engine.counter("a", 1, LIMIT_S).outcome is IO_ERROR
    assert engine.advance("a", 1, LIMIT_S).outcome is IO_ERROR
    assert [batch.outcome for batch in engine.list_objects("", LIMIT_S)] == [IO_ERROR]
    assert engine.explain(LIMIT_S) is None
    engine.close()


def test_a_stopped_server_costs_the_timeout_and_no_more() -> None:
    server = S3Server()
    try:
        server.make_bucket("bucket")
        patient = bucket_at(server.endpoint, "bucket")
        assert patient.put(names(1), [an_object(1)], LIMIT_S) == [OK]
        patient.close()
        engine = bucket_at(server.endpoint, "bucket", timeout_s=1.0)
        server.stop()
        calls: tuple[Callable[[], list[RemoteOutcome]], ...] = (
            lambda: engine.exist_many(names(8), LIMIT_S),
            lambda: engine.get_into(names(8), buffers(8), LIMIT_S),
            lambda: engine.put(names(8, 5), [an_object(3)] * 8, LIMIT_S),
        )
        for call in calls:
            begun_s = monotonic()
            assert call() == [TIMED_OUT] * 8
            assert monotonic() - begun_s < 1.0 + SLACK_S, "one timeout, not eight"
        begun_s = monotonic()
        late = engine.exist_many(names(200), 0.1)
        assert set(late) == {TIMED_OUT} and monotonic() - begun_s < 1.1 + SLACK_S
        server.go_on()  # it first answers what nobody waits for any more
        wait_until(lambda: engine.exist_many(names(1), LIMIT_S) == [OK])
        engine.close()
    finally:
        server.go_on()
        server.kill()


def test_a_server_that_stops_in_mid_body_and_goes_on_reaches_no_buffer() -> None:
    """The late-write test of engines whose library receives into memory of its own."""
    goes_on, has_sent = threading.Event(), threading.Event()

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 131264\r\nETag: x\r\n"
            date = b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
            with suppress(OSError):  # the engine closed the connection
                connection.sendall(head + date + b"\xbd" * 60_000)
                goes_on.wait(WAIT_LIMIT_S)
                connection.sendall(b"\xbd" * 71_264)
            has_sent.set()

    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        endpoint = f"http://{HOST}:{server.getsockname()[1]}"
        engine = bucket_at(endpoint, "bucket", timeout_s=0.3)
        (buffer,) = buffers(1)
        (outcome,) = engine.get_into(names(1), [buffer], LIMIT_S)
        assert outcome is TIMED_OUT
        goes_on.set()
        assert has_sent.wait(WAIT_LIMIT_S)
        assert len(buffer.header) == len(buffer.payload) == 0, "nothing was handed over"
        engine.close()
        thread.join(10.0)


def test_a_share_that_stops_in_mid_file_and_goes_on_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late-write test of a folder: a read of a file has no time-out."""
    stops, goes_on, read = threading.Event(), threading.Event(), os.preadv

    def stalling(file: int, parts: Sequence[memoryview], offset: int) -> int:
        head, payload = parts[:2]
        n_bytes = read(file, [head, payload[: len(payload) // 2]], offset)
        stops.set()
        assert goes_on.wait(10.0)
        return n_bytes + read(file, [payload[len(payload) // 2 :]], n_bytes)

    engine = open_object_store(tmp_path.as_uri(), 10.0, 10.0)
    with ThreadPoolExecutor(4) as threads:
        rig = RemoteRig(engine, threads)
        ticket = rig.begin_write(keys(2))
        wait_until(lambda: [e.ticket for e in rig.store.poll()] == [ticket])
        monkeypatch.setattr(os, "preadv", stalling)
        slots = rig.slots(1)
        rig.store.get(7, [key(0)], slots)
        assert stops.wait(10.0)
        rig.clock.advance(3.0)
        (ended,) = rig.store.poll()
        assert (ended.ticket, ended.outcomes) == (7, [TIMED_OUT])
        slots[0][:] = content(key(1))  # the slot has another block now
        monkeypatch.undo()
        rig.store.get(8, [key(1)], others := rig.slots(1))
        wait_until(lambda: [e.ticket for e in rig.store.poll()] == [8])
        goes_on.set()
        assert rig.store.close(10.0), "the late read has ended"
    assert slots[0] == others[0] == content(key(1))


class _Endless(BaseHTTPRequestHandler):
    """Answers each list with a page and the promise of another one, and each read with 1 GiB."""

    protocol_version = "HTTP/1.1"
    sent_bytes = 0
    pages = 0

    def do_GET(self) -> None:
        kind = type(self)
        if "list-type=2" not in self.path:
            self._answer(1 << 30)
            for _ in range(1 << 10):
                try:
                    self.wfile.write(bytes(1 << 20))
                except OSError:
                    return
                kind.sent_bytes += 1 << 20
            return
        kind.pages += 1
        page = "".join(
            f"<Contents><Key>pre/fix/a/{kind.pages:06d}{i:04d}</Key><Size>0</Size>"
            "<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for i in range(1000)
        )
        body = (
            f"<ListBucketResult><IsTruncated>true</IsTruncated>{page}"
            f"<NextContinuationToken>{kind.pages}</NextContinuationToken></ListBucketResult>"
        ).encode()
        self._answer(len(body))
        self.wfile.write(body)

    def _answer(self, n_bytes: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(n_bytes))
        self.send_header("ETag", "x")
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def test_a_server_whose_answers_do_not_end_costs_the_limit() -> None:
    with ThreadingHTTPServer((HOST, 0), _Endless) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            engine = bucket_at(f"http://{HOST}:{server.server_port}", "bucket", timeout_s=5.0)
            assert engine.get_into(names(1), buffers(1), LIMIT_S) == [RemoteOutcome.CORRUPT]
            assert _Endless.sent_bytes < 100 << 20, "what is too long is not read"
            begun_s = monotonic()
            assert engine.counter("a", 1, 0.5).outcome is TIMED_OUT
            assert engine.advance("a", 1, 0.5).outcome is TIMED_OUT
            assert monotonic() - begun_s < 1.0 + 2 * SLACK_S
            calls = 2
            while _Endless.pages <= calls:  # a slow machine needs longer for a second page
                assert calls < CALLS_MAX
                assert engine.counter("a", 1, 0.5 * calls).outcome is TIMED_OUT
                calls += 1
            assert engine.counter("b", 1, LIMIT_S).outcome is IO_ERROR, "the list is that of a"
            engine.close()
        finally:
            server.shutdown()
            thread.join(10.0)


def test_an_engine_that_is_closed_ends_what_waits() -> None:
    is_over = threading.Event()

    def serve(server: socket.socket) -> None:
        with server.accept()[0]:
            is_over.wait(10.0)

    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as caller:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        endpoint = f"http://{HOST}:{server.getsockname()[1]}"
        engine = bucket_at(endpoint, "bucket", timeout_s=1.0)
        called = caller.submit(engine.exist_many, names(10 * REQUESTS_AT_A_TIME), LIMIT_S)
        wait_until(lambda: engine._threads._work_queue.qsize() >= 84)
        engine.close()
        assert {*called.result(10.0)} <= {TIMED_OUT, IO_ERROR}
        is_over.set()
        thread.join(10.0)


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status that the last part of its path names."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = int(self.path.rpartition("/")[2])
        self.server.seen.append(status)  # type: ignore[attr-defined]
        body = b"<Error><Code>SlowDown</Code></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def refusing() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer((HOST, 0), _Refusing)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10.0)
    server.server_close()


@pytest.mark.parametrize(
    "status, read, written",
    [
        (401, DENIED, DENIED),
        (403, DENIED, DENIED),
        (404, ABSENT, DENIED),
        (409, RemoteOutcome.EXISTS, RemoteOutcome.EXISTS),
        (412, RemoteOutcome.EXISTS, RemoteOutcome.EXISTS),
        (429, RemoteOutcome.BUSY, RemoteOutcome.BUSY),
        (500, IO_ERROR, IO_ERROR),
        (503, RemoteOutcome.BUSY, RemoteOutcome.BUSY),
        (507, RemoteOutcome.NO_SPACE, RemoteOutcome.NO_SPACE),
    ],
)
def test_what_a_status_means(
    refusing: ThreadingHTTPServer, status: int, read: RemoteOutcome, written: RemoteOutcome
) -> None:
    engine = bucket_at(f"http://{HOST}:{refusing.server_port}", "bucket")
    assert engine.get_into([str(status)], buffers(1), LIMIT_S) == [read]
    assert engine.exist_many([str(status)], LIMIT_S) == [read]
    assert engine.put([str(status)], [an_object(1)], LIMIT_S) == [written]
    assert refusing.seen == [status] * 3, "nothing is tried twice"  # type: ignore[attr-defined]
    engine.close()


def test_credentials_come_from_the_environment_too(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    s3.make_bucket("of-environment")
    engine = open_object_store("s3://of-environment", 10.0, 10.0, s3.endpoint, "us-east-1")
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [OK]
    engine.close()


def test_credentials_are_shown_nowhere(s3: S3Server) -> None:
    engine = open_object_store("s3://b", 1.0, 1.0, s3.endpoint, settings=SECRETS)
    assert "in-test" not in repr(engine)
    engine.close()
    with pytest.raises(ConfigError) as caught:
        bucket_at(s3.endpoint, "b", no_such_setting="secret-in-test")
    assert "in-test" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "url, settings",
    [
        ("gs://bucket/prefix", {"skip_signature": "true"}),
        ("az://container/prefix", {"account_name": "account", "skip_signature": "true"}),
    ],
)
def test_other_providers_open_without_asking_anything(url: str, settings: dict[str, str]) -> None:
    open_object_store(url, 1.0, 1.0, settings=settings).close()
