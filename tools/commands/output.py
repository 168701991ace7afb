"""Handling of errors of standard output: closed by its reader, a full disk, a limited encoding."""

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

    Libraries replace such an error by their own exit status, or let any `OSError` pass.
    """

    def __init__(self, stream: TextIO) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream, and record its error."""
        return self._noting(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Flush the stream, and record its error."""
        self._noting(self._stream.flush)

    def _noting(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            self.error = error
            raise

    def settle(self, code: int) -> int:
        """Flush, and return `code`, or the exit status for a recorded error."""
        try:
            self.flush()
        except (OSError, ValueError):  # the error is recorded, or the stream is closed
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
        """Discard buffered output; the interpreter would fail to write it at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def watched() -> Iterator[Watched]:
    """Watch standard output, and replace characters that it cannot encode by "?"."""
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper):
        before.reconfigure(errors="replace")
    watch = Watched(before)
    sys.stdout = cast("TextIO", watch)
    try:
        yield watch
    finally:
        sys.stdout = before
