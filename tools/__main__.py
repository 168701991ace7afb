"""The command line: `kvcascade COMMAND`, or `python -m kvcascade.tools COMMAND`.

Options are declared in `commands/`, which imports nothing heavy; what a command does is imported
when it runs. `bench`, `demo` and `replay` keep their own parsers and are handed their arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from .commands import carry, check, gc, inspect, shm, top, verify
from .commands.common import ExitCode, complain
from .commands.output import watched
from .commands.passed_on import pass_on

EPILOG = (
    "Exit status: 0 all well, 1 problems found, 2 wrong call, 3 cannot be opened, "
    "4 in use by an engine, 5 no space, 6 optional package missing, 7 another namespace's, "
    "130 interrupted, 141 nobody reads standard output any more."
)

app = typer.Typer(
    name="kvcascade",
    help="Multi-tier KV-cache offloading for vLLM: look into caches, repair and carry them.",
    epilog=EPILOG,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect")(inspect.inspect)
app.command("top")(top.top)
app.command("verify")(verify.verify)
app.command("gc")(gc.gc)
app.command("export")(carry.export)
app.command("import")(carry.import_)
app.command("check")(check.check)
app.add_typer(shm.app, name="shm")
pass_on(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `commands.common.ExitCode`)."""
    if sys.stdout is None:  # started without one
        return _run(argv)
    with watched() as output:
        try:
            code = _run(argv)
        except OSError:
            if output.error is None:
                raise
            code = ExitCode.CANNOT_OPEN
        return output.settle(code)


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words
    try:
        code = app(args=words, prog_name="kvcascade", standalone_mode=not as_json)
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        said = getattr(error, "format_message", None)  # a wrong call: its class has no public name
        if said is None:
            raise
        return complain(said(), ExitCode.USAGE, as_json)
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main())
