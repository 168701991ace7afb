"""`kvcascade remote`: the objects of a remote tier."""

from __future__ import annotations

from typing import Annotated

import typer

from ..command_line import ExitCode, JsonOption, answering, emit, finish
from ..gc import DryOption, seconds_of
from ..verify import LimitOption, size_of

app = typer.Typer(
    help="The objects of a remote tier: bucket, folder, Valkey or Redis.",
    no_args_is_help=True,
)

RemoteArgument = Annotated[
    str,
    typer.Argument(
        metavar="REMOTE",
        help="URL of the tier, or the file of a configuration that has it; -: standard input.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another option of the tier, such as endpoint=https://s3.example.org (repeatable).",
    ),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="DIGITS", help="Only namespaces that begin with these digits."
    ),
]
SampleOption = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", min=1, help="Read only N blocks, drawn at random."),
]
RemoveOption = Annotated[
    bool, typer.Option("--remove", help="Remove damaged blocks, and nothing else.")
]
OlderOption = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="Blocks that were not written (Valkey: used) for this time: 12h, 7d, 2w.",
    ),
]
MaxOption = Annotated[
    str | None,
    typer.Option(
        "--max-size", metavar="SIZE", help="Remove the oldest blocks down to this size: 2TiB."
    ),
]


@app.command("ls")
def list_(
    remote: RemoteArgument,
    options: SetOption = None,
    namespace: NamespaceOption = "",
    as_json: JsonOption = False,
) -> None:
    """List namespaces and their generations: blocks, bytes and ages.

    It lists every object, and reads none.

    Examples:

        kvcascade remote ls s3://bucket/kv

        kvcascade remote ls valkeys://cache:6379 --set password_file=/run/kv

        kvcascade remote ls transfer.json --json
    """
    with answering(as_json):
        from ..progress import counting
        from .open_remote import opened
        from .remote_contents import contents_of
        from .remote_view import print_contents

        with opened(remote, options) as tier, counting("listing", "objects", as_json) as advance:
            found = contents_of(tier, namespace, advance)
        if as_json:
            emit("remote-ls", found)
        else:
            print_contents(found)


@app.command("verify")
def verify(
    remote: RemoteArgument,
    options: SetOption = None,
    namespace: NamespaceOption = "",
    sample: SampleOption = None,
    remove: RemoveOption = False,
    bwlimit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read blocks, and check header, checksum and authenticity.

    Authenticity is checked with the secret key. Without --remove it only reads. A block that is not
    authentic stays: engines with the key remove it when they read it.

    Examples:

        kvcascade remote verify s3://bucket/kv --sample 1000

        kvcascade remote verify transfer.json --remove
    """
    with answering(as_json):
        from ..progress import progress_of
        from .open_remote import opened
        from .remote_view import print_verified
        from .verify_remote import verify_remote

        rate = size_of("--bwlimit", bwlimit)
        with opened(remote, options) as tier, progress_of("reading", None, 1, as_json) as advance:
            report = verify_remote(
                tier, namespace, advance, sample=sample, may_remove=remove, bytes_per_s=rate
            )
        if as_json:
            emit("remote-verify", report.as_json())
        else:
            print_verified(report)
    finish(ExitCode.OK if report.is_clean else ExitCode.PROBLEMS)


@app.command("gc")
def gc(
    remote: RemoteArgument,
    options: SetOption = None,
    namespace: NamespaceOption = "",
    older_than: OlderOption = None,
    max_size: MaxOption = None,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old blocks, and all blocks from before the last reset.

    Without --older-than and --max-size only the latter leave. A bucket can do this by itself with a
    lifecycle rule, and a Valkey or Redis server with maxmemory-policy allkeys-lru. A folder needs
    this command.

    Examples:

        kvcascade remote gc s3://bucket/kv --older-than 30d --dry-run

        kvcascade remote gc file:///mnt/share/kv --max-size 2TiB
    """
    with answering(as_json):
        from ..progress import counting
        from .collect_remote import RemoteWish, collect_remote
        from .open_remote import opened
        from .remote_view import print_collected

        wish = RemoteWish(
            older_than_s=None if older_than is None else seconds_of("--older-than", older_than),
            max_bytes=size_of("--max-size", max_size),
        )
        with opened(remote, options) as tier, counting("listing", "objects", as_json) as advance:
            report = collect_remote(tier, namespace, wish, advance, is_dry_run=dry_run)
        if as_json:
            emit("remote-gc", report)
        else:
            print_collected(report)
    finish(ExitCode.PROBLEMS if report.failed else ExitCode.OK)
