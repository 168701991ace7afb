"""Contract of every `RemoteEngine`. Subclass `RemoteContract` and give an `engine` fixture.

The engine holds nothing at first.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcascade.tiers.remote.base import (
    HEADER_BYTES,
    Cause,
    Listing,
    PrivateBuffer,
    RemoteEngine,
    RemoteObject,
    RemoteOutcome,
)

LIMIT_S = 10.0
PAYLOAD_BYTES = 128 << 10
CLOCKS_S = 60.0
"""Difference between the times of a server and of this process that passes."""
OK, ABSENT, EXISTS = RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.EXISTS


def names(n: int, start: int = 0) -> list[str]:
    return [f"space/1/{i % 7:02x}/{i:064x}" for i in range(start, start + n)]


def an_object(seed: int, payload_bytes: int = PAYLOAD_BYTES) -> RemoteObject:
    draw = random.Random(seed)
    return RemoteObject(draw.randbytes(HEADER_BYTES), memoryview(draw.randbytes(payload_bytes)))


class Only(Sequence[RemoteObject]):
    """Objects of which an engine may take this one alone, once: the others are there."""

    def __init__(self, number: int) -> None:
        self._left = [number]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: Any) -> Any:
        self._left.remove(at)
        return an_object(at + 1)


def buffers(n: int, payload_bytes: int = PAYLOAD_BYTES) -> list[PrivateBuffer]:
    return [PrivateBuffer(payload_bytes) for _ in range(n)]


def is_same(buffer: PrivateBuffer, wanted: RemoteObject) -> bool:
    return buffer.header == wanted.header and buffer.payload == wanted.payload


class RemoteContract(ABC):
    """The shared suite."""

    @abstractmethod
    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        """Store these bytes under a name, whatever they are; fewer than a header: half a pair."""

    def test_an_absent_object_is_absent(self, engine: RemoteEngine) -> None:
        assert engine.exist_many(names(3), LIMIT_S) == [ABSENT] * 3
        assert engine.get_into(names(2), buffers(2), LIMIT_S) == [ABSENT] * 2

    def test_what_was_put_comes_back(self, engine: RemoteEngine) -> None:
        objects = [an_object(i) for i in range(5)]
        assert engine.put(names(5), objects, LIMIT_S) == [OK] * 5
        assert engine.exist_many(names(7), LIMIT_S) == [OK] * 5 + [ABSENT] * 2
        taken = buffers(5)
        order = [3, 0, 4, 1, 2]
        some = [names(5)[i] for i in order]
        assert engine.get_into(some, taken, LIMIT_S) == [OK] * 5
        assert all(is_same(b, objects[i]) for b, i in zip(taken, order, strict=True))

    def test_each_object_is_handed_over_when_it_is_complete(self, engine: RemoteEngine) -> None:
        objects = [an_object(i) for i in range(6)]
        engine.put(names(6), objects, LIMIT_S)
        wanted, taken = names(8), buffers(8)
        handed: dict[int, bool] = {}

        def arrived(number: int) -> None:
            assert number not in handed
            handed[number] = is_same(taken[number], objects[number])

        outcomes = engine.get_into(wanted, taken, LIMIT_S, arrived)
        assert outcomes == [OK] * 6 + [ABSENT] * 2
        assert handed == dict.fromkeys(range(6), True)

    @pytest.mark.parametrize("payload_bytes", [1, 4096, 1 << 20, (1 << 20) + 1])
    def test_sizes(self, engine: RemoteEngine, payload_bytes: int) -> None:
        made = an_object(1, payload_bytes)
        (buffer,) = buffers(1, payload_bytes)
        assert engine.put(names(1), [made], LIMIT_S) == [OK]
        assert engine.get_into(names(1), [buffer], LIMIT_S) == [OK] and is_same(buffer, made)

    def test_an_object_is_created_once(self, engine: RemoteEngine) -> None:
        first, second = an_object(1), an_object(2)
        assert engine.put(names(1), [first], LIMIT_S) == [OK]
        assert engine.put(names(2), [second, second], LIMIT_S) == [EXISTS, OK]
        taken = buffers(2)
        assert engine.get_into(names(2), taken, LIMIT_S) == [OK, OK]
        assert is_same(taken[0], first) and is_same(taken[1], second)

    def test_what_is_in_use_is_kept_or_comes_back(self, engine: RemoteEngine) -> None:
        assert engine.put(names(1), [an_object(1)], LIMIT_S) == [OK]
        assert engine.renew(names(2), Only(1), LIMIT_S) == [EXISTS, OK]
        taken = buffers(2)
        assert engine.get_into(names(2), taken, LIMIT_S) == [OK, OK]
        assert is_same(taken[0], an_object(1)) and is_same(taken[1], an_object(2))

    def test_writers_at_the_same_moment_leave_one_object_whole(self, engine: RemoteEngine) -> None:
        objects = [an_object(i) for i in range(8)]
        with ThreadPoolExecutor(8) as threads:
            ended = [*threads.map(lambda o: engine.put(names(1), [o], LIMIT_S)[0], objects)]
        assert ended.count(OK) == 1 and set(ended) <= {OK, EXISTS}
        (buffer,) = buffers(1)
        assert engine.get_into(names(1), [buffer], LIMIT_S) == [OK]
        assert is_same(buffer, objects[ended.index(OK)])

    def test_removed_is_absent(self, engine: RemoteEngine) -> None:
        engine.put(names(3), [an_object(i) for i in range(3)], LIMIT_S)
        assert engine.remove([names(3)[1], names(9)[8]], LIMIT_S) == [OK, OK]
        assert engine.exist_many(names(3), LIMIT_S) == [OK, ABSENT, OK]
        assert engine.put([names(3)[1]], [an_object(7)], LIMIT_S) == [OK]

    @pytest.mark.parametrize("change", [-1, 1, 1000, -PAYLOAD_BYTES, -PAYLOAD_BYTES - 1])
    def test_an_object_of_another_length_is_corrupt(
        self, engine: RemoteEngine, change: int
    ) -> None:
        engine.put([names(2)[1]], [an_object(1)], LIMIT_S)
        self.spoil(engine, names(1)[0], bytes(HEADER_BYTES + PAYLOAD_BYTES + change))
        taken = buffers(2)
        outcomes = engine.get_into(names(2), taken, LIMIT_S)
        assert outcomes[0] in (RemoteOutcome.CORRUPT, ABSENT), "a torn pair may count as absent"
        assert outcomes[1] is OK and is_same(taken[1], an_object(1)), "the next is not affected"
        assert engine.remove(names(1), LIMIT_S) == [OK]
        assert engine.put(names(1), [an_object(3)], LIMIT_S) == [OK], "the name is free again"

    def test_no_names_no_answers(self, engine: RemoteEngine) -> None:
        assert engine.exist_many([], LIMIT_S) == engine.get_into([], [], LIMIT_S) == []
        assert engine.put([], [], LIMIT_S) == engine.remove([], LIMIT_S) == []

    def test_a_call_without_time_asks_nothing(self, engine: RemoteEngine) -> None:
        engine.put(names(1), [an_object(1)], LIMIT_S)
        late = [RemoteOutcome.TIMED_OUT]
        assert engine.exist_many(names(1), 0.0) in (late, [OK])
        assert engine.get_into(names(1), buffers(1), 0.0) in (late, [OK])
        assert engine.put(names(1, 5), [an_object(2)], 0.0) in (late, [OK])

    def test_a_counter_begins_once_and_only_grows(self, engine: RemoteEngine) -> None:
        assert engine.counter("space/generation", None, LIMIT_S).outcome is ABSENT
        assert engine.counter("space/generation", 1000, LIMIT_S).value == 1000
        assert engine.counter("space/generation", 5, LIMIT_S).value == 1000
        assert engine.advance("space/generation", 7, LIMIT_S).value == 1001
        assert engine.advance("space/generation", 5000, LIMIT_S).value >= 5000
        assert engine.counter("other/generation", None, LIMIT_S).outcome is ABSENT
        assert engine.advance("other/generation", 70, LIMIT_S).value >= 70, "begins it"

    def test_everybody_agrees_on_a_counter(self, engine: RemoteEngine) -> None:
        barrier = threading.Barrier(6)

        def begin(first: int) -> int:
            barrier.wait(LIMIT_S)
            return engine.counter("space/generation", 100 + first, LIMIT_S).value

        def advance(_: int) -> int:
            barrier.wait(LIMIT_S)
            return engine.advance("space/generation", 1, LIMIT_S).value

        with ThreadPoolExecutor(6) as threads:
            begun = {*threads.map(begin, range(6))}
            assert len(begun) == 1 and begun <= set(range(100, 106))
            raised = [*threads.map(advance, range(6))]
        assert len(set(raised)) == 6 and min(raised) > max(begun)
        assert engine.counter("space/generation", None, LIMIT_S).value == max(raised)

    def test_a_list_names_every_object_once(self, engine: RemoteEngine) -> None:
        assert list(engine.list_objects("", LIMIT_S)) in ([], [Listing(OK, [])])
        began_s = time.time()
        space, other = f"{1:032x}", f"{2:032x}/1/00/00"
        here = [name.replace("space", space) for name in names(20)]
        engine.counter(f"{space}/generation", 1000, LIMIT_S)
        engine.put(here, [an_object(i, 200 + i) for i in range(20)], LIMIT_S)
        engine.put([other], [an_object(1, 1)], LIMIT_S)
        for prefix, wanted in (("", {*here, other}), (f"{space}/1/", {*here})):
            batches = [*engine.list_objects(prefix, LIMIT_S)]
            assert {batch.outcome for batch in batches} == {OK}
            listed = [e for b in batches for e in b.entries if "generation" not in e.name]
            assert {entry.name for entry in listed} == wanted and len(listed) == len(wanted)
        sizes = {n: HEADER_BYTES + 200 + i for i, n in enumerate(here)}
        assert all(entry.size_bytes >= sizes[entry.name] for entry in listed)
        assert engine.measure(listed, LIMIT_S) == [sizes[entry.name] for entry in listed]
        assert all(abs((e.touched_s or 0.0) - began_s) < CLOCKS_S for e in listed)

    def test_nothing_is_wrong_with_a_server_that_works(self, engine: RemoteEngine) -> None:
        assert engine.explain(LIMIT_S) in (None, Cause.KEEPS_ALL)

    def test_close_is_idempotent(self, engine: RemoteEngine) -> None:
        engine.close()
        engine.close()
