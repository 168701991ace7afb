"""Processes that are forked from the tests' own, with copies of its memory and open files."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CHILD_LIMIT_S = 60
"""Time after which the kernel ends a child that waits for ever."""
ANSWER_BYTES_MAX = 1 << 20


def said_by_fork(work: Callable[[], object]) -> str:
    """Call a function in a forked process; return the text of its result or of its error."""
    ours, theirs = os.pipe()
    pid = _fork()
    if pid == 0:
        said = "no answer"
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(theirs, said.encode())
            os._exit(0)
    os.close(theirs)
    try:
        with open(ours, "rb") as answer:
            return answer.read(ANSWER_BYTES_MAX).decode()
    finally:
        os.waitpid(pid, 0)


@contextmanager
def idle_fork() -> Iterator[None]:
    """A forked process that does nothing for as long as the context lasts."""
    pid = _fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():  # Python 3.12 warns of threads; the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_LIMIT_S)
    return pid
