"""Faults that the writer of a path meets: an index that fails, and messages that make no sense."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from support.path_rig import PathRig, RigNode, int32, key_of, slots_in, uint64

from kvcascade.errors import CorruptionError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.block_table import BlockTable
from kvcascade.tiers.nvme.path.lmdb_block_table import (
    ENTRY_BYTES,
    LmdbBlockTable,
    open_block_table,
)
from kvcascade.tiers.nvme.path.path_messages import (
    MAX_CHAIN_HEADS,
    MAX_KEYS_PER_MESSAGE,
    NO_SLOT,
    PROTOCOL,
    Ask,
    Bad,
    Commit,
    CommitDone,
    Committed,
    Epoch,
    FromNode,
    Grant,
    Granted,
    Hello,
    Read,
    Refused,
    RefusedWhy,
    Release,
    Reset,
    Retire,
    Touch,
    Why,
)
from kvcascade.tiers.nvme.path.writer.namespace.waiting_grants import MAX_WAITING_PER_CLIENT
from kvcascade.tiers.nvme.path.writer.path_capacity import PATH_REST_S
from kvcascade.tiers.policies import ORDERS


class LmdbRig(PathRig):
    """A path whose block tables are files."""

    def _open_table(
        self, folder: Path, map_bytes: int, identity: bytes, **options: Any
    ) -> BlockTable:
        return open_block_table(folder, map_bytes, identity, **options)


@pytest.mark.parametrize("code", [Committed.IO_ERROR, Committed.NO_SPACE])
def test_a_commit_that_the_index_refuses_frees_its_slots(code: Committed) -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1])
    (disk,) = rig.disks.values()
    disk.failures = [code]
    assert node.store([2, 3]) == [code, code]
    assert node.held([1, 2, 3]) == [1]
    space = next(iter(rig.writer.namespaces.values())).space
    assert (space.used, space.granted) == (1, 0)
    assert node.store([2, 3]) == [Committed.OK] * 2


def test_an_eviction_that_the_index_refuses_removes_nothing() -> None:
    rig = PathRig(segments=1)
    node = RigNode(rig)
    node.store(list(range(8)))
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR]
    node.ask([100])
    rig.step()
    (answer,) = node.grants()
    assert (slots_in(answer), answer.why) == ([NO_SLOT], Why.RESTING), "it waits for nothing"
    assert node.held(list(range(8))) == list(range(8))
    rig.step(seconds=PATH_REST_S)
    assert node.store([100]) == [Committed.OK], "the next attempt succeeds"


def test_an_index_that_refuses_evictions_is_asked_for_them_seldom() -> None:
    """Two engines of a full tier ask on and on."""
    rig = PathRig(segments=1)
    nodes = [RigNode(rig), RigNode(rig)]
    nodes[0].store(list(range(8)))
    (disk,) = rig.disks.values()
    disk.failures = [Committed.NO_SPACE] * 100
    for number in range(600):
        for node in nodes:
            node.ask([100 + number])
        rig.step(seconds=0.05)
        for node in nodes:
            (answer,) = node.grants()
            assert (slots_in(answer), answer.why) == ([NO_SLOT], Why.RESTING)
    assert 100 - len(disk.failures) in range(5, 8), "once in each rest"
    disk.failures.clear()
    rig.step(seconds=PATH_REST_S)
    assert nodes[1].store([100]) == [Committed.OK]


def test_a_reset_that_is_not_durable_hides_all_blocks_and_is_answered_when_it_is() -> None:
    rig = PathRig()
    node, other = RigNode(rig), RigNode(rig)
    node.store([1, 2])
    node.ask([3])
    rig.step()
    (answer,) = node.grants()
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 3
    rig.send(other.client, Reset(5))
    rig.step()
    assert rig.take(other.client, Epoch) == []
    assert node.held([1, 2]) == [], "no older block is served meanwhile"
    node.commit([3], slots_in(answer), answer.epoch)
    rig.step()
    assert node.outcomes() == [[Committed.STALE]]
    rig.step(3, seconds=PATH_REST_S)
    (epoch,) = rig.take(other.client, Epoch)
    assert (epoch.epoch, epoch.request) == (1, 5)
    assert node.store([1]) == [Committed.OK]
    rig.kill()
    rig.start()
    assert RigNode(rig, epoch=1).held([1, 2, 3]) == [1], "its engine goes on"
    rig.kill()
    rig.start()
    assert RigNode(rig).held([1, 2, 3]) == [], "an engine that starts has other weights"
    assert RigNode(rig).store([1]) == [Committed.OK]
    rig.kill()
    rig.start()
    assert RigNode(rig).held([1]) == [1], "nobody has reset since"


def test_a_reset_whose_engine_ends_before_it_is_durable_is_carried_out() -> None:
    """Slots of later blocks would count as free, though the index names them."""
    rig = PathRig(segments=1)
    node, other = RigNode(rig), RigNode(rig)
    node.store(list(range(8)))
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 3
    rig.send(other.client, Reset(5))
    rig.writer.disconnect(other.client)
    node.ask([100])
    rig.step()
    (answer,) = node.grants()
    node.commit([100], slots_in(answer), answer.epoch)
    rig.step()
    assert node.outcomes() == [[Committed.STALE]], "the index has blocks of before"
    rig.step(3, seconds=PATH_REST_S)
    assert [epoch.epoch for epoch in rig.take(node.client, Epoch)] == [1]
    for key in range(100, 103):
        assert node.store([key]) == [Committed.OK]
    assert node.held(list(range(100, 103))) == list(range(100, 103))
    assert next(iter(rig.writer.namespaces.values())).space.used == 3


class SyncFails:
    """An LMDB environment whose disk syncs nothing for a number of times."""

    def __init__(self, env: Any, times: int) -> None:
        self._env, self.left = env, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def sync(self, force: bool = False) -> None:
        if self.left:
            self.left -= 1
            raise lmdb.Error("mdb_env_sync: Input/output error")
        self._env.sync(force)


def test_a_reset_of_which_only_the_sync_fails_is_tried_again_in_one_epoch(tmp_path: Path) -> None:
    rig = LmdbRig(roots=(tmp_path / "path",), real=RealFileSystem(direct=False))
    node = RigNode(rig)
    node.store([1, 2])
    table = next(iter(rig.writer.namespaces.values())).table
    assert isinstance(table, LmdbBlockTable)
    env = SyncFails(table._env, 3)
    setattr(table, "_env", env)  # noqa: B010
    rig.send(node.client, Reset(5))
    rig.step(10, seconds=PATH_REST_S / 100)
    assert env.left == 2 and rig.take(node.client, Epoch) == []
    assert node.held([1, 2]) == []
    rig.step(3, seconds=PATH_REST_S)
    assert [epoch.epoch for epoch in rig.take(node.client, Epoch)] == [1]
    assert node.store([3]) == [Committed.OK]
    rig.kill()
    rig.start()
    assert RigNode(rig, epoch=1).held([1, 2, 3]) == [3]
    rig.kill()


def test_a_reset_that_the_disk_refuses_is_tried_seldom_whoever_asks() -> None:
    """The engine of it waits, others go on, ask for resets themselves, and start."""
    rig = PathRig()
    node, other = RigNode(rig), RigNode(rig)
    node.store([1, 2])
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 100
    rig.send(node.client, Reset(5))
    begin_s, steps = rig.clock.now_s, 0
    while rig.clock.now_s < begin_s + 6 * PATH_REST_S:
        rig.step(seconds=rig.writer.wait_s)
        steps += 1
        if steps % 5 == 0:
            rig.send(other.client, Reset(steps))
            RigNode(rig, "another model")
    assert 100 - len(disk.failures) in range(5, 8), "once in each rest"
    assert steps < 2 * 6 * PATH_REST_S, "nor does the writer look for its end all the time"
    disk.failures.clear()
    rig.step(2, seconds=PATH_REST_S)
    (epoch,) = {each.epoch for each in rig.take(node.client, Epoch)}
    assert {each.epoch for each in rig.take(other.client, Epoch)} == {epoch}
    assert epoch == 1 + steps // 5


@pytest.mark.parametrize("is_own", [True, False])
def test_a_reset_after_one_that_the_disk_refused_keeps_out_what_was_stored_between(
    is_own: bool,
) -> None:
    """Whoever asks for the second one: weights may have changed twice."""
    rig = PathRig()
    node, other = RigNode(rig), RigNode(rig)
    node.store([1, 2])
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR]
    rig.send(node.client, Reset(5))
    other.ask([3])
    rig.step(seconds=0.01)
    (granted,) = other.grants()
    rig.send((other if is_own else node).client, Reset(6))
    rig.step(2, seconds=PATH_REST_S)
    assert {each.epoch for each in rig.take(other.client, Epoch)} == {granted.epoch + 1}
    other.commit([3], slots_in(granted), granted.epoch)
    rig.step()
    assert other.outcomes() == [[Committed.STALE]]
    assert other.held([3]) == []
    assert other.store([3]) == [Committed.OK]


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("is_settle", [True, False])
def test_a_use_that_names_a_block_twice_counts_once(policy: str, is_settle: bool) -> None:
    rig = PathRig(policy=policy)
    node = RigNode(rig)
    node.store([1, 2, 3])
    rig.send(node.client, Touch([key_of(1), key_of(2), key_of(1)], is_settle=is_settle))
    rig.step()
    (namespace,) = rig.writer.namespaces.values()
    victims = namespace.recency._order.victims(9, lambda slot: True)
    assert sorted(victims) == [*np.flatnonzero(namespace.space.is_used)]


def test_a_reset_that_is_asked_for_twice_begins_one_epoch() -> None:
    """Several tiers of its engine forward it."""
    rig = PathRig()
    node = RigNode(rig)
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR]
    rig.send(node.client, Reset(5, mark=77))
    rig.send(node.client, Reset(6, mark=77))
    rig.step(2, seconds=PATH_REST_S)
    assert [each.epoch for each in rig.take(node.client, Epoch)] == [1, 1]


def test_an_engine_that_starts_alone_tries_a_refused_reset_seldom() -> None:
    rig = PathRig()
    first = RigNode(rig)
    rig.send(first.client, Reset(5))
    rig.step()
    first.store([1])
    rig.writer.disconnect(first.client)
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 100
    for _ in range(30):  # it comes again every second
        node = RigNode(rig)
        assert node.refused and "look at the disk" in node.refused[0].text
        rig.writer.disconnect(node.client)
        rig.step(seconds=1.0)
    assert 100 - len(disk.failures) in range(5, 8)
    disk.failures.clear()
    rig.step(2, seconds=PATH_REST_S)
    assert RigNode(rig).held([1]) == []


def test_a_killed_writer_forgets_a_reset_that_it_did_not_answer() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1, 2])
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 10
    rig.send(node.client, Reset(5))
    rig.step()
    rig.kill()
    disk.failures.clear()
    rig.start()
    node = RigNode(rig)
    assert node.held([1, 2]) == [1, 2]
    rig.send(node.client, Reset(6))
    rig.step()
    assert [each.epoch for each in rig.take(node.client, Epoch)] == [1]
    assert node.held([1, 2]) == []


def test_a_slot_whose_former_entry_is_damaged_keeps_its_new_block(tmp_path: Path) -> None:
    rig = LmdbRig(segments=1, roots=(tmp_path / "path",), real=RealFileSystem(direct=False))
    node = RigNode(rig)
    node.store(list(range(8)))
    table = next(iter(rig.writer.namespaces.values())).table
    assert isinstance(table, LmdbBlockTable)
    with table._env.begin(write=True, db=table._blocks) as txn:
        txn.put(key_of(3), bytes(ENTRY_BYTES))
    rig.kill()
    rig.boot = b"boot 2"  # the presence table is built anew
    rig.start()
    node = RigNode(rig)
    space = next(iter(rig.writer.namespaces.values())).space
    assert (space.used, space.free([0])) == (7, 1)
    assert node.store([100]) == [Committed.OK]
    assert (space.used, space.free([0])) == (8, 0)
    rig.close()


def test_a_broken_index_ends_the_writer_and_the_next_one_goes_on() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1])
    setattr(next(iter(rig.writer.namespaces.values())).table, "is_unusable", True)  # noqa: B010
    node.ask([2])
    with pytest.raises(CorruptionError, match="the next writer opens it again"):
        rig.step()
    rig.kill()
    rig.start()
    assert RigNode(rig).held([1]) == [1]


def test_a_segment_that_cannot_be_made_is_tried_again_later() -> None:
    rig = PathRig()
    node = RigNode(rig)
    rig.fs.fail("preallocate", errno.ENOSPC)
    assert node.store([1], steps=300) == []
    rig.step(seconds=31.0)
    assert node.store([1]) == [Committed.OK]


def test_a_disk_without_room_for_the_order_of_eviction_costs_recency_only() -> None:
    rig = PathRig()
    rig.fs.fail("preallocate", errno.ENOSPC, skip=1, times=2)  # the first is the presence table
    node = RigNode(rig)
    assert node.store([1, 2]) == [Committed.OK] * 2
    state = next(iter(rig.writer.namespaces.values())).home.state_folder
    assert not [name for name in rig.fs.list_dir(state) if name.endswith(".new")]
    rig.close()
    rig.start()
    assert RigNode(rig).held([1, 2]) == [1, 2]


NONSENSE: list[FromNode] = [
    Grant(1, [b""]),
    Grant(2, [b"x" * 65]),
    Grant(3, [key_of(1)] * (MAX_KEYS_PER_MESSAGE + 1)),
    Grant(4, []),
    Commit(5, 0, [key_of(1)], b"abc", b"abc"),
    Commit(6, 0, [key_of(1)], int32([-1]), uint64([1])),
    Commit(7, 9, [key_of(1)], int32([2**31 - 1]), uint64([1])),
    Commit(8, -1, [b""], int32([0]), uint64([1])),
    Commit(9, 0, [], b"", b""),
    Commit(10, 0, [key_of(1), key_of(1)], int32([0, 0]), uint64([1, 2])),
    Release(b"\0"),
    Release(int32([-1, 0, 2**31 - 1]), has_failed=True),
    Bad([key_of(9)], b"", uint64([1])),
    Bad([b""], int32([0]), uint64([1])),
    Touch([b""], is_chain=True),
    Touch([key_of(9)] * (MAX_CHAIN_HEADS + 1), is_chain=True),
    Touch([key_of(9)] * (MAX_KEYS_PER_MESSAGE + 1)),
    Touch([key_of(9)] * 3, is_settle=True),
    Read(-5),
    Ask(11, "stat", b"\xff"),
    Ask(12, "take", b"[]"),
    Retire(0),
]


def test_messages_without_sense_change_nothing_and_stop_nobody() -> None:
    rig = PathRig()
    honest, other = RigNode(rig), RigNode(rig)
    honest.store([9])
    for message in NONSENSE:
        rig.send(other.client, message)
        rig.step(seconds=0.01)
    rig.step(5, seconds=1.0)
    assert {m.request for m in rig.take(other.client, Granted)} >= {1, 2, 3, 4}
    done = rig.take(other.client, CommitDone)
    assert {m.request for m in done} == {5, 6, 7, 8, 9, 10}
    assert {code for m in done for code in m.outcomes} == {Committed.STALE}
    assert honest.held([1, 9]) == [9]
    assert honest.store([1]) == [Committed.OK]
    assert not rig.writer.wants_close


def test_a_connection_without_a_hello_gets_nothing() -> None:
    rig = PathRig()
    node = RigNode(rig, protocol=99)
    for message in NONSENSE:
        rig.send(node.client, message)
    rig.step()
    assert all(slot == -2 for m in rig.take(node.client, Granted) for slot in slots_in(m))
    assert {code for m in rig.take(node.client, CommitDone) for code in m.outcomes} == {
        Committed.STALE
    }


def test_one_key_twice_in_a_grant_gets_one_slot() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.ask([1, 1, 2])
    rig.step(2)
    (answer,) = node.grants()
    first, again, second = slots_in(answer)
    assert first == again != second
    assert next(iter(rig.writer.namespaces.values())).space.granted == 2
    node.commit([1, 1, 2], [first, again, second], answer.epoch)
    rig.step()
    assert node.outcomes() == [[Committed.OK, Committed.STALE, Committed.OK]]


def test_too_many_grants_of_one_node_are_answered_at_once() -> None:
    rig = PathRig(segments=1)
    greedy, other = RigNode(rig), RigNode(rig)
    greedy.ask(list(range(8)))
    rig.step(2)
    greedy.grants()
    for number in range(MAX_WAITING_PER_CLIENT + 3):
        greedy.ask([100 + number])
    other.ask([300])
    rig.step(2, seconds=0.01)
    answers = greedy.grants()
    assert len(answers) >= 3 and {each.why for each in answers} <= {Why.LATER, Why.FULL}
    rig.step(3, seconds=1.0)
    assert len(other.grants()) == 1


def test_a_newer_version_makes_the_writer_close_and_others_come_back() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1])
    rig.send(node.client, Retire(PROTOCOL + 1))
    rig.step()
    assert rig.writer.wants_close
    assert RigNode(rig).refused[0].why.value == "closing"
    rig.close()
    rig.start()
    late = RigNode(rig)
    for protocol, why in (PROTOCOL, RefusedWhy.CLOSING), (PROTOCOL - 1, RefusedWhy.PROTOCOL):
        rig.send(late.client, Retire(protocol))
        rig.step()
        (refused,) = rig.take(late.client, Refused)
        assert refused.why is why, "it may join"
        assert f"update the kvcascade of this process, which speaks {protocol}" in refused.text
    assert not rig.writer.wants_close
    assert RigNode(rig).held([1]) == [1]


def test_a_second_hello_is_ignored() -> None:
    rig = PathRig(120)
    node = RigNode(rig)
    assert node.welcome is not None
    spec = RigNode(rig, "second").spec
    rig.send(node.client, Hello(1, "again", ("/path",), spec, rig.options))
    rig.step()
    assert node.store([1]) == [Committed.OK]
    assert rig.writer.namespaces[node.welcome.folder].space.used == 1
