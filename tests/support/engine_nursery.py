"""A process that has imported vLLM already, and forks engines and servers on request.

An engine is three processes, and each of them imports vLLM: that is most of the time of an engine
test. Here vLLM is imported once per test run. The engine's processes are forked: the runner or the
server from the nursery, the engine core from it, the worker from the engine core. So the family of
processes looks as usual. The first server of `test_serve.py` and the engines of `make test-vllm`
start each process anew, as users do.

Only the CPU platform may do that: libgomp and CUDA do not survive a fork once they were used, and
nothing of the nursery has used them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partialmethod
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import IO, Any

import psutil

from kvcascade.tools.dev.server import COMMAND, is_on_cpu

START, FORKED = "KVCASCADE_TEST_ENGINES", "forked"
REQUEST_BYTES_MAX = 1 << 18
SPIN_S = 0.01
"""Time for which an idle process of vLLM looks for messages before it sleeps; vLLM's is 1 s."""
STREAMS = 3
SERVER = COMMAND[-1]
"""Module of vLLM's server."""
READ_AT_IMPORT = ("HF_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_", "XDG_", "HOME")
"""Beginnings of the names of variables that are read by an import, and not again."""
PRELOADED = (
    SERVER,
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "kvcascade.assembly.build",
    "kvcascade.vllm.plugin",
)


class Forked:
    """A forked process, with as much of `subprocess.Popen` as the rigs need."""

    returncode = None
    """Only the nursery, which reaps it, learns that."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: psutil.Process | None = None
        if psutil.pid_exists(pid):
            self._process = psutil.Process(pid)

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is gone. Raises `subprocess.TimeoutExpired`."""
        try:
            if self._process is not None:
                self._process.wait(timeout)
        except psutil.TimeoutExpired:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None

    def poll(self) -> str | None:
        """Return None while it runs."""
        is_running = self._process is not None and self._process.is_running()
        return None if is_running else "gone"

    def send_signal(self, number: int) -> None:
        """Send a signal; it may be gone."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)


class ForkedRunner(Forked):
    """A forked engine runner."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin = stdin
        self.stdout = stdout


class Nursery:
    """The process that forks, as the tests see it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._imported_under = _read_at_import(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.engine_nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """True if imports under this environment would find the same variables."""
        return _read_at_import(environment) == self._imported_under

    def fork(self, environment: Mapping[str, str], folder: Path, log: IO[bytes]) -> ForkedRunner:
        """A runner in a session of its own, with pipes for input and output."""
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        pid = self._ask(environment, folder, None, [input_read, output_write, log.fileno()])
        os.close(input_read)
        os.close(output_write)
        return ForkedRunner(pid, os.fdopen(input_write, "wb"), os.fdopen(output_read, "rb"))

    def fork_server(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: IO[bytes],
        **_: Any,
    ) -> Forked:
        """A server in a session of its own, with the arguments of `subprocess.Popen`."""
        given = list(command[COMMAND.index(SERVER) :])
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), stdout.fileno(), stdout.fileno()]
            return Forked(self._ask(env, cwd, given, streams))

    def _ask(
        self,
        environment: Mapping[str, str],
        folder: Path,
        arguments: Sequence[str] | None,
        streams: list[int],
    ) -> int:
        """Return the number of a forked process. `arguments`: a server's module, and its arguments;
        None: a runner."""
        asked = {
            "environment": dict(environment),
            "folder": str(folder),
            "arguments": arguments,
        }
        request = json.dumps(asked).encode()
        assert len(request) <= REQUEST_BYTES_MAX
        socket.send_fds(self._socket, [request], streams)
        answer = self._socket.recv(REQUEST_BYTES_MAX)
        assert answer, "the process that forks engines is gone; its error is above"
        return int(answer)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


def can_fork() -> bool:
    """True on the CPU platform, unless the tests were told to spawn (`make test-vllm`)."""
    return os.environ.get(START, FORKED) == FORKED and is_on_cpu()


@cache
def nursery() -> Nursery:
    """The one of this test process; started with the first engine."""
    from support.engine_rig import environment

    return Nursery(environment())


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


# ---- in the nursery --------------------------------------------------------------------------


def _fork_instead_of_spawning() -> None:
    """vLLM spawns on the CPU platform, and handles forked processes on others."""
    original = multiprocessing.get_context

    def get_context(method: str | None = None) -> BaseContext:
        return original("fork" if method == "spawn" else method)

    multiprocessing.__dict__["get_context"] = get_context


def _spare_the_processor() -> None:
    """Let idle processes of vLLM sleep soon, and ending ones collect only their own garbage.

    A process that ends would otherwise look at each object of the nursery, and so copy its memory.
    """
    messages = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    start = messages.SpinCondition.__init__
    messages.SpinCondition.__init__ = partialmethod(start, busy_loop_s=SPIN_S)
    gc.__dict__["unfreeze"] = lambda: None


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    _fork_instead_of_spawning()
    _spare_the_processor()
    gc.collect()
    gc.freeze()


def _reap(*_: object) -> None:
    """Wait for the runners that have ended; their times then count as the tests'."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """In the forked process: from here on it is a server, or `python -m support.engine_runner`."""
    from support import engine_runner

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["arguments"] is None:
        engine_runner.main()
        return
    module, *sys.argv[1:] = request["arguments"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(number: int) -> None:
    """Fork a runner for each request, until the tests are gone."""
    signal.signal(signal.SIGCHLD, _reap)
    _preload()
    with socket.socket(fileno=number) as tests:
        while True:
            request, streams, _, _ = socket.recv_fds(tests, REQUEST_BYTES_MAX, STREAMS)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                tests.close()
                break
            for stream in streams:
                os.close(stream)
            tests.send(str(pid).encode())
    _become(json.loads(request), streams)


if __name__ == "__main__":
    main(int(sys.argv[1]))
