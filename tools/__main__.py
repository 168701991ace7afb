"""The entry of the command line: `kvcascade COMMAND`, or `python -m kvcascade.tools COMMAND`.

The commands are imported here, which takes a moment: SIGINT ends the process quietly meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130
"""Exit status `ExitCode.INTERRUPTED`, which is not imported yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `commands.command_line.ExitCode`).

    Main thread only.
    """
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:  # a shell ignores it for its background
        signal.signal(signal.SIGINT, _end)
    try:
        from .command_app import run
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _end(*_: object) -> NoReturn:
    """End the process at once: no command has begun."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
