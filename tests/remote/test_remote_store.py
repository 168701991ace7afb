"""The remote store: lookups, reads, writes and resets over a twin."""

from __future__ import annotations

import pytest
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.remote_rig import PAYLOAD_BYTES, WALL_S, RemoteRig, check, content
from support.remote_twin import RemoteTwin

from kvcascade.tiers.base import RESET_TICKS_PER_S
from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.remote.base import HEADER_BYTES, RemoteOutcome
from kvcascade.tiers.remote.objects import SECRET_BYTES, GcmSeal, MacSeal
from kvcascade.tiers.remote.presence import Presence
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.remote_store import StoreOptions
from kvcascade.tiers.remote.uploads import UploadJob

OK, ABSENT = RemoteOutcome.OK, RemoteOutcome.ABSENT
TIMED_OUT, RESTING = RemoteOutcome.TIMED_OUT, RemoteOutcome.RESTING
IO_ERROR, DROPPED = RemoteOutcome.IO_ERROR, RemoteOutcome.DROPPED
WALL_MARK = int((WALL_S + 1000.0) * RESET_TICKS_PER_S) + 7
"""Mark of a reset at about the time at which a rig begins."""
LOOKUP, READ, WRITE = Verb.LOOKUP, Verb.READ, Verb.WRITE


class TestLookups:
    def test_what_one_host_wrote_another_one_finds(self) -> None:
        rig = RemoteRig()
        assert rig.write(keys(5)) == [OK] * 5
        other = rig.host()
        assert other.known(key(0)) is Presence.UNKNOWN
        assert other.look(keys(7)) == [OK] * 5 + [ABSENT] * 2
        assert other.known(key(4)) is Presence.HELD
        assert other.known(key(5)) is Presence.ABSENT
        assert other.read(keys(7)) == [OK] * 5 + [ABSENT] * 2

    def test_all_chains_of_a_step_are_one_call(self) -> None:
        rig = RemoteRig()
        rig.write(keys(3))
        other = rig.host()
        for ticket in range(5):
            other.store.ask(ticket, keys(2 * ticket + 1))
        before = rig.twin.calls["exist_many"]
        other.store.send()
        assert rig.twin.calls["exist_many"] == before + 1
        assert len(rig.twin.asked) == 9, "each block once"
        ended = {e.ticket: list(e.outcomes) for e in other.store.poll()}
        assert ended[4] == [OK] * 3 + [ABSENT] * 6 and ended[0] == [OK]

    def test_every_question_is_the_servers_to_answer(self) -> None:
        """Its owner asks about no block whose answer it still knows."""
        rig = RemoteRig()
        rig.write(keys(3))
        for calls in range(1, 4):
            assert rig.look(keys(4)) == [OK] * 3 + [ABSENT]
            assert rig.twin.calls["exist_many"] == calls
        rig.twin.fails["exist_many"] = IO_ERROR
        assert rig.look(keys(4)) == [IO_ERROR] * 4

    def test_no_blocks_no_call(self) -> None:
        rig = RemoteRig()
        assert rig.look([]) == [] and rig.twin.calls["exist_many"] == 0

    def test_nothing_is_asked_that_nobody_waits_for(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig(executor=stepping)
        rig.store.ask(1, keys(3))
        rig.store.send()
        rig.clock.advance(2.1)
        assert rig.ended(1, LOOKUP) == [TIMED_OUT] * 3
        stepping.run_all()
        assert rig.twin.calls["exist_many"] == 0 and rig.store.poll() == []

    def test_a_question_ends_at_its_deadline_though_the_call_goes_on(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig(executor=stepping, deadline_s=2.0)
        rig.store.ask(1, keys(3))
        rig.store.send()
        rig.clock.advance(1.9)
        assert rig.store.poll() == []
        rig.clock.advance(0.2)
        assert rig.ended(1, LOOKUP) == [TIMED_OUT] * 3
        stepping.run_all()
        assert rig.store.poll() == [], "it is reported once"
        assert rig.twin.calls["exist_many"] == 0, "too late to ask"

    def test_a_read_has_what_its_lookup_left_of_the_deadline(self) -> None:
        rig = RemoteRig(deadline_s=2.0)
        rig.write(keys(2))
        other = rig.host(executor=(stepping := SteppingExecutor()))
        other.store.ask(1, keys(2))
        other.store.send()
        stepping.run_all()
        assert other.ended(1, LOOKUP) == [OK, OK]
        slots = other.slots(2)
        other.store.get(1, keys(2), slots, limit_s=0.5)
        rig.clock.advance(0.6)
        outcomes = other.ended(1, READ)
        assert outcomes == [RemoteOutcome.DROPPED] * 2
        stepping.run_all()
        check(keys(2), slots, outcomes)

    @pytest.mark.parametrize("fault", [IO_ERROR, RemoteOutcome.DENIED, RemoteOutcome.BUSY])
    def test_a_failure_is_an_outcome_and_is_not_remembered_as_absence(
        self, fault: RemoteOutcome
    ) -> None:
        rig = RemoteRig()
        rig.twin.fails["exist_many"] = fault
        assert rig.look(keys(2)) == [fault] * 2
        del rig.twin.fails["exist_many"]
        rig.clock.advance(REST_S + 0.1)
        rig.write(keys(2))
        assert rig.host().look(keys(2)) == [OK] * 2

    def test_an_answer_that_was_a_lie_costs_a_miss(self) -> None:
        rig = RemoteRig()
        rig.look(keys(1))
        generation = rig.store.state().generation
        assert generation is not None
        name = rig.objects.name(key(7), generation)
        rig.twin.lies = {name: OK}
        assert rig.look([key(7)]) == [OK]
        assert rig.read([key(7)]) == [ABSENT]
        assert rig.known(key(7)) is Presence.ABSENT


class TestChains:
    """An engine whose lookups are one request each."""

    @pytest.mark.parametrize("held", [0, 1, 2, 500, 613, 999, 1000])
    def test_requests_for_a_thousand_blocks(self, held: int) -> None:
        twin = RemoteTwin(asks_in_one_trip=False)
        rig = RemoteRig(twin)
        if held:
            rig.write(keys(held))
        other = rig.host()
        twin.asked.clear()
        assert other.look(keys(1000)) == [OK] * held + [ABSENT] * (1000 - held)
        assert len(twin.asked) <= (1 if held == 0 else 9 if held == 1000 else 31)
        assert len(set(twin.asked)) == len(twin.asked), "no block is asked for twice"

    def test_chains_are_searched_together(self) -> None:
        twin = RemoteTwin(asks_in_one_trip=False)
        rig = RemoteRig(twin)
        rig.write(keys(40))
        other = rig.host()
        twin.calls.clear()
        for ticket in range(1, 6):
            other.store.ask(ticket, [*keys(10 * ticket), *keys(1000 * ticket, 1000 * ticket + 90)])
        other.store.send()
        ended = {e.ticket: list(e.outcomes).count(OK) for e in other.store.poll()}
        assert ended == {1: 10, 2: 20, 3: 30, 4: 40, 5: 40}
        assert twin.calls["exist_many"] <= 6, "rounds, not chains"

    def test_a_failure_in_the_middle_leaves_what_is_known(self) -> None:
        twin = RemoteTwin(asks_in_one_trip=False)
        rig = RemoteRig(twin)
        rig.write(keys(60))
        other = rig.host()

        def fail_later(method: str) -> None:
            if method == "exist_many" and len(twin.asked) > 5:
                twin.fails["exist_many"] = IO_ERROR

        twin.asked.clear()
        twin.before = fail_later
        found = other.look(keys(100))
        assert found[0] is OK and found[-1] is IO_ERROR and ABSENT not in found
        assert other.known(key(99)) is Presence.UNKNOWN

    def test_the_worst_failure_of_all_chains_counts(self) -> None:
        rig = RemoteRig(RemoteTwin(asks_in_one_trip=False))
        failures = RemoteOutcome.TIMED_OUT, RemoteOutcome.BUSY
        rig.twin.exist_many = lambda names, limit_s: [*failures]  # type: ignore[method-assign]
        rig.store.ask(1, [key(1), key(2)], chains=[[0], [1]])
        rig.store.send()
        assert LOOKUP in rig.store.state().resting


class TestReads:
    def test_blocks_come_back_by_parts(self) -> None:
        rig = RemoteRig()
        rig.write(keys(11))
        assert rig.read([*keys(11), key(99)]) == [OK] * 11 + [ABSENT]
        assert rig.twin.calls["get_into"] == 3

    @pytest.mark.parametrize(
        ("n", "calls", "at_a_time", "expected"),
        [
            (64, 1, 1000, 1),  # as many as fit
            (64, 1, 16, 4),
            (64, 2, 1000, 2),  # no connection rests
            (6, 2, 1000, 2),  # and none is asked for less than usual
            (64, 1, 2, 16),  # large blocks
            (200, 1, 1000, 4),  # the limit of blocks
        ],
    )
    def test_small_blocks_go_together(
        self, n: int, calls: int, at_a_time: int, expected: int
    ) -> None:
        twin = RemoteTwin(names_per_call=4)
        twin.bytes_per_call = at_a_time * PAYLOAD_BYTES
        rig = RemoteRig(twin, reads_at_a_time=calls, writes_at_a_time=calls)
        assert rig.write(keys(n)) == rig.read(keys(n)) == [OK] * n
        assert twin.calls["put"] == twin.calls["get_into"] == expected

    def test_no_blocks_no_call(self) -> None:
        rig = RemoteRig()
        rig.store.get(1, [], [])
        rig.store.reset()
        assert rig.ended(1, READ) == [] and rig.twin.calls["get_into"] == 0, "it ends once"

    def test_a_bad_object_is_a_miss_and_is_removed(self) -> None:
        rig = RemoteRig()
        rig.write(keys(3))
        rig.twin.damage = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        assert rig.read(keys(3)) == [RemoteOutcome.CORRUPT] * 3
        assert not rig.twin.held
        rig.twin.damage = None
        rig.clock.advance(6.0)
        assert rig.host().look(keys(3)) == [ABSENT] * 3
        counted = rig.store.counters.verbs
        assert counted[Verb.READ].outcomes[RemoteOutcome.CORRUPT] == 3
        assert counted[Verb.REMOVE].outcomes[OK] == 3 and not counted[Verb.READ].payload_bytes

    def test_a_swapped_object_is_a_miss(self) -> None:
        rig = RemoteRig()
        rig.write(keys(2))
        first, second = rig.twin.held
        held = rig.twin.held
        held[first], held[second] = held[second], held[first]
        assert rig.read(keys(2)) == [RemoteOutcome.CORRUPT] * 2

    def test_objects_of_another_fingerprint_are_not_seen(self) -> None:
        rig = RemoteRig()
        rig.write(keys(3))
        other = rig.host(fingerprint="model-2")
        assert other.look(keys(3)) == [ABSENT] * 3 and other.read(keys(3)) == [ABSENT] * 3

    @pytest.mark.parametrize("kind", [MacSeal, GcmSeal])
    def test_hosts_with_one_secret_key_share_blocks(
        self, kind: type[MacSeal] | type[GcmSeal]
    ) -> None:
        if kind is GcmSeal:
            pytest.importorskip("cryptography")
        secret, other_secret = b"\1" * SECRET_BYTES, b"\2" * SECRET_BYTES
        rig = RemoteRig(seal=kind(secret))
        assert rig.write(keys(3)) == [OK] * 3
        stored = [data[HEADER_BYTES:] for data in rig.twin.held.values()]
        assert (stored == [content(k) for k in keys(3)]) is (kind is MacSeal)
        assert rig.host(seal=kind(secret)).read(keys(4)) == [OK] * 3 + [ABSENT]
        for seal in (None, kind(other_secret)):
            assert rig.host(seal=seal).read(keys(3)) == [ABSENT] * 3
        assert len(rig.twin.held) == 3, "blocks of another key stay"
        rig.twin.damage = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        assert rig.host(seal=kind(secret)).read(keys(3)) == [RemoteOutcome.CORRUPT] * 3
        assert not rig.twin.held

    def test_bytes_that_arrive_late_reach_nobody(self) -> None:
        rig = RemoteRig()
        rig.write(keys(4))
        rig.twin.writes_late = True
        slots = rig.slots(4)
        rig.store.get(1, keys(4), slots)
        outcomes = rig.ended(1, READ)
        assert outcomes == [TIMED_OUT] * 4
        rig.twin.writes_late = False
        rig.clock.advance(REST_S + 0.1)
        again = rig.slots(4)
        rig.store.get(2, keys(4), again)
        rig.ended(2, READ)
        assert rig.twin.write_late(b"\xbd" * 10_000) == 4
        check(keys(4), slots, outcomes)
        check(keys(4), again, [OK] * 4)
        assert rig.read(keys(4)) == [OK] * 4, "no buffer of a later read was written to"

    def test_a_read_that_ends_late_writes_nothing(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig()
        rig.write(keys(2))
        other = rig.host(executor=stepping)
        slots = other.slots(2)
        rig.twin.before = lambda method: rig.clock.advance(3.0 * (method == "get_into"))
        before: list[list[RemoteOutcome]] = []

        def expire_meanwhile(method: str) -> None:
            if method == "get_into" and not before:
                rig.clock.advance(3.0)
                before.append(other.ended(1, READ))

        rig.twin.before = expire_meanwhile
        other.store.get(1, keys(2), slots)
        stepping.run_all()
        assert before == [[TIMED_OUT] * 2]
        check(keys(2), slots, before[0])
        assert other.store.poll() == []


class TestWrites:
    def test_what_another_host_wrote_is_left_alone(self) -> None:
        rig = RemoteRig()
        rig.write(keys(3))
        held = dict(rig.twin.held)
        assert rig.host().write(keys(4)) == [RemoteOutcome.EXISTS] * 3 + [OK]
        assert {name: rig.twin.held[name] for name in held} == held

    def test_no_blocks_no_call(self) -> None:
        rig = RemoteRig()
        assert rig.write([]) == [] and not rig.twin.calls["put"]

    def test_what_waits_too_long_is_dropped(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig(executor=stepping, queue_s=10.0)
        ticket = rig.begin_write(keys(6))
        rig.clock.advance(10.1)
        assert rig.ended(ticket, WRITE) == [DROPPED] * 6
        assert rig.store.counters.unsent[DROPPED] == 6
        stepping.run_all()
        assert not rig.twin.held

    def test_a_rate_is_kept(self) -> None:
        rig = RemoteRig(write_bytes_per_s=4.0 * PAYLOAD_BYTES, queue_s=100.0)
        rig.begin_write(keys(40))
        for _ in range(200):
            rig.clock.advance(0.1)
            if rig.store.poll():
                break
        seconds = rig.clock.now_s - 1000.0
        assert 40 / 4 - 3 <= seconds <= 40 / 4 + 1, "less the burst and one part"
        assert len(rig.twin.held) == 40

    def test_a_rate_of_reads_is_kept(self) -> None:
        rig = RemoteRig()
        rig.write(keys(40))
        other = rig.host(read_bytes_per_s=4.0 * PAYLOAD_BYTES, deadline_s=100.0)
        other.store.get(1, keys(40), other.slots(40))
        begun_s = rig.clock.now_s
        for _ in range(200):
            rig.clock.advance(0.1)
            if other.store.poll():
                break
        assert 7 <= rig.clock.now_s - begun_s <= 11


class TestBreakers:
    @pytest.mark.parametrize("method", ["exist_many", "get_into", "put"])
    def test_after_failures_nothing_is_asked_until_a_probe(self, method: str) -> None:
        rig = RemoteRig()
        rig.look(keys(1))
        rig.twin.fails[method] = IO_ERROR

        def use() -> None:
            if method == "exist_many":
                rig.look(keys(50, 51))
            elif method == "get_into":
                rig.read(keys(50, 51))
            else:
                rig.begin_write(keys(50, 51))
                rig.store.poll()

        for _ in range(10):
            use()
            rig.clock.advance(0.01)
        calls = rig.twin.calls[method] - (method == "exist_many")
        assert calls == 3
        for _ in range(4):
            rig.clock.advance(REST_S + 0.1)
            use()
            use()
        assert rig.twin.calls[method] - (method == "exist_many") == 3 + 4, "one probe a rest"
        del rig.twin.fails[method]
        rig.clock.advance(REST_S + 0.1)
        rig.twin.calls.clear()
        for _ in range(3):
            rig.clock.advance(0.01)
            use()
        assert rig.twin.calls[method] >= 1, "it recovered"

    def test_a_server_that_stopped_costs_one_deadline(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig(executor=stepping)
        rig.store.ask(1, keys(3))
        rig.store.send()
        stalled = stepping._tasks[0]
        stepping._tasks.clear()
        future, run = stalled
        waits: list[list[RemoteOutcome]] = []

        def stall(method: str) -> None:
            if method == "exist_many" and not waits:
                rig.clock.advance(2.1)
                waits.append(rig.ended(1, LOOKUP))
                for ticket in range(2, 6):
                    rig.store.ask(ticket, keys(10 * ticket, 10 * ticket + 3))
                    rig.store.send()
                    waits.append(rig.ended(ticket, LOOKUP))

        rig.twin.before = stall
        run()
        assert waits == [[TIMED_OUT] * 3] + [[RESTING] * 3] * 4

    def test_what_waits_when_the_breaker_opens_waits_no_longer(self) -> None:
        rig = RemoteRig()
        rig.write(keys(12))
        other = rig.host()
        rig.twin.fails["get_into"] = TIMED_OUT
        assert other.read(keys(12)) == [TIMED_OUT] * 4 + [RESTING] * 8
        assert other.read(keys(12)) == [RESTING] * 12
        assert rig.twin.calls["get_into"] == 1

    def test_the_state_says_which_direction_rests(self) -> None:
        rig = RemoteRig()
        rig.write(keys(1))
        assert rig.store.state().resting == frozenset()
        rig.twin.fails["get_into"] = RemoteOutcome.DENIED
        rig.read(keys(1))
        state = rig.store.state()
        assert state.resting == {Verb.READ} and state.openings[Verb.READ] == 1
        assert state.generation == 2 * next(iter(rig.twin.counters.values()))

    def test_a_rejected_login_opens_at_once(self) -> None:
        rig = RemoteRig()
        rig.twin.fails["counter"] = RemoteOutcome.DENIED
        assert rig.look(keys(2)) == [RemoteOutcome.DENIED] * 2
        assert rig.look(keys(5, 7)) == [RESTING] * 2
        assert rig.twin.calls["counter"] == 1

    def test_an_engine_that_raises_is_a_failure(self, caplog: pytest.LogCaptureFixture) -> None:
        rig = RemoteRig()

        def raise_it(method: str) -> None:
            raise ValueError("secret-in-test")

        rig.twin.before = raise_it
        assert rig.look(keys(2)) == [IO_ERROR] * 2
        assert rig.read(keys(2)) == [IO_ERROR] * 2
        assert rig.write(keys(2)) == [IO_ERROR] * 2
        assert "ValueError" in caplog.text and "secret-in-test" not in caplog.text

    def test_an_engine_that_panics_is_a_failure_too(self) -> None:
        """Libraries in Rust raise a `BaseException` then."""
        rig = RemoteRig(executor=(stepping := SteppingExecutor()))

        def panic(method: str) -> None:
            raise BaseException

        rig.twin.before = panic
        ticket = rig.begin_write(keys(2))
        stepping.run_all()
        assert rig.ended(ticket, WRITE) == [IO_ERROR] * 2
        assert rig.store.close(0.0), "its thread is free again"


class TestResets:
    def test_a_reset_makes_older_blocks_unreachable_for_everybody(self) -> None:
        rig = RemoteRig()
        rig.write(keys(4))
        other = rig.host()
        assert other.look(keys(4)) == [OK] * 4
        other.store.reset()
        assert not other.store.state().is_reset_pending
        assert other.look(keys(4)) == [ABSENT] * 4 and other.read(keys(4)) == [ABSENT] * 4
        rig.clock.advance(5.1)
        assert rig.read(keys(4)) == [ABSENT] * 4, "the first host sees it within seconds"
        assert rig.host().look(keys(4)) == [ABSENT] * 4, "a new host too"

    def test_who_has_the_weights_of_the_disk_finds_no_block_of_updated_ones(self) -> None:
        """The rig compares all bytes that are read."""
        rig = RemoteRig()
        other, third = rig.host(), rig.host()
        for host in (other, third):
            host.look(keys(1))  # it knows of earlier resets
            host.update()
        rig.clock.advance(6.0)
        assert third.write(keys(4)) == [OK] * 4
        assert other.read(keys(4)) == [OK] * 4, "it was updated, too"
        restarted = rig.host()
        for host in (rig, restarted):
            assert host.look(keys(4)) == host.read(keys(4)) == [ABSENT] * 4
        assert restarted.write(keys(4)) == [OK] * 4
        assert rig.read(keys(4)) == third.read(keys(4)) == [OK] * 4

    def test_a_reset_that_is_passed_on_is_not_this_hosts_own(self) -> None:
        """An engine of the same NVMe path was updated; this one still has the weights it loaded."""
        rig = RemoteRig()
        other = rig.host()
        other.store.reset(WALL_MARK, is_new=False)
        assert other.write(keys(4)) == [OK] * 4 and rig.host().read(keys(4)) == [OK] * 4

    def test_the_next_store_of_an_owner_knows_of_its_reset(self) -> None:
        rig = RemoteRig()
        rig.update()
        rig.write(keys(4))
        assert rig.host(was_reset=True).look(keys(4)) == [OK] * 4

    def test_until_the_server_is_told_nothing_is_read_or_written(self) -> None:
        rig = RemoteRig()
        rig.write(keys(4))
        rig.twin.fails["advance"] = IO_ERROR
        rig.store.reset()
        assert rig.store.state().is_reset_pending
        assert rig.look(keys(4)) == [IO_ERROR] * 4
        assert rig.read(keys(4)) == [IO_ERROR] * 4
        calls = rig.twin.calls["get_into"], rig.twin.calls["exist_many"]
        del rig.twin.fails["advance"]
        rig.clock.advance(REST_S + 0.1)
        rig.store.poll()
        assert not rig.store.state().is_reset_pending, "an idle owner tells it too"
        assert (rig.twin.calls["get_into"], rig.twin.calls["exist_many"]) == calls
        assert rig.look(keys(4)) == [ABSENT] * 4

    def test_what_is_under_way_ends_without_a_block(self) -> None:
        rig = RemoteRig()
        rig.write(keys(3))
        stepping = SteppingExecutor()
        other = rig.host(executor=stepping)
        slots = other.slots(3)
        other.store.ask(1, keys(3))
        other.store.send()
        other.store.get(2, keys(3), slots)
        ticket = other.begin_write(keys(20, 23))
        other.store.reset()
        ended = {e.ticket: set(e.outcomes) for e in other.store.poll()}
        assert ended == {1: {ABSENT}, 2: {ABSENT}, ticket: {DROPPED}}
        stepping.run_all()
        assert other.store.poll() == []
        check(keys(3), slots, [ABSENT] * 3)
        assert len(rig.twin.held) == 3

    def test_a_counter_that_was_lost_does_not_bring_old_blocks_back(self) -> None:
        rig = RemoteRig()
        rig.write(keys(4))
        rig.twin.counters.clear()  # evicted, or expired by a lifecycle rule
        rig.clock.advance(6.0)
        other = rig.host()
        assert other.look(keys(4)) == [ABSENT] * 4
        assert rig.read(keys(4)) == [ABSENT] * 4

    def test_a_write_that_waits_for_the_generation_crosses_no_reset(self) -> None:
        """Its thread has begun, and finds the generation of after the reset."""
        rig = RemoteRig(executor=SteppingExecutor())
        payload = memoryview(content(key(0)))
        epoch = rig.store._core.memory.epoch
        job = UploadJob(1, keys(1), [payload], 2e9, epoch=epoch, mark=None)
        rig.store.reset()
        assert rig.store._uploads.write(job, [0]) is DROPPED
        assert job.take_end() == [DROPPED] and not rig.twin.held

    def test_after_another_hosts_reset_nothing_counts_as_held(self) -> None:
        rig = RemoteRig()
        rig.write(keys(2))
        rig.host().store.reset()
        rig.clock.advance(6.0)
        assert rig.look([key(9)]) == [ABSENT]
        assert rig.known(key(0)) is Presence.UNKNOWN
        ticket = rig.ticket()
        payloads = [memoryview(content(h)) for h in keys(2)]
        rig.store.put(ticket, keys(2), payloads, rig.store.state().mark)
        assert rig.ended(ticket, WRITE) == [OK] * 2

    def test_who_sees_half_a_reset_carries_out_the_rest(self) -> None:
        """Its host has raised the mark, and not the generation yet: it is slow, or died."""
        rig = RemoteRig()
        rig.write(keys(4))
        rig.twin.counters[rig.objects.marks_name] = WALL_MARK
        other = rig.host()
        assert other.read(keys(4)) == [ABSENT] * 4, "else they would be blocks of after the reset"
        assert other.store.state().own_mark == WALL_MARK
        rig.clock.advance(6.0)
        assert rig.read(keys(4)) == [ABSENT] * 4 and rig.store.state().mark == WALL_MARK

    def test_a_server_that_forgets_a_reset_is_told_again(self) -> None:
        """It was killed before it had saved its last changes, or a replica took over."""
        rig = RemoteRig()
        rig.write(keys(4))
        other = rig.host()
        before = dict(rig.twin.counters)
        other.store.reset(WALL_MARK)
        rig.twin.counters = before
        rig.clock.advance(6.0)
        assert other.look(keys(4)) == [ABSENT] * 4 and other.read(keys(4)) == [ABSENT] * 4
        assert rig.read(keys(4)) == [ABSENT] * 4
        assert (
            rig.store.state().mark == other.store.state().mark > (rig.store.state().own_mark or 0)
        )

    @pytest.mark.parametrize("loses_generation", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    @pytest.mark.parametrize("is_new", [True, False])
    def test_a_host_that_missed_a_reset_brings_nothing_back_after_the_mark_was_lost(
        self, loses_generation: bool, fails: bool, is_new: bool
    ) -> None:
        """It asks first, and writes older blocks into the generation of now."""
        rig = RemoteRig()
        missed = rig.host()
        if is_new:
            missed.store.reset(WALL_MARK - 1)
        rig.clock.advance(6.0)
        missed.look(keys(1))
        own_mark = missed.store.state().mark
        knows = rig.host()
        for host in (knows, rig):
            host.store.reset(WALL_MARK, is_new=is_new)
            host.look(keys(1))
        rig.clock.advance(6.0)
        knows.look(keys(1))
        mark = rig.twin.counters.pop(rig.objects.marks_name)
        if loses_generation:
            rig.twin.counters.clear()
        rig.clock.advance(6.0)
        missed.look(keys(1))
        ticket = missed.ticket()
        payloads = [memoryview(content(h)) for h in keys(3)]
        missed.store.put(ticket, keys(3), payloads, own_mark)
        assert missed.ended(ticket, WRITE) == [OK] * 3
        if fails:
            rig.twin.fails["advance"] = RemoteOutcome.IO_ERROR
            assert rig.read(keys(3)) == [RemoteOutcome.IO_ERROR] * 3
            rig.twin.fails.clear()
            assert knows.read(keys(3)) == [ABSENT] * 3
            rig.clock.advance(60.0)
        assert rig.look(keys(3)) == [ABSENT] * 3 and rig.read(keys(3)) == [ABSENT] * 3
        rig.clock.advance(6.0)
        missed.look(keys(1))
        assert missed.store.state().mark == rig.twin.counters[rig.objects.marks_name] == mark

    def test_a_mark_that_was_lost_is_no_new_reset(self) -> None:
        rig = RemoteRig()
        rig.store.reset(WALL_MARK)
        other = rig.host()
        other.look(keys(1))
        rig.twin.counters.clear()
        for _ in range(2):
            rig.clock.advance(6.0)
            for host in (rig, other):
                host.look(keys(1))
                assert host.store.state().mark == host.store.state().own_mark == WALL_MARK
        assert rig.host().look(keys(1)) == [ABSENT]
        assert rig.twin.counters[rig.objects.marks_name] == WALL_MARK

    def test_while_the_generation_is_unknown_nothing_is_read(self) -> None:
        rig = RemoteRig()
        rig.write(keys(2))
        rig.twin.fails["counter"] = IO_ERROR
        other = rig.host()
        assert other.read(keys(2)) == [IO_ERROR] * 2 and not rig.twin.calls["get_into"]


class TestFigures:
    def test_counters_tell_what_was_moved(self) -> None:
        rig = RemoteRig()
        rig.write(keys(6))
        other = rig.host()
        other.look(keys(8))
        other.read(keys(6))
        wrote = rig.store.counters.verbs[Verb.WRITE]
        looked, read = (other.store.counters.verbs[v] for v in (Verb.LOOKUP, Verb.READ))
        assert (wrote.calls, wrote.payload_bytes) == (2, 6 * PAYLOAD_BYTES)
        assert (read.calls, read.payload_bytes, read.outcomes[OK]) == (2, 6 * PAYLOAD_BYTES, 6)
        assert (looked.calls, looked.requests) == (1, 1)
        assert looked.outcomes == {OK: 6, ABSENT: 2}
        assert {v: len(s) for v, s in other.store.counters.take_samples().items()} == {
            "generation": 1,
            "lookup": 1,
            "read": 2,
        }
        assert not other.store.counters.take_samples(), "each is taken once"

    def test_the_latency_is_that_of_an_answer(self) -> None:
        rig = RemoteRig()
        assert rig.store.counters.lookup_s is None
        spent = {"exist_many": 0.01}
        rig.twin.before = lambda method: rig.clock.advance(spent.get(method, 0.0))
        rig.look(keys(8))
        assert rig.store.counters.lookup_s == pytest.approx(0.01)
        rig.twin.fails["exist_many"], spent["exist_many"] = TIMED_OUT, 0.5
        rig.look([key(9)])
        assert rig.store.counters.lookup_s == pytest.approx(0.01), "no answer tells nothing"

    def test_close_ends_everything(self) -> None:
        stepping = SteppingExecutor()
        rig = RemoteRig(executor=stepping)
        rig.store.ask(1, keys(2))
        rig.store.send()
        ticket = rig.begin_write(keys(2))
        rig.store.get(3, keys(2), rig.slots(2))
        assert not rig.store.close(0.0), "threads are still to come"
        assert rig.twin.is_closed
        kinds = {e.ticket: set(e.outcomes) for e in rig.store.poll()}
        assert kinds == {1: {RESTING}, ticket: {RESTING}, 3: {RESTING}}
        stepping.run_all()
        assert rig.store.close(0.0) and not rig.twin.held

    def test_options_are_frozen(self) -> None:
        assert StoreOptions().threads == 8
