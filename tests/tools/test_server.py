"""The server's process: questions over HTTP, what is said when it fails, nothing left behind."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.dev.demo import disk
from kvcascade.tools.dev.server import ServerError, ServerProcess, arguments

PRETENDED = """
import argparse, http.server, json, signal, subprocess, sys, threading
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
asked = [0]

def stop(*_):
    child.kill()
    child.wait()
    threading.Thread(target=server.shutdown).start()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())
    def do_GET(self):
        metrics = f'# HELP a b\\na_total{{model_name="model",tier="cpu"}} {asked[0]}\\nc 1.5\\n'
        self.answer({"/metrics": metrics, "/version": json.dumps({"version": str(child.pid)})}
                    .get(self.path, ""))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked[0] += 1
        if len(body["prompt"]) > 10:
            self.send_error(500)
            return
        if len(body["prompt"]) > 5:  # it fails in the middle, or just ends
            events = [{"choices": [{"token_ids": [7]}]}]
            events += [{"error": {"message": "it broke"}}] * (len(body["prompt"]) > 6)
            self.answer("".join(f"data: {json.dumps(event)}\\n\\n" for event in events))
            return
        events = [{"choices": [{"token_ids": [7]}]}, {"choices": [{"token_ids": [8, 9]}]},
                  {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]),
                   "prompt_tokens_details": {"cached_tokens": 1}}}]
        lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]
        self.answer("\\n\\n".join(lines) + "\\n\\n")

signal.signal(signal.SIGTERM, stop)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.serve_forever()
"""
FAILING = """
import sys
print("noise", file=sys.stderr)
print("ValueError: capacity is wrong", file=sys.stderr)
print("more noise", file=sys.stderr)
"""


def process(tmp_path: Path, program: str = PRETENDED) -> ServerProcess:
    """A process that pretends to be a server."""
    return ServerProcess(tmp_path / "server.log", {}, {}, (sys.executable, "-c", program))


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_questions_and_a_stop(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        server.ready()
        child = int(server.version())
        first, second = server.complete_all([[3, 4], [5, 6, 7]], 3, clients=2)
        assert (first.prompt_tokens, second.prompt_tokens) == (2, 3)
        assert first.tokens == (7, 8, 9) and first.cached_tokens == 1 and first.ttft_s > 0
        metrics = server.metrics()
        assert metrics["a{tier=cpu}"] == 3, "two questions, and one that brings the counters"
        assert metrics["c"] == 0
        assert server.is_running
        server.stop()
        assert not server.is_running
    assert is_gone(child)


def test_kill_ends_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        server.ready()
        child = int(server.version())
        assert child in server.process_numbers()
        assert server.kill() == 2
        assert is_gone(child)


def test_leaving_kills(tmp_path: Path) -> None:
    server = process(tmp_path)
    children: list[int] = []
    with pytest.raises(RuntimeError), server:
        server.ready()
        children.append(int(server.version()))
        raise RuntimeError
    assert [is_gone(child) for child in children] == [True]


def test_failure_names_the_log_and_shows_the_error(tmp_path: Path) -> None:
    with process(tmp_path, FAILING) as server, pytest.raises(ServerError) as raised:
        server.ready()
    assert raised.value.code is ExitCode.PROBLEMS, "a command that needs the server ends so"
    text = str(raised.value)
    assert "it ended with status 0 while starting" in text and str(tmp_path / "server.log") in text
    assert "capacity is wrong" in text and "noise" not in text


def test_a_question_that_fails(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        server.ready()
        with pytest.raises(ServerError, match="status 500"):
            server.complete(list(range(20)), 1)
        with pytest.raises(ServerError, match="it broke"):
            server.complete(list(range(7)), 1)
        with pytest.raises(ServerError, match="ended early"):
            server.complete(list(range(6)), 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"block_size": 32}, ["--block-size", "32"]),
        ({"enforce_eager": True, "other": False}, ["--enforce-eager"]),
        ({"kv_transfer_config": {"a": [1]}}, ["--kv-transfer-config", '{"a": [1]}']),
    ],
)
def test_options_as_arguments(options: dict[str, Any], expected: list[str]) -> None:
    assert arguments(options) == expected


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
