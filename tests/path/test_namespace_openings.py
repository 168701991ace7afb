"""Namespaces that take long to open: everybody else is served, and whoever needs them waits."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.executors import SteppingExecutor
from support.path_rig import ROOT, PathRig, RigNode, key_of, slots_in

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.block_table import BlockTable
from kvcascade.tiers.nvme.path.path_messages import (
    Ask,
    Committed,
    Epoch,
    RefusedWhy,
    Removed,
    Reset,
    StillOpening,
    TierFigures,
    Told,
    Touch,
)
from kvcascade.tiers.nvme.path.writer.messages.held_messages import (
    MAX_HELD_PER_CLIENT,
    OPENING_LIMIT_S,
)

WIDE = 120
"""Segments of a path that has room for two namespaces and more."""


def rig_with(label: str = "slow", segments: int = WIDE) -> tuple[PathRig, SteppingExecutor]:
    """A path with blocks of a namespace that is closed, and an executor that waits."""
    executor = SteppingExecutor()
    rig = PathRig(segments, executor=executor)
    store(rig, executor, RigNode(rig, label), [1, 2, 3])
    rig.close()
    rig.start()
    return rig, executor


def store(rig: PathRig, executor: SteppingExecutor, node: RigNode, keys: list[int]) -> None:
    """Store blocks, with the first segment that they may need."""
    node.ask(keys)
    rig.step()
    executor.run_all()
    rig.step(2, seconds=0.01)
    (answer,) = node.grants()
    node.commit(keys, memoryview(answer.slots).cast("i").tolist(), answer.epoch)
    rig.step()
    assert node.outcomes() == [[Committed.OK] * len(keys)]


def test_a_segment_is_made_while_another_namespace_is_opened() -> None:
    """The job began before the opening, and finds a directory that is locked: our own."""
    executor = SteppingExecutor()
    rig = PathRig(30, executor=executor)
    node = RigNode(rig, "model")
    node.ask([1, 2])
    rig.step()
    other = RigNode(rig, "other", may_wait=True)
    assert len(executor) == 2
    executor.step(1)
    executor.step()
    rig.step(2, seconds=0.01)
    (answer,) = node.grants()
    assert all(slot >= 0 for slot in slots_in(answer)) and other.has_answer()


def finish(rig: PathRig, executor: SteppingExecutor) -> None:
    """Let everything on the executor end."""
    executor.run_all()
    rig.step()


def test_others_are_served_while_a_namespace_is_being_opened() -> None:
    rig, executor = rig_with()
    quick = RigNode(rig, "quick")
    store(rig, executor, quick, [9])
    rig.take(quick.client, StillOpening)
    slow = [RigNode(rig, "slow", may_wait=True) for _ in range(2)]
    assert len(executor) == 1, "both wait for one opening"
    for _ in range(3):
        rig.step(seconds=1.0)
        for node in slow:
            assert not node.has_answer()
            assert rig.take(node.client, StillOpening) == [StillOpening()], "it is told to wait"
        assert quick.store([10]) in ([Committed.OK], [])
    assert rig.take(quick.client, StillOpening) == []
    finish(rig, executor)
    for node in slow:
        assert node.has_answer() and node.held([1, 2, 3, 4]) == [1, 2, 3]
    rig.step(seconds=1.0)
    assert rig.take(slow[0].client, StillOpening) == []


def test_a_label_does_not_part_those_whose_fields_are_equal() -> None:
    """Without a label of the user it is the model's path, which differs between containers."""
    rig, executor = rig_with(segments=3 * WIDE)
    fields = {"weights": "files:1"}
    one, two = (RigNode(rig, label, fields=fields, may_wait=True) for label in ("/a", "/b"))
    finish(rig, executor)
    for node in (one, two):
        assert node.has_answer()
    store(rig, executor, one, [1])
    assert two.held([1]) == [1], "both came while it was being opened"
    rig.close()
    rig.start()
    after = RigNode(rig, "/c", fields=fields)
    assert after.held([1]) == [1], "it was found closed"
    assert RigNode(rig, "/d", fields=fields).held([1]) == [1], "it was open"
    assert RigNode(rig, "/a", fields={"weights": "files:2"}).held([1]) == []


def test_a_node_is_told_which_options_began_another_cache_of_its_model() -> None:
    rig = PathRig(2 * WIDE, 512)
    facts = {"weights": "files:1", "dtype": "float16", "tokens": "16"}
    newest = facts | {"dtype": "bfloat16", "rope": "yarn"}

    def notes(fields: dict[str, str], label: str = "m") -> str:
        welcome = RigNode(rig, label, fields=fields).welcome
        assert welcome is not None
        return "; ".join(welcome.notes)

    assert notes(facts) == notes(facts | {"weights": "files:2"}, "other") == "", "another model"
    assert "tokens" in notes(facts | {"weights": "files:3", "tokens": "32"})
    told = notes(newest)
    for there in (facts, newest):
        assert NamespaceKey("m", there).directory_name in told
    assert "dtype" in told and "rope" in told, "the former one has no `rope`"
    assert "weights" not in told and "tokens" not in told, "these are equal in the most alike one"
    assert notes(facts) == notes(newest) == "", "both are there already"


def test_openings_run_one_after_the_other() -> None:
    executor = SteppingExecutor()
    rig = PathRig(10 * WIDE, executor=executor)
    nodes = [RigNode(rig, label, may_wait=True) for label in ("a", "b", "c")]
    for number in range(3):
        assert len(executor) == 1, "segments of others are made meanwhile"
        executor.step()
        rig.step()
        assert [node.has_answer() for node in nodes] == [at <= number for at in range(3)]


def test_a_node_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    rig, executor = rig_with()
    gone = RigNode(rig, "slow", may_wait=True)
    rig.writer.disconnect(gone.client)
    rig.inboxes[gone.client].clear()
    rig.step(seconds=1.0)
    assert not rig.inboxes[gone.client]
    finish(rig, executor)
    assert not rig.inboxes[gone.client]
    assert RigNode(rig, "slow", may_wait=True).held([1, 2, 3]) == [1, 2, 3]


def test_a_namespace_that_cannot_be_opened_is_refused_to_all_who_wait() -> None:
    rig, executor = rig_with()
    (name,) = rig.writer.path.space.idle.names
    nodes = [RigNode(rig, "slow", may_wait=True) for _ in range(2)]
    ask(rig, nodes[0], "namespace", name=name)
    rig.fs.replace(ROOT / name / "namespace.json", b"{}")
    finish(rig, executor)
    for node in nodes:
        assert node.has_answer() and node.welcome is None
        assert node.refused[0].why is RefusedWhy.NAMESPACE and name in node.refused[0].text
    (told,) = rig.take(nodes[0].client, Told)
    assert name in json.loads(told.body)["error"]
    assert not rig.writer.path.space.has_jobs


class SmallMemoryRig(PathRig):
    """A path on a machine that may have too little memory for the table of a namespace."""

    lacks_memory = False

    def _open_table(
        self, folder: Path, map_bytes: int, identity: bytes, **options: Any
    ) -> BlockTable:
        if self.lacks_memory:
            raise MemoryError("Unable to allocate 8.00 GiB")
        return super()._open_table(folder, map_bytes, identity, **options)


def test_an_opening_that_lacks_memory_ends_no_other_namespace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = SmallMemoryRig(WIDE)
    other = RigNode(rig, "other")
    rig.lacks_memory = True
    refused = RigNode(rig, "large").refused[0]
    assert refused.why is RefusedWhy.FAILED, "it may try again"
    assert "large" in refused.text and "MemoryError Unable to allocate" in refused.text
    assert "Traceback" in caplog.text
    assert other.store([1]) == [Committed.OK]
    rig.lacks_memory = False
    assert RigNode(rig, "large").store([1]) == [Committed.OK]


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_writer_that_closes_meanwhile_loses_nothing(is_clean: bool) -> None:
    rig, executor = rig_with()
    store(rig, executor, RigNode(rig, "quick"), [9])
    RigNode(rig, "slow", may_wait=True)
    rig.writer.close(is_clean=is_clean)
    executor.run_all()
    rig.start()
    assert RigNode(rig, "quick").held([9]) == [9]
    assert RigNode(rig, "slow").held([1, 2, 3]) == [1, 2, 3]


def test_a_question_waits_for_its_namespace() -> None:
    rig, executor = rig_with()
    (name,) = rig.writer.path.space.idle.names
    tool = RigNode(rig, protocol=99)  # a connection without a namespace
    for _ in range(MAX_HELD_PER_CLIENT + 2):
        ask(rig, tool, "namespace", name=name)
    ask(rig, tool, "remove", name=name)
    answers = [json.loads(told.body) for told in rig.take(tool.client, Told)]
    assert ["error" in answer for answer in answers] == [True] * 3, "two too many, and a removal"
    rig.step(seconds=1.0)
    assert rig.take(tool.client, StillOpening) == [StillOpening()]
    finish(rig, executor)
    found = [json.loads(told.body)["blocks"] for told in rig.take(tool.client, Told)]
    assert found == [3] * MAX_HELD_PER_CLIENT


def ask(rig: PathRig, node: RigNode, what: str, **body: object) -> None:
    """Let a connection ask the writer."""
    rig.send(node.client, Ask(next(node.requests), what, json.dumps(body).encode()))
    rig.step()


def test_no_node_waits_for_ever() -> None:
    rig, executor = rig_with()
    node = RigNode(rig, "slow", may_wait=True)
    rig.step(seconds=OPENING_LIMIT_S + 1)
    assert node.has_answer() and node.refused[0].why is RefusedWhy.OPENING
    again = RigNode(rig, "slow", may_wait=True)
    assert not again.has_answer() and len(executor) == 1, "it waits for the same opening"
    finish(rig, executor)
    assert again.has_answer() and again.held([1]) == [1]


def test_a_durability_that_is_asked_for_meanwhile_is_in_force() -> None:
    rig, executor = rig_with()
    slow = RigNode(rig, "slow", may_wait=True)
    rig.writer.path.strengthen()
    finish(rig, executor)
    assert slow.has_answer() and slow.welcome is not None
    assert slow.welcome.options.durability == "power"
    store(rig, executor, slow, [7])
    rig.lose_power(random.Random(1))
    rig.start()
    assert RigNode(rig, "slow").held([7]) == [7], "commits are durable"


def test_a_new_namespace_counts_from_the_begin_of_its_opening() -> None:
    executor = SteppingExecutor()
    rig = PathRig(WIDE, executor=executor)
    space = rig.writer.path.space
    assert space.own_bytes(0) == 0
    RigNode(rig, "new", may_wait=True)
    before = space.own_bytes(0)
    assert before > 0
    finish(rig, executor)
    assert space.own_bytes(0) == before


def test_a_closed_namespace_loses_its_segments_once_it_is_open() -> None:
    rig, executor = rig_with(segments=78)
    (name,) = rig.writer.path.space.idle.names
    openings, node = rig.writer.path.openings.waiting, RigNode(rig, "other")
    rig.wall.advance(1000.0)
    stored_meanwhile = 0
    for start in range(0, 2000, 8):
        is_opening = name in openings
        node.ask(range(start, start + 8))
        for _ in range(4):
            if name not in openings:
                executor.run_all()
            rig.step(seconds=0.3)
        for granted in node.grants():
            slots = memoryview(granted.slots).cast("i").tolist()
            taken = [(start + at, slot) for at, slot in enumerate(slots) if slot >= 0]
            node.commit([key for key, _ in taken], [slot for _, slot in taken], granted.epoch)
            stored_meanwhile += len(taken) if is_opening else 0
        if stored_meanwhile:
            break
    assert stored_meanwhile, "its own blocks are evicted while the room does not come"
    assert name in openings and rig.fs.exists(ROOT / name)
    finish(rig, executor)
    for start in range(5000, 5400, 8):
        node.ask(range(start, start + 8))
        for _ in range(4):
            finish(rig, executor)
            rig.step(seconds=0.3)
    assert not rig.fs.exists(ROOT / name), "it lost its only segment, and was removed"


# -- readers ---------------------------------------------------------------------------------------


def reset_once(rig: PathRig) -> None:
    """Reset a namespace, store a block, and end its engine."""
    node = RigNode(rig)
    node.store([1])
    rig.send(node.client, Reset(5))
    rig.step()
    node.store([2])
    rig.writer.disconnect(node.client)


def test_a_reader_begins_no_epoch_and_an_engine_beside_it_does() -> None:
    rig = PathRig()
    reset_once(rig)
    reader = RigNode(rig, is_reader=True)
    assert reader.held([1, 2]) == [2]
    assert reader.welcome is not None and "were reset" in reader.welcome.notes[0]
    engine = RigNode(rig)
    assert engine.held([1, 2]) == [], "an engine that starts has other weights"
    assert [message.epoch for message in rig.take(reader.client, Epoch)] == [2]
    assert engine.welcome is not None and engine.welcome.notes == []
    engine.store([3])
    assert RigNode(rig).held([3]) == [3], "the second engine is not alone"
    assert rig.take(reader.client, Removed) == []


def test_reads_of_a_reader_are_no_uses() -> None:
    rig = PathRig()
    engine, reader = RigNode(rig), RigNode(rig, is_reader=True)
    for number in range(4):
        engine.store([number])
    namespace = next(iter(rig.writer.namespaces.values()))
    before = namespace.recency.victims(4)
    rig.send(reader.client, Touch([key_of(0)]))
    rig.step()
    assert namespace.recency.victims(4) == before
    rig.send(engine.client, Touch([key_of(0)]))
    rig.step()
    assert namespace.recency.victims(4) == [*before[1:], before[0]]


@pytest.mark.parametrize("label", ["model", "another namespace"])
def test_the_first_node_with_metrics_reports_them(label: str) -> None:
    rig = PathRig(WIDE)
    cache, engine = RigNode(rig, label, has_metrics=False), RigNode(rig)
    rig.step(seconds=2.0)
    for node, expected in (cache, False), (engine, True):
        last = rig.take(node.client, TierFigures)[-1]
        assert (last.is_reporter, last.is_path_reporter) == (expected, expected)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_an_error_of_the_device_is_no_final_refusal(code: int) -> None:
    rig = PathRig()
    calls = [("preallocate", 0), *(("list_dir", skip) for skip in range(4))]
    for operation, skip in calls:  # of the presence table, and of the segments
        rig.fs.fail(operation, code, skip=skip)
        node = RigNode(rig)
        assert [refused.why for refused in node.refused] == [RefusedWhy.FAILED]
    again = RigNode(rig)
    assert again.welcome is not None and again.store([1]) == [Committed.OK]
