"""The command line for tests, and places in the files of a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer import testing
from typer.main import get_command

from kvcascade.tools.command_app import app

ROOT = Path(__file__).resolve().parent.parent.parent
# Otherwise each call would read the parameters of every command: most of the time of a test.
testing.__dict__["_get_command"] = cache(get_command)


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its JSON document."""
        return json.loads(self.out)

    @property
    def one(self) -> Any:
        """The only namespace of its JSON document."""
        (found,) = self.document["namespaces"]
        return found


def call(*arguments: object) -> Answer:
    """Run a command in this process."""
    result = testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


NO_POWERS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
"""Command before another one, which then lacks the powers of root, but not its files."""


def call_bound(*arguments: object) -> Answer:
    """Run a command in a process of its own that permissions bind, also if this one is root."""
    return call_outside(*arguments, before=NO_POWERS if os.geteuid() == 0 else ())


def call_outside(*arguments: object, before: Sequence[str] = ()) -> Answer:
    """Run a command in a process of its own: needed while this one owns the cache."""
    command = [*before, sys.executable, "-m", "kvcascade.tools", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    return Answer(done.returncode, done.stdout, done.stderr)


def least_size(folder: Path) -> str:
    """The smallest `gc --max-size` that a namespace can reach: no segment file fits into it."""
    found = call("inspect", folder.parent, "-n", folder.name, "--json").one["disk_bytes"]
    sizes = [path.stat().st_blocks * 512 for path in folder.glob("segments/*")]
    return str(int(found) - sum(sizes) + min(sizes) // 2)


def segment(folder: Path, number: int = 0) -> Path:
    """A segment file."""
    return folder / "segments" / f"{number:06d}.safetensors"


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
