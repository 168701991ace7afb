"""Questions of tools: they need no namespace of their own, and work beside engines."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of

from kvcascade.tiers.nvme.path.path_messages import Ask, Removed, SegmentsRemoved, Told, Touch, Why
from kvcascade.tiers.nvme.path.writer.path_options import load_record


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


def test_stat_and_list_name_engines_and_namespaces() -> None:
    rig = PathRig(120)
    RigNode(rig, "idle").store([1])
    rig.close()
    rig.start()
    node = RigNode(rig, "model")
    node.store([1, 2])
    tool = Tool(rig)
    found = {each["label"]: each for each in tool.ask("list")["namespaces"]}
    assert found["model"]["blocks"] == 2 and found["model"]["clients"] == 1
    assert found[None]["last_used_s"] is not None
    stat = tool.ask("stat")
    assert stat["paths"] == ["/path"]
    assert stat["options"]["capacity_bytes"] == rig.options.capacity_bytes
    assert node.welcome is not None
    named = {"name": f"node {node.client}", "namespace": node.welcome.folder}
    assert named in stat["clients"]
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


def test_a_path_shrinks_to_a_size_beside_an_engine() -> None:
    rig = PathRig(8)
    node = RigNode(rig)
    for start in range(0, 64, 8):
        node.store(list(range(start, start + 8)))
        rig.step(seconds=1.0)
    tool = Tool(rig)
    before = tool.ask("stat")["bytes"]
    goal = before - 100_000
    assert tool.ask("shrink", steps=20, bytes=goal)["bytes"] <= goal
    assert node.held(list(range(56, 64))) == list(range(56, 64))
    assert node.held(list(range(8))) == []
    assert len(rig.take(node.client, SegmentsRemoved)) == 3
    assert tool.ask("shrink", steps=40, bytes=0)["bytes"] > 0, "the index stays"
    assert node.held(list(range(64))) == []


def test_a_wrong_question_says_what_to_do() -> None:
    tool = Tool(PathRig())
    assert "use one of" in tool.ask("what")["error"]
    assert "give `bytes`" in tool.ask("shrink", bytes=-1)["error"]


def test_options_change_by_a_command_at_once_or_from_the_next_start_on() -> None:
    rig = PathRig(6)
    node = RigNode(rig, "m")
    for start in range(0, 48, 8):
        node.store(list(range(start, start + 8)))
    tool = Tool(rig)
    taken = tool.ask("stat")["bytes"]
    answer = tool.ask("set", steps=10, capacity_bytes=taken - 70_000, policy="s3fifo")
    assert answer["later"] == []
    assert tool.ask("stat", steps=10)["bytes"] <= taken - 70_000
    assert tool.ask("set", write_budget_bytes=1)["later"] == []
    node.ask([900])
    rig.step(3, seconds=1.0)
    assert [each.why for each in node.grants()] == [Why.BUDGET]
    assert "unknown options size" in tool.ask("set", size=1)["error"]
    assert "is unknown" in tool.ask("set", policy="best")["error"]
    assert "int" in tool.ask("set", capacity_bytes="much")["error"]
    record = load_record(rig.fs, ROOT)
    assert record is not None and record.options.policy == "s3fifo"


def test_another_policy_begins_with_the_order_of_the_last_use() -> None:
    rig = PathRig(segments=2, slots_per_segment=32)
    node = RigNode(rig)
    node.store(list(range(32)))
    rig.step(seconds=5.0)
    node.store(list(range(32, 64)))
    rig.step(seconds=5.0)
    rig.send(node.client, Touch([key_of(key) for key in range(16)]))
    rig.step(seconds=5.0)
    for policy in ("fifo", "lru"):
        assert Tool(rig).ask("set", policy=policy)["options"]["policy"] == policy
    node.store(list(range(100, 124)))
    assert node.held(list(range(16))) == list(range(16))
    assert node.held(list(range(16, 32))) == []


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
    for body in ({"limit": 0}, {"after": "x"}, {"name": "no-000000000000"}):
        assert "error" in tool.ask("blocks", **{"name": name, **body})
    assert "error" in tool.ask("drop", name=name, blocks=[[1]])
