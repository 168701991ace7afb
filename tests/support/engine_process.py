"""An engine in a process of its own, which a test can kill or put into a container.

    python -m support.engine_process NODE NAME OPTIONS PATH...

NODE is `process` or `thread`. It reads one question a line as JSON, `[what, numbers]`, and answers
each with one line.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from support.children import environment
from support.path_engine import WAIT_S, PathEngine

from kvcascade.handlers.node.path import path_node
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.nvme.path.path_messages import PathOptions

ANSWER_LIMIT_S = 60.0 + WAIT_S
NOBODY_LIMIT_S = 0.5
PAUSE_S = 2.0
CONTAINER = ("unshare", "-Urpfm", "--mount-proc", "--kill-child")
"""Namespaces of users, process numbers and mounts; everything in them dies with the command."""


def has_containers() -> bool:
    """Return True if this machine lets a process make namespaces and mounts of its own."""
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class EngineProcess:
    """The test's side."""

    def __init__(
        self,
        paths: Sequence[Path],
        options: PathOptions,
        log: Path,
        *,
        name: str = "engine",
        volume: Path | None = None,
        mode: str = "rw",
        is_thread: bool = False,
    ) -> None:
        """Start an engine, and wait until its node has started. `log` gets its standard error.

        With `volume` it lives in a container, in which that folder is mounted at the first path
        with `mode`. A node that is a thread is impatient: it soon says that nobody serves it.
        """
        asked = msgspec.json.encode(options).decode()
        module = [sys.executable, "-m", "support.engine_process"]
        module += ["thread" if is_thread else "process", name, asked, *map(str, paths)]
        if volume is not None:
            script = 'mount --bind "$0" "$1" && mount -o "remount,bind,$2" "$1" && shift 2 && "$@"'
            mount = [script, str(volume), str(paths[0]), mode]
            module = [*CONTAINER, "sh", "-c", *mount, *module]
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                module,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._answer()
        """Number of the engine's process, in its own namespace."""

    def ask(self, what: str, numbers: Sequence[int] = ()) -> Any:
        """Put a question, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, list(numbers)]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def store(self, numbers: Sequence[int]) -> None:
        """Write blocks until all are stored."""
        assert self.ask("store", numbers) is None

    def get(self, numbers: Sequence[int]) -> list[str]:
        """Read blocks; what is OK was compared. Return the outcomes."""
        return [str(outcome) for outcome in self.ask("get", numbers)]

    def holds(self, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that a lookup finds."""
        return list(self.ask("holds", numbers))

    @property
    def state(self) -> NodeState:
        """Last note of its node."""
        return NodeState(self.ask("state"))

    def kill(self) -> None:
        """Kill the engine and all processes that it started; with a container, all of it."""
        self._process.kill()
        self._process.wait(ANSWER_LIMIT_S)

    def close(self) -> None:
        """End the engine as one that is stopped, or take note of its death."""
        if self._process.poll() is None:
            self.ask("close")
        self._process.communicate(timeout=ANSWER_LIMIT_S)

    def _answer(self) -> Any:
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            assert selector.select(ANSWER_LIMIT_S), f"no answer; {self.log.read_text()}"
        line = output.readline()
        assert line, f"the engine died; {self.log.read_text()}"
        return json.loads(line)


# -- the engine's side -------------------------------------------------------------------------


class Answers:
    """Answers the questions of a test."""

    def __init__(self, engine: PathEngine) -> None:
        self._engine = engine

    def store(self, numbers: Sequence[int]) -> None:
        """See `EngineProcess`."""
        self._engine.store(numbers)

    def put(self, numbers: Sequence[int]) -> list[str]:
        """Write blocks once."""
        return [outcome.name for outcome in self._engine.put(numbers)]

    def get(self, numbers: Sequence[int]) -> list[str]:
        """See `EngineProcess`."""
        return [outcome.name for outcome in self._engine.get(numbers)]

    def holds(self, numbers: Sequence[int]) -> list[int]:
        """See `EngineProcess`."""
        self._engine.tier.maintain()
        return self._engine.holds(numbers)

    def state(self, _: Sequence[int]) -> str:
        """See `EngineProcess`."""
        self._engine.until(lambda: True)
        return self._engine.state.value

    def join(self, _: Sequence[int]) -> None:
        """Wait until writes may begin."""
        self._engine.until(lambda: self._engine.tier.takes_puts)

    def lead(self, _: Sequence[int]) -> None:
        """Wait until this node is the writer, and writes may begin."""
        engine = self._engine
        engine.until(lambda: engine.state is NodeState.LEADING and engine.tier.takes_puts)

    def pause(self, _: Sequence[int]) -> None:
        """Go on like an idle engine for a while."""
        end_s = monotonic() + PAUSE_S
        self._engine.until(lambda: monotonic() > end_s)

    def node(self, _: Sequence[int]) -> int:
        """Process number of the node."""
        return self._engine.keeper.pid or 0

    def stop(self, _: Sequence[int]) -> None:
        """Stop the node's process."""
        self._engine.signal(signal.SIGSTOP)

    def proceed(self, _: Sequence[int]) -> None:
        """Let the node's process go on."""
        self._engine.signal(signal.SIGCONT)

    def close(self, _: Sequence[int]) -> None:
        """End as an engine does."""
        self._engine.close()


def main() -> None:
    """Serve a test until it closes the input."""
    kind, name, asked, *paths = sys.argv[1:]
    options = msgspec.json.decode(asked, type=PathOptions)
    roots = [Path(path) for path in paths]
    path_node.NOBODY_LIMIT_S = NOBODY_LIMIT_S
    engine = PathEngine(roots, options, name=name, is_thread=kind == "thread")
    engine.keeper.start()
    answers = Answers(engine)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        what, numbers = json.loads(line)
        print(json.dumps(getattr(answers, what)(numbers)), flush=True)
        if what == "close":
            return


if __name__ == "__main__":
    main()
