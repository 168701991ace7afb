"""Handling of a standard output that fails: closed by its reader, on a full disk, or narrow in its
character set."""

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
    """Wrapper of standard output that records its error.

    Libraries hide such an error behind a status of their own, or let any `OSError` through.
    """

    def __init__(self, stream: TextIO) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Do what the stream does, and record its error."""
        return self._noting(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Do what the stream does, and record its error."""
        self._noting(self._stream.flush)

    def _noting(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            self.error = error
            raise

    def settle(self, code: int) -> int:
        """Flush; return `code`, or the status of an error of the output."""
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
        """Discard buffered output, which the interpreter would fail to write at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def watched() -> Iterator[Watched]:
    """Watch standard output; characters that it cannot encode become "?"."""
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper):
        before.reconfigure(errors="replace")
    watch = Watched(before)
    sys.stdout = cast("TextIO", watch)
    try:
        yield watch
    finally:
        sys.stdout = before
