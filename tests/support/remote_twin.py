"""`RemoteTwin`: a remote engine in a dict, which does every bad thing that a test asks for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kvcascade.tiers.remote.base import (
    HEADER_BYTES,
    Arrived,
    Cause,
    CounterAnswer,
    Listing,
    PrivateBuffer,
    RemoteEngine,
    RemoteEntry,
    RemoteObject,
    RemoteOutcome,
    ignore,
)

LISTED_AT_A_TIME = 3
OK, ABSENT = RemoteOutcome.OK, RemoteOutcome.ABSENT


class RemoteTwin(RemoteEngine):
    """Objects in memory; several stores may share one, as hosts share a server."""

    def __init__(self, *, asks_in_one_trip: bool = True, names_per_call: int = 4) -> None:
        self.asks_in_one_trip = asks_in_one_trip
        self.names_per_call = names_per_call
        self.timeout_s = 1.0
        self.held: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.asked: list[str] = []
        """Every name of `exist_many`, in order."""
        self.fails: dict[str, RemoteOutcome] = {}
        """Outcome of every key of a method, by its name."""
        self.lies: dict[str, RemoteOutcome] = {}
        """Wrong answers of `exist_many`."""
        self.touched_s: dict[str, float | None] = {}
        """Time of the last write of an object, as a list says it; now if it is not here."""
        self.cause: Cause | None = None
        """Answer of `explain`."""
        self.damage: Callable[[bytes], bytes] | None = None
        """Changes each object on its way out: flips, truncates, swaps."""
        self.writes_late = False
        """Reads end with `TIMED_OUT`, and `write_late` writes to their buffers nevertheless."""
        self.before: Callable[[str], None] = lambda method: None
        """Called at the begin of each method, in the thread of the caller."""
        self.is_closed = False
        self.ticks = count()
        """Microseconds that went by unnoticed, for all hosts."""
        self._late: list[PrivateBuffer] = []
        self._lock = threading.Lock()

    def write_late(self, data: bytes) -> int:
        """Write into every buffer of a read that was given up; return how many there were."""
        late, self._late = self._late, []
        for buffer in late:
            header, payload = buffer.allocate()
            header[:] = data[: len(header)].ljust(len(header), b"\xbd")
            payload[:] = data[: len(payload)].ljust(len(payload), b"\xbd")
        return len(late)

    def exist_many(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        self._called("exist_many")
        self.asked += names
        if "exist_many" in self.fails:
            return [self.fails["exist_many"]] * len(names)
        with self._lock:
            return [self.lies.get(n, OK if n in self.held else ABSENT) for n in names]

    def get_into(
        self,
        names: Sequence[str],
        buffers: Sequence[PrivateBuffer],
        limit_s: float,
        arrived: Arrived = ignore,
    ) -> list[RemoteOutcome]:
        self._called("get_into")
        if self.writes_late:
            self._late += (buffers[number] for number in range(len(names)))
            return [RemoteOutcome.TIMED_OUT] * len(names)
        if "get_into" in self.fails:
            return [self.fails["get_into"]] * len(names)
        outcomes: list[RemoteOutcome] = []
        for number, name in enumerate(names):
            outcomes.append(self._get(name, buffers[number]))
            if outcomes[-1] is OK:
                arrived(number)
        return outcomes

    def _get(self, name: str, buffer: PrivateBuffer) -> RemoteOutcome:
        with self._lock:
            data = self.held.get(name)
        if data is None:
            return ABSENT
        data = data if self.damage is None else self.damage(data)
        if len(data) != HEADER_BYTES + buffer.payload_bytes:
            return RemoteOutcome.CORRUPT
        header, payload = buffer.allocate()
        header[:], payload[:] = data[:HEADER_BYTES], data[HEADER_BYTES:]
        return OK

    def put(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        self._called("put")
        if "put" in self.fails:
            return [self.fails["put"]] * len(names)
        return [self._put(name, objects, number) for number, name in enumerate(names)]

    def _put(self, name: str, objects: Sequence[RemoteObject], number: int) -> RemoteOutcome:
        with self._lock:
            if name in self.held:
                return RemoteOutcome.EXISTS
            made = objects[number]
            self.held[name] = made.header + bytes(made.payload)
        return OK

    def remove(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        self._called("remove")
        if "remove" in self.fails:
            return [self.fails["remove"]] * len(names)
        with self._lock:
            for name in names:
                self.held.pop(name, None)
        return [OK] * len(names)

    def counter(self, name: str, first: int | None, limit_s: float) -> CounterAnswer:
        self._called("counter")
        if "counter" in self.fails:
            return CounterAnswer(self.fails["counter"])
        with self._lock:
            if first is not None:
                self.counters.setdefault(name, first)
            if name not in self.counters:
                return CounterAnswer(ABSENT)
            return CounterAnswer(OK, self.counters[name])

    def advance(self, name: str, at_least: int, limit_s: float) -> CounterAnswer:
        self._called("advance")
        if "advance" in self.fails:
            return CounterAnswer(self.fails["advance"])
        with self._lock:
            value = max(self.counters.get(name, 0) + 1, at_least)
            self.counters[name] = value
        return CounterAnswer(OK, value)

    def list_objects(self, prefix: str, limit_s: float) -> Iterator[Listing]:
        """Yield batches; `fails["list_objects"]` ends the list after the first one."""
        self._called("list_objects")
        with self._lock:
            found = [
                RemoteEntry(name, len(data), self.touched_s.get(name, time.time()))
                for name, data in self.held.items()
                if name.startswith(prefix)
            ]
        for start in range(0, len(found), LISTED_AT_A_TIME):
            yield Listing(OK, found[start : start + LISTED_AT_A_TIME])
            if "list_objects" in self.fails:
                break
        if "list_objects" in self.fails:
            yield Listing(self.fails["list_objects"])

    def measure(self, entries: Sequence[RemoteEntry], limit_s: float) -> list[int | RemoteOutcome]:
        self._called("measure")
        if "measure" in self.fails:
            return [self.fails["measure"]] * len(entries)
        return super().measure(entries, limit_s)

    def explain(self, limit_s: float) -> Cause | None:
        self._called("explain")
        return self.cause

    def close(self) -> None:
        self.is_closed = True

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        self.before(method)
