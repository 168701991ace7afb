"""Standard output that cannot be written: its reader has gone, the disk behind it is full, or it
has no such letters."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

from ...errors import ErrorKind, from_os_error
from .command_line import ExitCode, complain

T = TypeVar("T")


class Watched:
    """Standard output that remembers why it failed: libraries end a command for that with a status
    that means something else, or let any `OSError` through, which may come from anywhere."""

    def __init__(self, stream: TextIO) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a stream's."""
        return self._noting(lambda: self._stream.write(text))

    def flush(self) -> None:
        """As a stream's."""
        self._noting(self._stream.flush)

    def _noting(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            self.error = error
            raise

    def settle(self, code: int) -> int:
        """Write what is left; returns the status of a command that has come to `code`."""
        try:
            self.flush()
        except (OSError, ValueError):  # an error that is noted, or nothing left to write to
            pass
        if self.error is None:
            return code
        self._silence()
        if isinstance(self.error, BrokenPipeError):
            return ExitCode.CLOSED_PIPE
        is_full = from_os_error(self.error, "writing").kind is ErrorKind.NO_SPACE
        said = f"standard output cannot be written ({self.error.strerror}); send it elsewhere"
        return complain(said, ExitCode.NO_SPACE if is_full else ExitCode.CANNOT_OPEN, False)

    def _silence(self) -> None:
        """What is still in buffers goes nowhere, or the interpreter complains of it at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def watched() -> Iterator[Watched]:
    """While this lasts, standard output is watched; letters it does not have become "?"."""
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper):
        before.reconfigure(errors="replace")
    watch = Watched(before)
    sys.stdout = cast("TextIO", watch)
    try:
        yield watch
    finally:
        sys.stdout = before
