"""An engine process as the demo sees it: started, asked, stopped cleanly, or killed.

The engine runs in a session of its own, so that everything it started can be killed at once. Its
output goes to a log file, whose path every error names.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from . import disk
from .results import DemoError, Metrics, Reply
from .workload import Turn

COMMAND = (sys.executable, "-m", f"{__package__}.vllm_engine")
START_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 30.0
READ_BYTES = 1 << 16
LOG_LINES_SHOWN = 8
_ERROR = re.compile(r"\b\w+Error: ")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "PYTHONHASHSEED": "0",  # engines up to 0.28 find their blocks again only with a fixed seed
    "PYTHONUNBUFFERED": "1",
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""For the engine without a GPU: GiB that it may use for the cache, at the least."""
GPU_OPTIONS: Mapping[str, Any] = {"gpu_memory_utilization": 0.3}
"""For an engine with one: its share of it. Three run side by side in the benchmark, and vLLM does
not start where less is free than it may take, by itself 0.92 of all."""


def is_on_cpu() -> bool:
    """True if the engine that is installed is the one without a GPU."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


class EngineProcess:
    """A running engine. As a context manager it leaves no process behind, however it ends."""

    def __init__(
        self, log: Path, environment: Mapping[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        self.log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._received = b""

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine; returns how long that took, and its version."""
        return self._ask({"start": options}, START_TIMEOUT_S, "starting")

    def generate(
        self, turns: Sequence[Turn], prompts: Sequence[Sequence[int]], answer_tokens: int
    ) -> list[Reply]:
        """Send requests together and wait for all answers."""
        self.send(prompts, answer_tokens)
        answer = self._receive(REPLY_TIMEOUT_S, "answering")
        return [
            Reply(turn, **{**reply, "tokens": tuple(reply["tokens"])})
            for turn, reply in zip(turns, answer["replies"], strict=True)
        ]

    def send(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Send requests and do not wait."""
        self._send({"generate": prompts, "answer_tokens": answer_tokens}, "answering")

    def metrics(self) -> Metrics:
        """The engine's counters, all requests so far included."""
        return Metrics(self._ask({"metrics": True}, REPLY_TIMEOUT_S, "counting")["metrics"])

    def stop(self) -> None:
        """A clean shutdown; returns when every process is gone."""
        family = self._family()
        self._ask({"stop": STOP_TIMEOUT_S}, STOP_TIMEOUT_S + GONE_TIMEOUT_S, "shutting down")
        if psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1]:
            raise self._failure("some of its processes are still there after a clean shutdown")

    def shared_memory(self) -> frozenset[str]:
        """Files of shared memory that its processes have mapped, and that have a name."""
        return disk.shared_memory_of(process.pid for process in self._family())

    def kill(self) -> int:
        """`kill -9` of the engine and everything it started, at once; returns how many."""
        family = [process for process in self._family() if process.is_running()]
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:  # whoever made a session of its own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        return len(family)

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ask(self, command: Mapping[str, Any], timeout_s: float, doing: str) -> dict[str, Any]:
        self._send(command, doing)
        return self._receive(timeout_s, doing)

    def _send(self, command: Mapping[str, Any], doing: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure(f"it ended {self._how()} while {doing}") from None

    def _receive(self, timeout_s: float, doing: str) -> dict[str, Any]:
        """The next line; the time limit is one of silence."""
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            if not self._selector.select(timeout_s):
                raise self._failure(f"it gave no answer for {timeout_s:.0f} s while {doing}")
            chunk = self._process.stdout.read(READ_BYTES)
            if not chunk:
                raise self._failure(f"it ended {self._how()} while {doing}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _how(self) -> str:
        try:
            return f"with status {self._process.wait(GONE_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            return "its output"

    def _failure(self, what: str) -> DemoError:
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if _ERROR.search(line)] or lines
        shown = "\n".join(f"    {line}" for line in telling[-LOG_LINES_SHOWN:])
        return DemoError(f"The engine failed: {what}. From its log, {self.log}:\n{shown}")
