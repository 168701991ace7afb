"""The writer of a path: grants, commits, evictions, resets, and who is served."""

from __future__ import annotations

import json
from bisect import bisect
from collections import deque

import pytest
from support.path_rig import BLOCK_BYTES, PathRig, RigNode, key_of, slots_in

from kvcascade.tiers.nvme.path.frames import frame
from kvcascade.tiers.nvme.path.path_messages import (
    ALREADY_SLOT,
    MAX_CHAIN_HEADS,
    MAX_KEYS_PER_MESSAGE,
    PROTOCOL,
    Bad,
    Committed,
    Epoch,
    Hello,
    KeysListed,
    ListKeys,
    NamespaceSpec,
    Read,
    Refused,
    RefusedWhy,
    Removed,
    Reset,
    Stored,
    TierFigures,
    Touch,
    Welcome,
    Why,
    from_writer,
)


def test_a_committed_block_is_found_and_offered_once() -> None:
    rig = PathRig()
    node = RigNode(rig)
    assert node.store([1, 2, 3]) == [Committed.OK] * 3
    assert node.held([1, 2, 3, 4]) == [1, 2, 3]
    node.ask([2, 9])
    rig.step()
    (answer,) = node.grants()
    assert slots_in(answer)[0] == ALREADY_SLOT
    assert slots_in(answer)[1] >= 0
    assert answer.why is Why.GRANTED


def test_two_nodes_that_store_one_block_keep_one() -> None:
    rig = PathRig()
    first, second = RigNode(rig), RigNode(rig)
    for node in (first, second):
        node.ask([7])
    rig.step(2)
    (one,), (two,) = first.grants(), second.grants()
    assert slots_in(one) != slots_in(two)
    first.commit([7], slots_in(one), one.epoch)
    second.commit([7], slots_in(two), two.epoch)
    rig.step()
    assert first.outcomes() == [[Committed.OK]]
    assert second.outcomes() == [[Committed.ALREADY]]
    space = next(iter(rig.writer.namespaces.values())).space
    assert (space.used, space.granted) == (1, 0)


def test_commits_of_a_step_that_are_too_many_for_the_index_are_made_one_after_another() -> None:
    rig = PathRig(segments=4, slots_per_segment=4096)
    nodes = [RigNode(rig) for _ in range(3)]
    for number, node in enumerate(nodes):
        node.ask(range(number * 3000, number * 3000 + 3000))
    rig.step(4)
    for node in nodes:
        (answer,) = node.grants()
        keys = rig.asked[node.client, answer.request]
        node.commit(keys, slots_in(answer), answer.epoch)
    rig.step()
    assert [node.outcomes() for node in nodes] == [[[Committed.OK] * 3000]] * 3


def test_a_grant_whose_own_blocks_are_evicted_for_it_gets_all_its_slots() -> None:
    rig = PathRig(segments=1, slots_per_segment=8)
    node = RigNode(rig)
    node.store(list(range(8)))
    node.ask([7, *range(100, 107)])
    rig.step(3)
    (answer,) = node.grants()
    assert answer.why is Why.GRANTED and sorted(slots_in(answer)) == list(range(8))


@pytest.mark.parametrize("blocks", [8, MAX_KEYS_PER_MESSAGE + 1, MAX_CHAIN_HEADS])
def test_the_end_of_a_request_is_a_use_of_its_blocks(blocks: int) -> None:
    """`prefix` gets all blocks of a request in one message, which may be longer than others."""
    rig = PathRig(policy="prefix")
    node = RigNode(rig)
    assert node.store(list(range(8))) == [Committed.OK] * 8
    (namespace,) = rig.writer.namespaces.values()
    slots = namespace.presence.find_many([key_of(key) for key in range(8)]).tolist()
    stored_at = namespace.recency.last_used_s(slots)
    rig.step(seconds=5000.0)
    rig.send(node.client, Touch([key_of(key) for key in range(blocks)], is_chain=True))
    assert namespace.recency.last_used_s(slots) == [time_s + 5000 for time_s in stored_at]


def test_the_least_recently_used_leave() -> None:
    rig = PathRig(segments=2, slots_per_segment=64)
    node = RigNode(rig)
    first = list(range(64))
    node.store(first)
    node.store(list(range(64, 128)))
    rig.send(node.client, Touch([key_of(key) for key in first[:32]]))
    rig.step()
    assert node.store(list(range(200, 232))) == [Committed.OK] * 32
    assert node.held(first[:32]) == first[:32]
    assert len(node.held(first[32:])) <= 32 - 31
    gone = [key for message in rig.take(node.client, Removed) for key in message.keys]
    assert set(gone) >= {key_of(key) for key in first[33:]}


def test_grants_end_with_their_node() -> None:
    rig = PathRig(segments=1)
    dead, alive = RigNode(rig), RigNode(rig)
    dead.ask(list(range(8)))
    rig.step(3)
    assert len(dead.grants()) == 1
    alive.ask([100])
    rig.step(seconds=2.0)
    (answer,) = alive.grants()
    assert answer.why is Why.FULL
    rig.writer.disconnect(dead.client)
    assert alive.store(list(range(8))) == [Committed.OK] * 8


def test_slots_of_a_node_that_hears_nothing_are_its_own_until_it_is_gone() -> None:
    """Its process may be stopped in a write."""
    rig = PathRig(segments=2)
    deaf, alive = RigNode(rig, wants_events=True), RigNode(rig)
    deaf.ask(list(range(8)))
    rig.step(3)
    (answer,) = deaf.grants()
    deaf.ask([50])
    rig.writer.cut_off(deaf.client)
    for first in range(100, 140, 8):
        assert alive.store(list(range(first, first + 8))) == [Committed.OK] * 8
    (namespace,) = rig.writer.namespaces.values()
    assert namespace.space.granted == 8 and not deaf.grants(), "it gets no more"
    own = {*slots_in(answer)}
    assert not namespace.space.is_used[sorted(own)].any()
    rig.step(seconds=1.0)
    assert rig.take(alive.client, TierFigures)[-1].is_reporter
    rig.send(alive.client, Reset(1))
    rig.step()
    assert rig.take(alive.client, Epoch), "a reset waits for no node"
    assert alive.store(list(range(200, 208))) == [Committed.OK] * 8
    assert namespace.space.granted == 8 and not namespace.space.is_used[sorted(own)].any()
    rig.writer.disconnect(deaf.client)
    assert alive.store(list(range(300, 308))) == [Committed.OK] * 8
    assert (namespace.space.used, namespace.space.granted) == (16, 0)


def test_no_block_crosses_a_reset() -> None:
    rig = PathRig()
    node, other = RigNode(rig), RigNode(rig)
    node.store([1, 2])
    node.ask([3])
    rig.step()
    (answer,) = node.grants()
    rig.send(other.client, Reset(77))
    rig.step()
    (epoch,) = rig.take(other.client, Epoch)
    assert (epoch.epoch, epoch.request) == (1, 77)
    assert [e.epoch for e in rig.take(node.client, Epoch)] == [1]
    node.commit([3], slots_in(answer), answer.epoch)
    rig.step()
    assert node.outcomes() == [[Committed.STALE]]
    assert node.held([1, 2, 3]) == []
    assert node.store([1]) == [Committed.OK]


def test_a_damaged_block_is_removed_if_its_entry_still_says_the_same() -> None:
    rig = PathRig()
    node = RigNode(rig, wants_events=True)
    node.store([1, 2])
    stored = [key for message in rig.take(node.client, Stored) for key in message.keys]
    assert stored == [key_of(1), key_of(2)]
    presence = next(iter(rig.writer.namespaces.values())).presence
    keys = [key_of(1), key_of(2)]
    slots = presence.find_many(keys)
    right, wrong = presence.checksum_of(int(slots[0])), 5
    sums = right.to_bytes(8, "little") + wrong.to_bytes(8, "little")
    rig.send(node.client, Bad(keys, slots.astype("<i4").tobytes(), sums))
    rig.step()
    assert node.held([1, 2]) == [2]
    assert [message.keys for message in rig.take(node.client, Removed)] == [[key_of(1)]]


def test_other_versions_and_other_paths_are_refused() -> None:
    rig = PathRig()
    assert RigNode(rig, protocol=PROTOCOL + 1).refused[0].why is RefusedWhy.PROTOCOL
    refused = RigNode(rig, paths=["/path", "/other"]).refused[0]
    assert refused.why is RefusedWhy.PATHS
    assert "/path" in refused.text and "/other" in refused.text


def test_fields_of_any_depth_end_no_writer() -> None:
    """Some can be read and not be written again, because that takes more of the stack. From Python
    3.14 on 50,000 lists can be written, as 2.5 GB of indentation."""
    rig = PathRig()
    deepest = bisect(range(100_000), False, key=lambda depth: not is_readable(nested(depth)))
    for depth in (100, *range(deepest - 40, deepest + 1)):
        spec = NamespaceSpec("model", nested(depth), b"{}", BLOCK_BYTES)
        client = next(rig.numbers)
        rig.inboxes[client] = deque()
        rig.writer.connect(client)
        rig.send(client, Hello(PROTOCOL, "node", ("/path",), spec, rig.options))
        rig.step(2)
        assert len(rig.take(client, Refused)) == 1
    assert RigNode(rig).welcome is not None


def test_a_field_whose_name_has_no_encoding_ends_no_writer() -> None:
    """A node may send it, and a description may be damaged so."""
    rig = PathRig(120)
    RigNode(rig, fields={"\ud800": 1}, label="model")
    welcome = RigNode(rig, fields={"\udfff": 1}, label="model").welcome
    assert welcome is not None
    received = from_writer.decode(frame(welcome)[4:])
    assert isinstance(received, Welcome) and "begins empty" in received.notes[0]


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * depth + b"]" * depth + b"}"


def is_readable(data: bytes) -> bool:
    try:
        json.loads(data)
    except RecursionError:
        return False
    return True


def test_a_killed_writer_s_successor_has_everything() -> None:
    rig = PathRig()
    RigNode(rig).store([1, 2, 3])
    rig.kill()
    rig.start()
    node = RigNode(rig)
    assert node.held([1, 2, 3]) == [1, 2, 3]
    assert node.store([3, 4]) == [Committed.OK]


def test_keys_are_listed_in_bounded_batches() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store(list(range(20)))
    found: list[bytes] = []
    for limit in (8, 8, 8, 8):
        after = found[-1] if found else b""
        rig.send(node.client, ListKeys(after, limit))
        rig.step()
        (answer,) = rig.take(node.client, KeysListed)
        assert answer.after == after and len(answer.keys) <= limit
        found += answer.keys
    assert found == sorted(map(key_of, range(20))) and answer.keys == []
    rig.send(node.client, ListKeys(b"", -1))
    rig.send(node.client, ListKeys(b"", 1 << 40))
    rig.step()
    assert [len(m.keys) for m in rig.take(node.client, KeysListed)] == [0, 20]


def test_a_reset_is_named_to_others_that_publish_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvcascade.tiers.nvme.path.writer.messages.reset_messages.MAX_RESET_EVENTS", 5
    )
    rig = PathRig()
    own, other = RigNode(rig, wants_events=True), RigNode(rig, wants_events=True)
    quiet = RigNode(rig)
    own.store(list(range(8)))
    rig.send(own.client, Reset(9))
    rig.step()
    assert rig.take(own.client, Removed) == rig.take(quiet.client, Removed) == []
    kinds = [type(message) for message in rig.inboxes[other.client]]
    assert kinds.index(Removed) < kinds.index(Epoch), "what is stored next comes later"
    (removed,) = rig.take(other.client, Removed)
    assert removed.keys == sorted(map(key_of, range(8)))[:5], "no more than the limit"


def test_one_node_of_each_namespace_reports_its_figures() -> None:
    rig = PathRig(120)
    nodes = [RigNode(rig), RigNode(rig), RigNode(rig, label="another"), RigNode(rig)]

    def reporters() -> list[tuple[bool, bool] | None]:
        rig.step(seconds=2.0)
        last = [rig.take(node.client, TierFigures)[-1:] for node in nodes]
        return [(of[0].is_reporter, of[0].is_path_reporter) if of else None for of in last]

    none = False, False
    assert reporters() == [(True, True), none, (True, False), none], "one for all namespaces"
    rig.writer.disconnect(nodes[0].client)
    nodes[1].store([1])
    assert reporters() == [None, (True, True), None, none], "only what changed is sent"


def test_an_engine_without_requests_does_not_report_for_others() -> None:
    rig = PathRig(120)
    idle, first, second = RigNode(rig), RigNode(rig), RigNode(rig)
    other_idle, other = RigNode(rig, label="another"), RigNode(rig, label="another")
    nodes = [idle, first, second, other_idle, other]

    def reporters() -> tuple[list[RigNode], list[RigNode]]:
        rig.step(seconds=2.0)
        figures = {client.number: client.figures for client in rig.writer.clients}
        told = [(node, of) for node in nodes if (of := figures.get(node.client))]
        return [n for n, of in told if of.is_reporter], [n for n, of in told if of.is_path_reporter]

    assert reporters() == ([idle, other_idle], [idle])
    rig.send(other.client, Read(1))
    assert reporters() == ([idle, other], [other]), "the path's budget, too"
    first.store([1])
    assert reporters() == ([first, other], [other])
    for user in second, idle, first:
        rig.send(user.client, Touch([key_of(1)]))
        assert reporters() == ([first, other], [other]), "who has reported goes on"
    rig.writer.disconnect(first.client)
    assert reporters() == ([second, other], [other]), "the next one by its first use"
