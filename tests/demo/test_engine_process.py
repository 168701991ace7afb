"""The engine's process: lines both ways, what is said when it fails, nothing left when it ends."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import psutil
import pytest

from kvcascade.tools.demo import disk
from kvcascade.tools.demo.engine import EngineProcess
from kvcascade.tools.demo.results import DemoError
from kvcascade.tools.demo.workload import Turn

ECHO = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "stop" in asked:
        child.kill()
        child.wait()
    reply = {"prompt_tokens": 2, "cached_tokens": 1, "ttft_s": 0.5, "tokens": [7]}
    print(json.dumps({
        "start_s": 0, "version": child.pid, "metrics": {"a{tier=cpu}": 2},
        "replies": [reply for _ in asked.get("generate", [])],
    }), flush=True)
    if "stop" in asked:
        break
"""
FAILING = """
import sys
print("noise", file=sys.stderr)
print("ValueError: capacity is wrong", file=sys.stderr)
print("more noise", file=sys.stderr)
"""


def process(tmp_path: Path, program: str = ECHO) -> EngineProcess:
    """A process that pretends to be an engine."""
    return EngineProcess(tmp_path / "engine.log", {}, (sys.executable, "-c", program))


def test_conversation_and_clean_stop(tmp_path: Path) -> None:
    with process(tmp_path) as engine:
        child = engine.start({})["version"]
        first, second = engine.generate([Turn(0, 1), Turn(1, 1)], [[3, 4], [5, 6]], 1)
        assert first.turn == Turn(0, 1) and second.tokens == (7,) and second.ttft_s == 0.5
        metrics = engine.metrics()
        assert metrics.get("a", tier="cpu") == 2 and metrics.get("a", tier="nvme") == 0
        assert metrics.has("a") and not metrics.has("b")
        engine.stop()
    assert not psutil.pid_exists(child)


def test_kill_ends_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    with process(tmp_path) as engine:
        child = engine.start({})["version"]
        assert engine.kill() == 2
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_leaving_kills(tmp_path: Path) -> None:
    engine = process(tmp_path)
    child = engine.start({})["version"]
    with pytest.raises(RuntimeError), engine:
        raise RuntimeError
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_failure_names_the_log_and_shows_the_error(tmp_path: Path) -> None:
    with process(tmp_path, FAILING) as engine, pytest.raises(DemoError) as raised:
        engine.start({})
    text = str(raised.value)
    assert "it ended with status 0 while starting" in text and str(tmp_path / "engine.log") in text
    assert "capacity is wrong" in text and "noise" not in text


def test_shared_memory_of_a_process() -> None:
    path = Path(disk.SHARED_MEMORY) / f"demo-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(4096))
        assert str(path) not in disk.shared_memory_of([os.getpid()])
        with path.open("r+b") as stream:
            with mmap.mmap(stream.fileno(), 4096):
                assert str(path) in disk.shared_memory_of([os.getpid(), 1 << 22])
        assert disk.left_behind([str(path)]) == [] and not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_an_arena_that_is_left_is_told_and_stays(tmp_path: Path) -> None:
    arena, gone = tmp_path / "kvcascade-0", tmp_path / "kvcascade-1"
    arena.touch()
    assert disk.left_behind([str(gone), str(arena)]) == [str(arena)] and arena.exists()
