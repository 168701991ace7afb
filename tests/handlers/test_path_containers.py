"""Engines in containers share a path: no process of one is seen by another."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.children import environment
from support.engine_process import CONTAINER, EngineProcess, has_containers
from support.waiting import wait_until

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.path.writer_note import WRITER_FILE

BLOCK, PER_SEGMENT = 4096, 8
OPTIONS = PathOptions(capacity_of(8, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK)
Containers = Callable[..., EngineProcess]

pytestmark = pytest.mark.skipif(
    not has_containers(), reason="this machine allows no namespaces of users, processes and mounts"
)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    """Starts containers that have one volume mounted at one path, which is empty outside.

    The path is longer than the address of a socket.
    """
    volume, path = tmp_path / "volume", tmp_path / ("v" * 100) / ("w" * 100)
    volume.mkdir()
    path.mkdir(parents=True)
    made: list[EngineProcess] = []

    def start(*, mode: str = "rw", is_thread: bool = False) -> EngineProcess:
        number = len(made)
        log, name = tmp_path / f"log{number}", f"engine {number}"
        engine = EngineProcess(
            [path], OPTIONS, log, name=name, volume=volume, mode=mode, is_thread=is_thread
        )
        made.append(engine)
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    assert not list(path.iterdir()), "everything was written to the volume"


def has_said(engine: EngineProcess, text: str) -> bool:
    """Whether its log has a text after a while of an idle engine."""
    engine.ask("pause")
    return text in engine.log.read_text()


def test_one_container_is_killed_the_other_goes_on_and_a_third_joins(
    containers: Containers,
) -> None:
    one = containers()
    one.ask("join")
    two = containers()
    two.ask("join")
    assert one.pid == two.pid, "each is the first process of its container"
    assert (one.state, two.state) == (NodeState.LEADING, NodeState.FOLLOWING)
    one.store(range(8))
    two.store(range(8, 12))
    assert one.get(range(12)) == two.get(range(12)) == ["OK"] * 12
    one.kill()
    assert two.get(range(12)) == ["OK"] * 12, "reads need no writer"
    two.ask("lead")
    two.store(range(12, 16))
    three = containers()
    three.ask("join")
    assert (two.state, three.state) == (NodeState.LEADING, NodeState.FOLLOWING)
    assert three.holds(range(20)) == list(range(16))
    assert three.get(range(16)) == ["OK"] * 16
    three.store(range(16, 20))
    assert two.get(range(20)) == ["OK"] * 20


def test_a_follower_that_is_killed_leaves_nothing_behind(containers: Containers) -> None:
    one = containers()
    one.ask("join")
    two = containers()
    two.ask("join")
    two.store(range(8))
    two.kill()
    assert one.get(range(8)) == ["OK"] * 8
    for first in range(100, 228, 16):  # more than the tier holds: no slot is lost
        one.store(range(first, first + 16))
    assert one.get(range(212, 228)) == ["OK"] * 16


def test_a_stopped_writer_in_another_container_keeps_its_lock(
    containers: Containers, tmp_path: Path
) -> None:
    one = containers()
    one.ask("join")
    two = containers()
    two.ask("join")
    one.store(range(8))
    one.ask("stop")
    note = next((tmp_path / "volume").glob(f".kvcascade/{WRITER_FILE}"))
    before = note.read_bytes()
    assert two.get(range(8)) == ["OK"] * 8, "reads go on"
    third = containers()
    assert third.ask("pause") is None
    assert third.state is NodeState.JOINING, "nobody is elected while the lock is held"
    assert note.read_bytes() == before and socket.gethostname() in note.read_text()
    one.ask("proceed")
    for engine in (two, third):
        engine.ask("join")
        assert engine.state is NodeState.FOLLOWING
    third.store(range(8, 10))
    assert one.get(range(10)) == ["OK"] * 10


def test_a_container_that_may_not_write_has_no_tier_and_says_why_once(
    containers: Containers,
) -> None:
    one = containers()
    one.ask("join")
    one.store(range(8))
    two = containers(mode="ro", is_thread=True)
    wait_until(partial(has_said, two, "ead-only file system"))
    assert two.state in (NodeState.JOINING, NodeState.OFF)
    assert two.holds(range(8)) == [] and two.get(range(8)) == ["GONE"] * 8
    lines = two.log.read_text().splitlines()
    assert len(lines) == 1, lines
    one.store(range(8, 12))
    assert one.get(range(12)) == ["OK"] * 12


def test_a_lock_that_another_container_holds_in_silence_is_no_second_writer(
    containers: Containers, tmp_path: Path
) -> None:
    """As on a file system that hosts share, whose sockets reach one host only."""
    script = "import sys; from pathlib import Path\n"
    script += "from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem\n"
    script += "from kvcascade.tiers.nvme.path.path_lock import try_lead\n"
    script += "lock = try_lead(RealFileSystem(), Path(sys.argv[1])); print(lock); input()"
    volume = tmp_path / "volume"
    with subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", script, str(volume)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and "Lock" in holder.stdout.readline()
        engine = containers(is_thread=True)
        wait_until(partial(has_said, engine, "which may be on another host"))
        assert engine.state is NodeState.JOINING and engine.ask("put", [1]) == []
        lines = engine.log.read_text().splitlines()
        assert len(lines) == 1, lines
        assert [each.name for each in (volume / ".kvcascade").iterdir()] == ["writer.lock"]
        holder.communicate("\n")
    engine.ask("join")
    engine.store(range(4))
