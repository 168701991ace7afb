"""The entry of the command line: `kvcascade COMMAND`, or `python -m kvcascade.tools COMMAND`.

The commands are imported here, which takes a moment: a signal ends the process quietly meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""Exit status `ExitCode.INTERRUPTED`, which is not imported yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `commands.command_line.ExitCode`).

    Main thread only.
    """
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, _end)) for number in heard]
    try:
        from .command_app import run
        from .commands.command_line import terminable
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    try:
        with terminable():
            return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _end(*_: object) -> NoReturn:
    """End the process at once: no command has begun."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
