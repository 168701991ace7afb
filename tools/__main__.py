"""The command line: `kvcascade COMMAND`, or `python -m kvcascade.tools COMMAND`.

Options are declared in `commands/`, which imports nothing heavy; what a command does is imported
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .commands import carry, check, gc, inspect, shm, top, verify, version
from .commands.command_line import ExitCode, complain
from .commands.output import watched
from .dev.bench import bench_command
from .dev.demo import demo_command
from .replay import replay_options

EPILOG = (
    "Exit status: 0 all well, 1 problems found, 2 wrong call, 3 cannot be opened, "
    "4 in use by an engine, 5 no space, 6 optional package missing, 7 another namespace's, "
    "130 interrupted, 141 nobody reads standard output any more."
)

app = typer.Typer(
    name="kvcascade",
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
app.command("replay")(replay_options.replay)
app.command("bench")(bench_command.bench)
app.command("demo")(demo_command.demo)
app.command("version")(version.print_version)


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        callback=version.print_version_and_end,
        help="Print the version and end.",
    ),
]


@app.callback(invoke_without_command=True)
def plain(context: typer.Context, show_version: VersionOption = False) -> None:
    """Multi-tier KV-cache offloading for vLLM: look into caches, repair and carry them."""
    if context.invoked_subcommand is None:
        print(context.get_help())


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
