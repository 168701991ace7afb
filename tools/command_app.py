"""The commands of the command line; `__main__` runs them.

The options of a command lie in its module under `commands/`, which imports nothing heavy; its work
is imported when it runs. A checkout also has the commands of `dev/`, which the wheel leaves out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from .commands import (
    bench,
    carry,
    check,
    config,
    doctor,
    gc,
    inspect,
    remote,
    shm,
    store,
    top,
    verify,
    version,
)
from .commands.command_line import ExitCode, complain
from .commands.output import watched
from .replay import replay_options

COMPLETE = "_KVCASCADE_COMPLETE"
"""Variable with which a shell asks for completions."""
INSTALL = "--install-completion"
EPILOG = (
    "Exit status: 0 success, 1 problems found, 2 wrong call, 3 cannot be opened, "
    "4 in use by a process, 5 no space, 6 optional package missing, 7 blocks of another namespace, "
    "130 interrupted, 141 standard output closed by its reader."
)

app = typer.Typer(
    name="kvcascade",
    epilog=EPILOG,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _of_checkout() -> dict[str, Callable[..., None]]:
    """Return the commands of `dev/` by name; an installed wheel has none."""
    if find_spec(".dev", __package__) is None:
        return {}
    return dict(import_module(".dev.dev_commands", __package__).COMMANDS)


app.command("config")(config.config)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("top")(top.top)
app.command("verify")(verify.verify)
app.command("gc")(gc.gc)
app.command("export")(carry.export)
app.command("import")(carry.import_)
app.command("check")(check.check)
app.command("store")(store.store)
app.add_typer(shm.app, name="shm")
app.add_typer(remote.app, name="remote")
app.command("replay")(replay_options.replay)
for _name, _command in ({"bench": bench.bench} | _of_checkout()).items():
    app.command(_name)(_command)
app.command("version")(version.print_version)


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        callback=version.print_version_and_end,
        help="Print the version and exit.",
    ),
]


@app.callback(invoke_without_command=True)
def plain(context: typer.Context, show_version: VersionOption = False) -> None:
    """Multi-tier KV-cache offloading for vLLM: inspect, repair, export and import caches."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `commands.command_line.ExitCode`)."""
    if sys.stdout is None:  # the process has no standard output
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
    if COMPLETE in os.environ:  # without this, typer imports rich to strip markup
        vars(import_module("typer._completion_classes"))["_sanitize_help_text"] = str
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words
    try:
        code = app(args=words, prog_name="kvcascade", standalone_mode=not as_json)
    except SystemExit as ended:
        code = ended.code
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        if INSTALL not in words:
            raise
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"{error.filename or 'a file'} cannot be written ({error.strerror})"
        remedy = "set HOME to a folder of yours, or use what --show-completion prints"
        return complain(f"{INSTALL}: {problem}; {remedy}", ExitCode.CANNOT_OPEN, as_json)
    except Exception as error:
        said = getattr(error, "format_message", None)  # a wrong call; its class is private
        if said is None:
            raise
        return complain(said(), ExitCode.USAGE, as_json)
    return code if isinstance(code, int) else int(code is not None)
