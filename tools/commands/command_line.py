"""Options, exit statuses and error messages that commands share.

Every start of the command line imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, is_dataclass
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ...errors import (
    ConfigError,
    ErrorKind,
    KVCascadeError,
    file_mode,
    from_os_error,
    is_folder,
    os_errors,
)

SCHEMA_VERSION = 1
"""Version of every JSON document; it increases when a field is removed or changes its meaning."""
STDOUT, STDERR = 1, 2


class ExitCode(IntEnum):
    """Exit statuses of commands."""

    OK = 0
    PROBLEMS = 1
    """The command did its work and found something wrong."""
    USAGE = 2
    """The command was called with wrong arguments."""
    CANNOT_OPEN = 3
    """The path does not exist or cannot be read."""
    IN_USE = 4
    """A running process has the data open, or the writer of the path does not answer."""
    NO_SPACE = 5
    """Not enough disk or memory."""
    MISSING = 6
    """An optional package is not installed."""
    DIFFERENT = 7
    """The input belongs to another namespace."""
    INTERRUPTED = 130
    """SIGINT, SIGTERM or SIGHUP ended the command."""
    CLOSED_PIPE = 141
    """The reader of standard output has closed it (`| head`), as after SIGPIPE."""


_OF_KIND = {
    ErrorKind.IN_USE: ExitCode.IN_USE,
    ErrorKind.NO_SPACE: ExitCode.NO_SPACE,
    ErrorKind.CONFIG: ExitCode.USAGE,
}


def given_path(text: str) -> Path:
    """Return a path; not the current folder for a shell variable that is empty."""
    if not text:
        raise typer.BadParameter("it is empty; give a folder")
    return Path(text)


# Paths are `readable=False`: the parser would call a locked path a wrong call (status 2).
PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The tier's path, or one namespace directory in it.", parser=given_path
    ),
]
AlsoOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--also",
        metavar="PATH",
        help="Another path of the same tier (repeatable).",
        parser=given_path,
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Any unique part of name, label or fingerprint."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="An engine's metrics: http://host:8000/metrics."),
]
ArenaDirOption = Annotated[
    Path,
    typer.Option(
        "--arena-dir", metavar="DIR", help="Directory of the engines' CPU tiers.", readable=False
    ),
]
ARENA_DIR = Path("/dev/shm")
OutOption = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FOLDER", help="Folder for results, logs and files.", readable=False
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="PNG", help="Also draw a picture (needs kvcascade[plot]).", readable=False
    ),
]


class CommandError(Exception):
    """A command cannot continue; the message gives the remedy."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: KVCascadeError) -> ExitCode:
    """Return the exit status for a `KVCascadeError`."""
    return _OF_KIND.get(error.kind, ExitCode.CANNOT_OPEN)


@contextmanager
def answering(as_json: bool, command: str = "kvcascade") -> Iterator[None]:
    """End the command on an error: print one sentence or a JSON document, and exit.

    `command` is the word before the sentence. SIGTERM and SIGHUP end the command as SIGINT does, so
    contexts inside clean up. Main thread only.
    """
    try:
        with terminable():
            yield
    except CommandError as error:
        _fail(str(error), error.code, as_json, command)
    except KVCascadeError as error:
        _fail(str(error), code_of(error), as_json, command)
    except (KeyboardInterrupt, typer.Abort):  # Abort: a question got no answer
        _fail("interrupted", ExitCode.INTERRUPTED, as_json, command)


@contextmanager
def answering_apart(as_json: bool) -> Iterator[None]:
    """With `as_json`, send output of this process and its children to standard error."""
    if not as_json or sys.stdout is None:  # None: the process has no standard output
        yield
        return
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def emit(schema: str, document: Any) -> None:
    """Print a dictionary or a dataclass as a JSON document on standard output, in ASCII.

    Dataclasses in it become objects, NaN and infinity become null.
    """
    head = {"schema": f"kvcascade.{schema}", "schema_version": SCHEMA_VERSION}
    text = json.dumps(document, default=_plain)
    finite = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN, Infinity
    print(json.dumps({**head, **finite}, indent=1))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def finish(code: ExitCode) -> None:
    """End the command with a status; return if it is 0."""
    if code is not ExitCode.OK:
        raise typer.Exit(int(code))


def complain(message: str, code: ExitCode, as_json: bool, command: str = "kvcascade") -> ExitCode:
    """Report the reason why a command fails, as a sentence or a JSON document; return `code`."""
    if as_json:
        emit("error", {"error": code.name.lower(), "message": message})
    else:
        print(f"{command}: {message}", file=sys.stderr)
    return code


def check_is_file(option: str, path: Path) -> None:
    """Raise `CommandError` if a path does not exist or is a folder, or `TierIOError` if this user
    cannot read it."""
    with os_errors(f"looking for {path}"):
        mode = file_mode(path)
    if stat.S_ISDIR(mode):
        problem = f"{path} is a folder; give the name of a file in it"
        raise CommandError(f"{option}: {problem}", ExitCode.USAGE)
    if not mode:
        raise CommandError(f"{option}: there is no file {path}", ExitCode.USAGE)
    if not os.access(path, os.R_OK, effective_ids=True):
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise from_os_error(denied, f"reading {path}")


def check_place(option: str, path: Path | None) -> None:
    """Raise `ConfigError` if no file can be created at a path; call this before long work."""
    if path is None:
        return
    try:
        _check_place(option, path)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise ConfigError(f"{option}: {problem}; give another") from None


def _check_place(option: str, path: Path) -> None:
    mode = file_mode(path)
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{option}: {path} is a folder; give the name of a file in it")
    if mode:
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{option}: {path} cannot be written by this user; give another")
        return
    folder = path.absolute().parent
    if not is_folder(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}: {folder} is not a writable folder; give another")


def settings_of(pairs: Sequence[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of `--set KEY=VALUE`, JSON or plain text. Raises `CommandError`.

    The values of keys in `texts` are text in any case.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not key or not is_pair:
            raise CommandError(f'--set: "{pair}" is not KEY=VALUE', ExitCode.USAGE)
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
        if key in texts and not isinstance(found[key], str):
            found[key] = value
    return found


def check_found(modules: Sequence[str], command: str) -> None:
    """Raise `CommandError` if an optional module that the command needs is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        use = f"use `make {command}` or pip install 'kvcascade[vllm,plot]'"
        raise CommandError(f"{', '.join(missing)} not found; {use}", ExitCode.MISSING)


def _fail(message: str, code: ExitCode, as_json: bool, command: str) -> NoReturn:
    raise typer.Exit(int(complain(message, code, as_json, command))) from None


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that contexts clean up.

    A SIGHUP that is ignored, as under nohup, stays so. Main thread only.
    """
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.SIGTERM] if is_kept else [signal.SIGTERM, signal.SIGHUP]
    before = [(number, signal.signal(number, signal.default_int_handler)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
