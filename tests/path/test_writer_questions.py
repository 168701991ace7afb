"""Questions of tools: they need no namespace of their own, and work beside engines."""

from __future__ import annotations

import errno
import json
from collections import deque
from typing import Any

import pytest
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of, slots_in

from kvcascade.tiers.nvme.path.path_messages import (
    Ask,
    Committed,
    Read,
    Removed,
    Reset,
    SegmentsRemoved,
    Told,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import NOTE_USE_EVERY_S


class Tool:
    """A connection that only asks."""

    def __init__(self, rig: PathRig) -> None:
        self.rig = rig
        self.client = next(rig.numbers)
        rig.inboxes[self.client] = deque()
        rig.writer.connect(self.client)

    def ask(self, what: str, steps: int = 1, **body: object) -> Any:
        """Ask, and return the answer."""
        self.rig.send(self.client, Ask(1, what, json.dumps(body).encode()))
        self.rig.step(steps)
        (told,) = self.rig.take(self.client, Told)
        return json.loads(told.body)


def test_stat_and_list_name_options_and_namespaces() -> None:
    rig = PathRig(120)
    RigNode(rig, "idle").store([1])
    rig.close()
    rig.start()
    node = RigNode(rig, "model")
    node.store([1, 2])
    tool = Tool(rig)
    assert node.welcome is not None
    found = {each["name"]: each for each in tool.ask("list")["namespaces"]}
    own = found.pop(node.welcome.folder)
    assert (own["clients"], own["is_open"]) == (1, True)
    (idle,) = found.values()
    assert (idle["clients"], idle["is_open"]) == (0, False)
    stat = tool.ask("stat")
    assert stat["options"]["capacity_bytes"] == rig.options.capacity_bytes
    assert 0 < stat["bytes"] <= rig.options.capacity_bytes


def test_a_namespace_is_removed_unless_an_engine_uses_it() -> None:
    rig = PathRig(120)
    node = RigNode(rig)
    node.store([1])
    folder = node.welcome.folder  # type: ignore[union-attr]
    tool = Tool(rig)
    assert "in use by 1" in tool.ask("remove", name=folder)["error"]
    assert "no namespace" in tool.ask("remove", name="other-000000000000")["error"]
    rig.writer.disconnect(node.client)
    assert tool.ask("remove", name=folder) == {"is_removed": True}
    assert not rig.fs.exists(ROOT / folder)
    RigNode(rig, "second").store([1])
    rig.close()
    rig.start()
    tool = Tool(rig)
    (idle,) = tool.ask("list")["namespaces"]
    assert tool.ask("remove", name=idle["name"]) == {"is_removed": True}
    assert tool.ask("list") == {"namespaces": []}
    assert RigNode(rig).held([1]) == []


@pytest.mark.parametrize("is_open", [True, False])
def test_a_namespace_is_removed_on_a_full_disk(is_open: bool) -> None:
    """The record of the path may have no room before that."""
    rig = PathRig()
    node = RigNode(rig)
    node.store([1])
    if is_open:
        rig.writer.disconnect(node.client)
    else:
        rig.close()
        rig.start()
    folder = node.welcome.folder  # type: ignore[union-attr]
    rig.fs.fail("pwritev", errno.ENOSPC)
    assert Tool(rig).ask("remove", name=folder) == {"is_removed": True}
    assert not rig.fs.exists(ROOT / folder)
    assert Tool(rig).ask("list") == {"namespaces": []}


def test_reads_count_before_the_next_commit_writes_them_down() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1, 2])
    rig.send(node.client, Read(3 * BLOCK_BYTES))
    found = Tool(rig).ask("namespace", name=node.welcome.folder)  # type: ignore[union-attr]
    assert found["written_bytes"] == found["day"]["written_bytes"] == 2 * BLOCK_BYTES
    assert found["read_bytes"] == found["day"]["read_bytes"] == 3 * BLOCK_BYTES


def test_reads_of_a_tier_that_stores_nothing_survive_a_kill() -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1, 2])
    rig.send(node.client, Read(3 * BLOCK_BYTES))
    rig.step(2, seconds=NOTE_USE_EVERY_S)
    rig.kill()
    rig.start()
    node = RigNode(rig)
    found = Tool(rig).ask("namespace", name=node.welcome.folder)  # type: ignore[union-attr]
    assert found["read_bytes"] == 3 * BLOCK_BYTES


def filled(rig: PathRig, blocks: int) -> RigNode:
    """A node that stored so many blocks, eight in each second."""
    node = RigNode(rig)
    for start in range(0, blocks, 8):
        node.store(list(range(start, start + 8)))
        rig.step(seconds=1.0)
    return node


def test_a_wrong_question_says_what_to_do() -> None:
    tool = Tool(PathRig())
    assert "use one of" in tool.ask("what")["error"]
    assert "give `segments`" in tool.ask("take")["error"]


@pytest.mark.parametrize("what", ["stat", "remove", "namespace", "blocks", "drop", "take"])
def test_a_question_of_any_content_ends_no_writer(what: str) -> None:
    rig = PathRig()
    node = RigNode(rig)
    node.store([1])
    tool, name = Tool(rig), json.dumps(node.welcome.folder)  # type: ignore[union-attr]
    wild = ["Infinity", "-1", "1e999", "NaN", "null", '"x"', "1" + "0" * 30]
    wild += ["[" * depth + "]" * depth for depth in (1, 900, 10_000)]
    for value in wild:
        for body in (
            f'{{"name": {value}}}',
            f'{{"name": {name}, "blocks": {value}, "segments": {value}, "limit": {value}}}',
            f'{{"name": {name}, "blocks": [["aa", {value}, 1]], "after": {value}}}',
            f'{{"name": {name}, "blocks": [[{value}, 1, 1]], "start": {value}}}',
        ):
            rig.send(tool.client, Ask(1, what, body.encode()))
            rig.step()
            assert len(rig.take(tool.client, Told)) == 1
    assert node.held([1]) == [1]


def test_blocks_come_in_batches_and_leave_only_as_they_were_seen() -> None:
    rig = PathRig(120)
    node = RigNode(rig)
    node.store(list(range(10)))
    name = node.welcome.folder  # type: ignore[union-attr]
    rig.close()
    rig.start()
    tool = Tool(rig)
    rows: list[Any] = []
    after: str | None = ""
    while after is not None:
        answer = tool.ask("blocks", name=name, after=after, limit=4)
        rows += answer["blocks"]
        after = answer["next"]
    assert [row[0] for row in rows] == [key_of(n).hex() for n in range(10)]
    assert {row[3] for row in rows} == {int(rig.wall())}, "when they were stored"
    facts = tool.ask("namespace", name=name)
    assert facts["blocks"] == 10 and facts["written_bytes"] == 10 * BLOCK_BYTES
    again = RigNode(rig)
    changed = [rows[1][0], rows[1][1], rows[1][2] ^ 1]
    assert tool.ask("drop", name=name, blocks=[rows[0], changed]) == {"dropped": 1}
    assert again.held(list(range(10))) == list(range(1, 10))
    assert len(rig.take(again.client, Removed)) == 1
    assert "error" in tool.ask("blocks", name=name, limit=0)
    assert "error" in tool.ask("blocks", name=name, after="x")
    assert "error" in tool.ask("blocks", name="no-000000000000")
    assert "error" in tool.ask("drop", name=name, blocks=[[1]])


def test_blocks_by_the_start_of_their_hash() -> None:
    rig = PathRig(120)
    node = RigNode(rig)
    node.store([1, 2, 256, 257, 300])
    tool = Tool(rig)
    name = node.welcome.folder  # type: ignore[union-attr]

    def found(start: bytes, after: str = "", limit: int = 100) -> tuple[list[str], bool]:
        asked: dict[str, Any] = {"name": name, "start": start.hex(), "after": after, "limit": limit}
        answer = tool.ask("blocks", **asked)
        return [row[0] for row in answer["blocks"]], answer["next"] is not None

    of = {number: key_of(number).hex() for number in (1, 2, 256, 257, 300)}
    assert found(b"\0\0\1")[0] == [of[256], of[257], of[300]]
    assert found(b"\0\0\1", limit=2) == ([of[256], of[257]], True)
    assert found(b"\0\0\1", after=of[257]) == ([of[300]], True)
    assert found(b"\0\0\1", after=of[300]) == ([], False)
    assert found(key_of(2)) == ([of[2]], False), "the whole hash, and what follows is another"
    assert found(b"\xff") == found(b"x" * 100) == ([], False)
    assert "error" in tool.ask("blocks", name=name, start="0")


def test_a_namespace_that_a_tool_empties_is_there_until_the_tool_leaves() -> None:
    rig = PathRig(120)
    folder = filled(rig, 16).welcome.folder  # type: ignore[union-attr]
    rig.close()
    rig.start()
    tool = Tool(rig)
    assert tool.ask("namespace", steps=2, name=folder)["blocks"] == 16
    numbers = sorted(rig.writer.path.space.files.numbers(folder))
    assert tool.ask("take", steps=20, name=folder, segments=numbers)["taken"] == numbers
    rig.step(10, seconds=1.0)
    assert tool.ask("namespace", name=folder)["blocks"] == 0
    rig.writer.disconnect(tool.client)
    rig.step(2, seconds=1.0)
    assert not rig.fs.exists(ROOT / folder)


def test_engines_and_grants_of_a_namespace() -> None:
    rig = PathRig(120)
    node, other = RigNode(rig), RigNode(rig, "other")
    node.ask([1, 2, 3])
    rig.step(3)
    facts = Tool(rig).ask("namespace", name=node.welcome.folder)  # type: ignore[union-attr]
    assert facts["engines"] == [f"node {node.client}"] and other.welcome is not None
    assert facts["granted_slots"] == 3


class TestTake:
    """Segments that a tool takes beside engines."""

    @pytest.fixture
    def rig(self) -> PathRig:
        return PathRig(8)

    @pytest.fixture
    def node(self, rig: PathRig) -> RigNode:
        return filled(rig, 24)

    def take(self, rig: PathRig, node: RigNode, *numbers: int, steps: int = 40, **more: Any) -> Any:
        name = node.welcome.folder  # type: ignore[union-attr]
        return Tool(rig).ask("take", steps=steps, name=name, segments=list(numbers), **more)

    def test_blocks_leave_with_their_segments(self, rig: PathRig, node: RigNode) -> None:
        assert self.take(rig, node, 0, 2, 77) == {"taken": [0, 2], "blocks": 16}
        assert len(node.held(list(range(24)))) == 8
        gone = [n for message in rig.take(node.client, SegmentsRemoved) for n in message.numbers]
        assert gone == [0, 2] and len(rig.take(node.client, Removed)) == 2
        assert Committed.OK in node.store([100])

    def test_only_empty_ones_on_request(self, rig: PathRig, node: RigNode) -> None:
        everything = list(range(8))
        before = len(node.held(list(range(24))))
        assert self.take(rig, node, *everything, if_empty=True)["blocks"] == 0
        assert len(node.held(list(range(24)))) == before

    def test_a_segment_that_is_written_to_is_waited_for(self, rig: PathRig, node: RigNode) -> None:
        node.ask([500])
        rig.step()
        (granted,) = node.grants()
        (slot,) = slots_in(granted)
        tool = Tool(rig)
        name = node.welcome.folder  # type: ignore[union-attr]
        body = json.dumps({"name": name, "segments": [slot // 8]}).encode()
        rig.send(tool.client, Ask(1, "take", body))
        rig.step(5)
        assert rig.take(tool.client, Told) == []
        node.commit([500], [slot], granted.epoch)
        rig.step(5)
        (told,) = rig.take(tool.client, Told)
        assert json.loads(told.body)["taken"] == [slot // 8]
        assert node.held([500]) == []

    def test_one_that_stays_in_use_is_passed_over(self, rig: PathRig, node: RigNode) -> None:
        node.ask([500])
        rig.step()
        (slot,) = slots_in(node.grants()[0])
        tool = Tool(rig)
        name = node.welcome.folder  # type: ignore[union-attr]
        body = json.dumps({"name": name, "segments": [slot // 8]}).encode()
        rig.send(tool.client, Ask(1, "take", body))
        rig.step(4, seconds=1.0)
        (told,) = rig.take(tool.client, Told)
        assert json.loads(told.body) == {"taken": [], "blocks": 0}

    def test_a_node_that_comes_keeps_the_rest(self, rig: PathRig, node: RigNode) -> None:
        assert self.take(rig, node, 0, 1, if_unused=True) == {"taken": [], "blocks": 0}
        rig.writer.disconnect(node.client)
        tool = Tool(rig)
        name = node.welcome.folder  # type: ignore[union-attr]
        body = json.dumps({"name": name, "segments": [0, 1, 2], "if_unused": True}).encode()
        rig.send(tool.client, Ask(1, "take", body))
        rig.step()
        again = RigNode(rig)
        rig.step(20)
        (told,) = rig.take(tool.client, Told)
        assert json.loads(told.body) == {"taken": [0], "blocks": 8}
        assert len(again.held(list(range(24)))) == 16
        rig.writer.disconnect(again.client)
        assert self.take(rig, node, 1, 2, if_unused=True) == {"taken": [1, 2], "blocks": 16}

    def test_a_tool_that_goes_is_forgotten(self, rig: PathRig, node: RigNode) -> None:
        tool = Tool(rig)
        body = {"name": node.welcome.folder, "segments": [0, 1, 2]}  # type: ignore[union-attr]
        rig.send(tool.client, Ask(1, "take", json.dumps(body).encode()))
        rig.writer.disconnect(tool.client)
        rig.step(10)
        assert len(node.held(list(range(24)))) == 24

    def test_wrong_ones(self, rig: PathRig, node: RigNode) -> None:
        for numbers in (None, ["x"], [0] * 5000):
            name = node.welcome.folder  # type: ignore[union-attr]
            assert "error" in Tool(rig).ask("take", name=name, segments=numbers)
        assert "error" in Tool(rig).ask("take", name="no-000000000000", segments=[1])


def test_a_node_that_lost_its_writer_finds_an_empty_namespace_after_a_removal() -> None:
    """A tool may lead, and remove, in the moment between two writers."""
    rig = PathRig(120)
    node = RigNode(rig)
    node.store([1, 2])
    rig.send(node.client, Reset(9))
    node.store([3])
    epoch = rig.writer.namespaces[node.welcome.folder].epoch  # type: ignore[union-attr]
    rig.close()
    rig.start()
    folder = node.welcome.folder  # type: ignore[union-attr]
    assert Tool(rig).ask("remove", name=folder) == {"is_removed": True}
    again = RigNode(rig, epoch=epoch)
    assert again.refused == [] and again.held([1, 2, 3]) == []
    assert again.store([1]) == [Committed.OK] and again.held([1]) == [1]
