"""Objects in a bucket or a folder, through `obstore`: S3 and compatibles, GCS, Azure, `file://`.

An object of the store is header and payload in one. `obstore` returns each body in memory of its
own, so a request that was given up writes nowhere. Files are read into the buffer of the call,
which is thrown away if its read fails. Timeouts and retries are always set here, because the
defaults of `obstore` wait for minutes.

A counter is a folder of empty objects whose names are its values. A value is taken by a conditional
create, which one process wins. The content of `begin` counts until there is a value. `obstore` does
not sync files, so a host that loses power may leave `begin` without content. Such a counter counts
as lost: it goes on at a value, which outranks `begin`.

The first request creates a folder that is missing. Before each later one, `OpenedFolder` makes sure
that it is still there.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from ....config.remote import RemoteTierOptions, WriteWhen
from ....errors import ConfigError
from ....logs import get_logger
from ....threads import started_pool
from ..base import (
    COUNTER_DIGITS,
    FAILURES,
    HEADER_BYTES,
    MAX_COUNTER,
    Arrived,
    Cause,
    CounterAnswer,
    EngineKind,
    Listing,
    PrivateBuffer,
    RemoteEngine,
    RemoteEntry,
    RemoteObject,
    RemoteOutcome,
    Secret,
    counter_answer,
    ignore,
)
from .opened_folder import OTHER_FOLDER, READ_FLAGS, OpenedFolder, folder_of_url

REQUESTS_AT_A_TIME = 64
"""A lookup of one chain has 8; those of several requests share them."""
FILES_BYTES = 2 << 20
"""Payload of the files that one call moves. A call costs about half as much processor time as a
file of 512 KiB."""
LISTED_AT_A_TIME = 1000
"""Objects per batch of a list, as in one answer of S3."""
RENEW_AFTER_S = 6 * 3600.0
"""Age at which an object that is in use is written anew. Lifecycle rules count in days."""
ADVANCE_TRIES = 16
"""Limit on the attempts to take the next value of a counter that others raise too."""
_STATUS = re.compile(r"status code: (\d{3})")
_ERRNO = re.compile(r"os error (\d+)\)")
_OUTCOMES = {
    "AlreadyExistsError": RemoteOutcome.EXISTS,
    "PreconditionError": RemoteOutcome.EXISTS,
    "FileNotFoundError": RemoteOutcome.ABSENT,
    "NotFoundError": RemoteOutcome.ABSENT,
    "PermissionDeniedError": RemoteOutcome.DENIED,
    "PermissionError": RemoteOutcome.DENIED,
    "UnauthenticatedError": RemoteOutcome.DENIED,
}
_STATUS_OUTCOMES = {
    "401": RemoteOutcome.DENIED,
    "403": RemoteOutcome.DENIED,
    "408": RemoteOutcome.TIMED_OUT,
    "429": RemoteOutcome.BUSY,
    "503": RemoteOutcome.BUSY,
    "507": RemoteOutcome.NO_SPACE,
}
_ERRNO_OUTCOMES = {
    errno.EACCES: RemoteOutcome.DENIED,
    errno.EROFS: RemoteOutcome.DENIED,
    errno.ENOSPC: RemoteOutcome.NO_SPACE,
    errno.EDQUOT: RemoteOutcome.NO_SPACE,
}
"""Errors of a folder that another try does not mend."""
_NO_FILE = frozenset({errno.ELOOP, errno.ESPIPE, errno.EISDIR})
"""Errors of a link, a pipe and a folder that are read as a file."""
_CAUSES = {
    "NoSuchBucket": Cause.NO_BUCKET,
    "ContainerNotFound": Cause.NO_BUCKET,
    "RequestTimeTooSkewed": Cause.CLOCK,
    "AuthorizationHeaderMalformed": Cause.REGION,
    "PermanentRedirect": Cause.REGION,
    "InvalidAccessKeyId": Cause.CREDENTIALS,
    "SignatureDoesNotMatch": Cause.CREDENTIALS,
    "ExpiredToken": Cause.CREDENTIALS,
    "InvalidToken": Cause.CREDENTIALS,
    "AuthenticationFailed": Cause.CREDENTIALS,
    "AccessDenied": Cause.RIGHT,
    "AuthorizationPermissionMismatch": Cause.RIGHT,
    f"os error {errno.EACCES})": Cause.FOLDER,
    f"[Errno {errno.EACCES}]": Cause.FOLDER,
    f"os error {errno.EROFS})": Cause.FOLDER,
    OTHER_FOLDER: Cause.OTHER_FOLDER,
    "InvalidCertificate": Cause.CERTIFICATE,
    "169.254.169.254": Cause.NO_CREDENTIALS,
    "metadata.google.internal": Cause.NO_CREDENTIALS,
}
"""Words in an error of `obstore` or of a folder.

The last two are the places of roles, which are asked last."""
_COUNTED = frozenset({RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.CORRUPT})
"""Answers about a counter after which its next value is known."""
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
"""Names of the folders of namespaces."""
_STAGED = re.compile(r"[0-9a-f]{32}/.+#\d+")
"""Names of files in which `obstore` writes objects of a namespace, until they are complete."""
_GENERATION = re.compile(r"([0-9a-f]{32}/[0-9a-f]{1,16})(?:/[0-9a-f]{2})?")
"""Names of the folders of a generation."""
_EXPLAINED = "kvcascade-check/explain"
"""Name of an object that is never there."""

_log = get_logger(__name__)

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def open_object_store(
    url: str,
    timeout_s: float,
    connect_timeout_s: float,
    endpoint: str | None = None,
    region: str | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    renews: bool = True,
) -> ObjectStoreEngine:
    """Return the engine for a URL such as "s3://bucket/prefix" or "file:///mnt/nfs/kv".

    `endpoint`: URL of the server; None: the provider's own. `settings`: more settings of the store,
    such as credentials. Those that are not given come from the environment or the platform's role,
    as `obstore` finds them. `renews`: see the constructor of `ObjectStoreEngine`.

    Nothing is asked of the server or the file system. Needs `obstore`. Raises `ConfigError`,
    without any credential in it, if `obstore` refuses the settings of a bucket.
    """
    stores: Any = import_module("obstore.store")
    path = folder_of_url(url)
    if path is not None:
        folder = OpenedFolder(path)

        def open_folder() -> Any:
            with suppress(OSError):  # waits for a share without the interpreter lock
                folder.path.stat()
            if folder.is_known:
                folder.check()  # nothing is made in another one
            opened = stores.LocalStore(str(folder.path), mkdir=True)
            folder.note_opened()
            return opened

        return ObjectStoreEngine(open_folder, timeout_s, folder, renews=renews)
    limits = timedelta(seconds=timeout_s), timedelta(seconds=connect_timeout_s)
    try:
        bucket = _bucket(stores, urlsplit(url), limits, endpoint, region, settings or {})
    except Exception as error:  # classes differ by store, and their texts may hold settings
        raise ConfigError(
            f"the object store refuses its settings ({type(error).__name__}); check url, endpoint, "
            "region and the credentials in the environment."
        ) from None
    return ObjectStoreEngine(lambda: bucket, timeout_s, renews=renews)


def _bucket(
    stores: Any,
    parts: SplitResult,
    limits: tuple[timedelta, timedelta],
    endpoint: str | None,
    region: str | None,
    given: Mapping[str, str],
) -> Any:
    timeout, connect_timeout = limits
    is_plain = (endpoint or "").startswith("http://")
    settings: dict[str, Any] = dict(given)
    if endpoint:
        settings["endpoint"] = endpoint
    if parts.scheme == "s3":
        # Where TLS protects the payload, signing it too would cost half of the rate.
        settings["unsigned_payload"] = not is_plain
        if region:
            settings["region"] = region
        if endpoint:
            settings.setdefault("virtual_hosted_style_request", False)
    kind = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}[parts.scheme]
    return getattr(stores, kind)(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        client_options={
            "allow_http": is_plain,
            "timeout": timeout,
            "connect_timeout": connect_timeout,
        },
        retry_config={"max_retries": 0, "retry_timeout": timeout},
        **settings,
    )


class ObjectStoreEngine(RemoteEngine):
    """One bucket or folder; a call with many names has up to `REQUESTS_AT_A_TIME` in flight.

    `get_into` and `put` move files one after the other.
    """

    asks_in_one_trip = False
    names_per_call = 1

    def __init__(
        self,
        open_store: Callable[[], Any],
        timeout_s: float,
        folder: OpenedFolder | None = None,
        *,
        renews: bool,
    ) -> None:
        """`open_store` returns one of `obstore.store`, which ends each request in `timeout_s`.

        It is called by the first request, and again if it raises: a share may not answer yet.
        `folder`: place of the store's objects, if they are files; `open_store` notes its opening.
        `renews`: objects that are in use are written anew when they are old.
        """
        self.timeout_s = timeout_s
        if folder is not None:
            self.bytes_per_call = FILES_BYTES
        self._folder = folder
        self._renews = renews
        self._open_store = open_store
        self._opened: Any = None
        self._obstore: Any = import_module("obstore")
        self._largest: dict[str, str] = {}
        """Largest value that was seen of each counter, as it is named: lists begin with it."""
        self._begins: dict[str, tuple[tuple[Any, ...] | None, bytes | None]] = {}
        """Version of the object that began each counter, and its content."""
        self._threads = started_pool(REQUESTS_AT_A_TIME, "kvcascade-remote-request")

    def exist_many(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        return self._each(lambda name: self._tried(lambda: self._head(name)), names, limit_s)

    def get_into(
        self,
        names: Sequence[str],
        buffers: Sequence[PrivateBuffer],
        limit_s: float,
        arrived: Arrived = ignore,
    ) -> list[RemoteOutcome]:
        opened, store = self._asked(lambda: self._store)

        def get(number: int) -> RemoteOutcome:
            if store is None:
                return opened
            name, buffer = names[number], buffers[number]
            outcome, is_whole = self._asked(lambda: self._read(store, name, buffer))
            if outcome is RemoteOutcome.OK:
                if not is_whole:
                    return RemoteOutcome.CORRUPT
                arrived(number)
            return outcome

        return self._moved(get, range(len(names)), limit_s)

    def put(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        def put(number: int) -> RemoteOutcome:
            return self._create(names[number], _data(objects[number]))

        return self._moved(put, range(len(names)), limit_s)

    def renew(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        def renew(number: int) -> RemoteOutcome:
            name = names[number]
            outcome, found = self._asked(lambda: self._head(name))
            if outcome is RemoteOutcome.ABSENT:
                return self._create(name, _data(objects[number]))
            if found is None:
                return outcome
            kept = self._keep(name, lambda: _data(objects[number]), found)
            return RemoteOutcome.EXISTS if kept is RemoteOutcome.OK else kept

        return self._each(renew, range(len(names)), limit_s)

    def remove(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        def remove(name: str) -> RemoteOutcome:
            outcome = self._tried(lambda: self._obstore.delete(self._store, [name]))
            return RemoteOutcome.OK if outcome is RemoteOutcome.ABSENT else outcome

        return self._each(remove, names, limit_s)

    def counter(self, name: str, first: int | None, limit_s: float) -> CounterAnswer:
        ends_s = time.monotonic() + limit_s
        found = self._values(name, ends_s)
        is_damaged = found.outcome is RemoteOutcome.CORRUPT
        if found.outcome is not RemoteOutcome.ABSENT and not is_damaged:
            return found
        if first is None:
            return replace(found, outcome=RemoteOutcome.ABSENT)
        if time.monotonic() >= ends_s:
            return replace(found, outcome=RemoteOutcome.TIMED_OUT)
        # One fixed name decides who begins the counter, whatever value each would begin at. If it
        # is damaged, the greatest value decides.
        begin = f"{name}/begin", str(first).encode()
        place = (_value_name(name, first), b"") if is_damaged else begin
        begun, sent = self._create(*place), found.requests + 1
        if begun not in (RemoteOutcome.OK, RemoteOutcome.EXISTS):
            return CounterAnswer(begun, requests=sent)
        return _after(sent, self._values(name, ends_s))

    def advance(self, name: str, at_least: int, limit_s: float) -> CounterAnswer:
        ends_s, sent = time.monotonic() + limit_s, 0
        for _ in range(ADVANCE_TRIES):
            found = self._values(name, ends_s)
            sent += found.requests
            if found.outcome not in _COUNTED:
                return replace(found, requests=sent)
            if time.monotonic() >= ends_s:
                return CounterAnswer(RemoteOutcome.TIMED_OUT, requests=sent)
            value = max(found.value + 1, at_least)
            if value > MAX_COUNTER:
                return CounterAnswer(RemoteOutcome.CORRUPT, requests=sent)
            taken = self._create(_value_name(name, value), b"")
            sent += 1
            if taken is RemoteOutcome.OK:
                return CounterAnswer(RemoteOutcome.OK, value, sent)
            if taken is not RemoteOutcome.EXISTS:
                return CounterAnswer(taken, requests=sent)
        return CounterAnswer(RemoteOutcome.BUSY, requests=sent)

    def list_objects(self, prefix: str, limit_s: float) -> Iterator[Listing]:
        def lists() -> Iterator[Any]:
            store, prefixes = self._store, [prefix or None]
            if self._folder is not None and not prefix:
                # A share can hold folders of others, on which a list of everything fails: links in
                # a circle, names that are no text, and what this user may not read (`lost+found`).
                prefixes = [*filter(_NAMESPACE.fullmatch, os.listdir(self._folder.path))]
            for each in prefixes:
                yield from self._obstore.list(store, each, chunk_size=LISTED_AT_A_TIME)

        batches = lists()
        while True:
            outcome, found = self._asked(lambda: next(batches, None))
            if outcome is not RemoteOutcome.OK:
                missing = outcome is RemoteOutcome.ABSENT
                yield Listing(RemoteOutcome.DENIED if missing else outcome)
                return
            if found is None:
                return
            yield Listing(RemoteOutcome.OK, [_entry(each) for each in found])

    def sweep(
        self,
        namespace: str,
        older_than_s: float,
        is_old: Callable[[str], bool],
        *,
        is_dry_run: bool,
    ) -> list[int]:
        swept: list[int] = []
        if self._folder is None:
            return swept
        for place, _, files in os.walk(self._folder.path, topdown=False):
            for path in (os.path.join(place, file) for file in files if "#" in file):
                name = os.path.relpath(path, self._folder.path)
                if not (_STAGED.fullmatch(name) and name.startswith(namespace)):
                    continue
                with suppress(OSError):  # its writer has ended
                    found = os.stat(path)
                    if time.time() - found.st_mtime >= older_than_s:
                        if not is_dry_run:
                            os.unlink(path)
                        swept.append(found.st_size)
            of = _GENERATION.fullmatch(os.path.relpath(place, self._folder.path))
            if of and of[1].startswith(namespace) and not is_dry_run and is_old(of[1]):
                with suppress(OSError):  # it is not empty
                    os.rmdir(place)
        return swept

    def explain(self, limit_s: float) -> Cause | None:
        try:
            if self._folder is not None:
                self._head(_EXPLAINED)
            else:  # the answer to a HEAD has no body, and with it no reason
                self._obstore.get(self._store, _EXPLAINED)
        except Exception as error:  # see `_asked`
            text = str(error)
            return next((cause for word, cause in _CAUSES.items() if word in text), None)
        return None

    def memory(self) -> bytes:
        return b"" if self._folder is None else self._folder.memory()

    def resume(self, memory: bytes) -> None:
        if self._folder is not None:
            self._folder.resume(memory)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _store(self) -> Any:
        """The store, opened by the first request. Threads that come together open one each.

        Raises `OSError` if its folder is not the one that was opened.
        """
        if self._opened is None:
            self._opened = self._open_store()
        elif self._folder is not None:
            self._folder.check()
        return self._opened

    def _read(self, store: Any, name: str, buffer: PrivateBuffer) -> bool:
        """Read an object; False, and without its bytes, if it has another length."""
        if self._folder is not None:
            return _read_file(f"{self._folder.path}/{name}", buffer)
        got = self._obstore.get(store, name)
        if got.meta["size"] != HEADER_BYTES + buffer.payload_bytes:
            return False
        return buffer.adopt(memoryview(got.bytes()))

    def _moved(
        self, one: Callable[[_Item], RemoteOutcome], items: Sequence[_Item], limit_s: float
    ) -> list[RemoteOutcome]:
        """Move payloads: objects of a bucket as `_each`, files one after the other.

        Files are moved by several calls at a time already.
        """
        if self._folder is None:
            return self._each(one, items, limit_s)
        ends_s, outcomes = time.monotonic() + limit_s, list[RemoteOutcome]()
        for item in items:
            is_late, answers = time.monotonic() >= ends_s, not FAILURES.issuperset(outcomes)
            late = RemoteOutcome.BUSY if answers else RemoteOutcome.TIMED_OUT
            outcomes.append(late if is_late else one(item))
        return outcomes

    def _each(
        self, one: Callable[[_Item], RemoteOutcome], items: Sequence[_Item], limit_s: float
    ) -> list[RemoteOutcome]:
        """Do one request for each item, many at a time; those that begin too late are not done."""
        ends_s = time.monotonic() + limit_s

        def in_time(item: _Item) -> RemoteOutcome:
            return one(item) if time.monotonic() < ends_s else RemoteOutcome.TIMED_OUT

        if len(items) == 1:
            return [in_time(items[0])]
        try:
            return [*self._threads.map(in_time, items)]
        except (RuntimeError, CancelledError):  # closed meanwhile
            return [RemoteOutcome.IO_ERROR] * len(items)

    def _head(self, name: str) -> Mapping[str, Any]:
        """Return when an object was written. A file is not opened: see `_read_file`."""
        store = self._store
        if self._folder is None:
            found: Mapping[str, Any] = self._obstore.head(store, name)
            return found
        written_s = os.lstat(f"{self._folder.path}/{name}").st_mtime
        return {"last_modified": datetime.fromtimestamp(written_s, UTC)}

    def _create(self, name: str, data: Any) -> RemoteOutcome:
        outcome = self._tried(
            lambda: self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
        )
        # A bucket that does not exist is "not found" to a write.
        return RemoteOutcome.DENIED if outcome is RemoteOutcome.ABSENT else outcome

    def _values(self, name: str, ends_s: float) -> CounterAnswer:
        """Return the largest value of a counter, from a list of its folder.

        A list that takes too long goes on with the next call. `CORRUPT`: the counter has no value,
        and its `begin` is damaged.
        """
        known, pages = self._largest.get(name), 0
        entries: dict[str, Any] = {}

        def look() -> None:
            nonlocal pages
            size = LISTED_AT_A_TIME
            # The names behind an offset do not include it.
            offset = None if known is None else f"{name}/{known[:-1]}"
            for batch in self._obstore.list(
                self._store, f"{name}/", offset=offset, chunk_size=size
            ):
                pages += 1
                entries.update((_word_in(name, str(entry["path"])), entry) for entry in batch)
                if len(batch) == size and time.monotonic() >= ends_s:  # there may be more
                    raise TimeoutError("timed out")

        outcome = self._tried(look)
        sent = max(1, pages)
        values = [word for word in entries if _is_value(word)]
        largest = max(values, key=int, default="")
        if largest:
            self._largest[name] = largest
        if outcome is not RemoteOutcome.OK:
            missing = outcome is RemoteOutcome.ABSENT
            return CounterAnswer(RemoteOutcome.DENIED if missing else outcome, requests=sent)
        if not values and known is not None:  # it was lost
            self._largest.pop(name, None)
            return _after(sent, self._values(name, ends_s))
        if not values and "begin" in entries:
            return _after(sent, self._begun(name, entries["begin"]))
        if not values:
            return CounterAnswer(RemoteOutcome.ABSENT, requests=sent)
        if self._folder is not None:
            self._folder.note_counter(name, f"{name}/{largest}")
        self._keep(f"{name}/{largest}", bytes, entries[largest])
        return CounterAnswer(RemoteOutcome.OK, int(largest), sent)

    def _begun(self, name: str, entry: Mapping[str, Any]) -> CounterAnswer:
        """Return the value at which a counter began; it is read once."""
        version, requests = (entry["e_tag"], entry["last_modified"]), 0
        known, found = self._begins.get(name, (None, None))

        def read() -> bytes:
            got = self._obstore.get(self._store, f"{name}/begin")
            return bytes(got.bytes()) if got.meta["size"] <= COUNTER_DIGITS else b""

        if found is None or known != version or version[0] is None:
            outcome, found = self._asked(read)
            requests = 1
            if found is None:
                return CounterAnswer(outcome)
            self._begins[name] = version, found
        answer = counter_answer(found)
        if answer.outcome is RemoteOutcome.OK:
            if self._folder is not None:
                self._folder.note_counter(name, f"{name}/begin", found)
            self._keep(f"{name}/begin", lambda: found, entry)
        elif requests:
            _log.warning("%s/begin of a remote tier is damaged; its counter counts as lost", name)
        return replace(answer, requests=requests)

    def _keep(self, name: str, data: Callable[[], Any], entry: Mapping[str, Any]) -> RemoteOutcome:
        """Write an old object anew, because lifecycle rules count from its last writing."""
        age_s = time.time() - entry["last_modified"].timestamp()
        if not self._renews or age_s < RENEW_AFTER_S:
            return RemoteOutcome.OK
        again, put = data(), self._obstore.put
        return self._tried(lambda: put(self._store, name, again, use_multipart=False))

    def _tried(self, request: Callable[[], object]) -> RemoteOutcome:
        return self._asked(request)[0]

    def _asked(self, request: Callable[[], _Answer]) -> tuple[RemoteOutcome, _Answer | None]:
        """Return the outcome of a request and its answer; None if it failed."""
        try:
            return RemoteOutcome.OK, request()
        except Exception as error:  # obstore raises its own classes, OSError and ValueError
            return outcome_of(error), None


def _read_file(path: str, buffer: PrivateBuffer) -> bool:
    """Read into the buffer's own memory, which is in the processor's cache from the last read.

    `obstore` would allocate new memory for each object: that took twice as long at 512 KiB. False
    for what is no plain file. Whoever may write to a share can leave a link there, or a pipe, whose
    opening could wait for ever.

    Each call to the system lets another thread take the interpreter lock, so there are three. One
    more byte is asked for, which a longer file has.
    """
    try:
        file = os.open(path, READ_FLAGS)
        try:
            n_bytes = HEADER_BYTES + buffer.payload_bytes
            if os.preadv(file, (*buffer.allocate(), bytearray(1)), 0) == n_bytes:
                return True
            if os.fstat(file).st_size == n_bytes:
                raise OSError("only a part of the file was read")
        finally:
            os.close(file)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    return False


def _data(made: RemoteObject) -> list[bytes | memoryview]:
    return [made.header, made.payload]


def _after(requests: int, answer: CounterAnswer) -> CounterAnswer:
    """Return an answer that took some more requests before it."""
    return replace(answer, requests=requests + answer.requests)


def _entry(listed: Mapping[str, Any]) -> RemoteEntry:
    return RemoteEntry(listed["path"], listed["size"], listed["last_modified"].timestamp())


def _value_name(name: str, value: int) -> str:
    return f"{name}/{value:0{COUNTER_DIGITS}d}"


def _word_in(name: str, path: str) -> str:
    """Return the name of an object below the folder of a counter.

    Raises `OSError` if it is in another folder: the answer is that of another list.
    """
    if not path.startswith(f"{name}/"):
        raise OSError("the server listed another folder")
    return path.removeprefix(f"{name}/")


def _is_value(word: str) -> bool:
    return counter_answer(word.encode()).outcome is RemoteOutcome.OK


def outcome_of(error: Exception) -> RemoteOutcome:
    """Return the outcome that an error of `obstore` means. Its text is read, but never shown."""
    text = str(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return RemoteOutcome.DENIED
    status = _STATUS.search(text)
    if status and status[1] in _STATUS_OUTCOMES:
        return _STATUS_OUTCOMES[status[1]]
    code = _ERRNO.search(text)
    if code and int(code[1]) in _ERRNO_OUTCOMES:
        return _ERRNO_OUTCOMES[int(code[1])]
    for kind in type(error).__mro__:
        if kind.__name__ in _OUTCOMES:
            return _OUTCOMES[kind.__name__]
    if "timed out" in text or "TimedOut" in text:
        return RemoteOutcome.TIMED_OUT
    return RemoteOutcome.IO_ERROR


def _open(options: RemoteTierOptions, secret: Secret) -> ObjectStoreEngine:
    limits = options.timeout_s, options.connect_timeout_s
    renews = options.writes is not WriteWhen.OFF
    place = options.endpoint, options.region
    return open_object_store(options.url, *limits, *place, renews=renews)


KIND = EngineKind(_open, "obstore", "s3", renew_after_s=RENEW_AFTER_S)
