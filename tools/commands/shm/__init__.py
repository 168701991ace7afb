"""`kvcascade shm`: arenas that stay in shared memory (`"persist": true`)."""

from __future__ import annotations

from typing import Annotated

import typer

from ..command_line import (
    ARENA_DIR,
    ArenaDirOption,
    CommandError,
    ExitCode,
    JsonOption,
    answering,
    emit,
    finish,
)

app = typer.Typer(help="Arenas in shared memory that outlive their engines.", no_args_is_help=True)


@app.command("ls")
def list_(arena_dir: ArenaDirOption = ARENA_DIR, as_json: JsonOption = False) -> None:
    """List kept arenas: size, blocks, and whether an engine is using them.

    What engines left that were killed during their start is removed.

    Examples:

        kvcascade shm ls
    """
    with answering(as_json):
        from ....tiers.cpu.arena_file import sweep
        from .kept_arenas import found, print_arenas, print_swept

        swept = sweep(str(arena_dir))
        arenas = found(arena_dir)
        if as_json:
            emit("shm", {"arenas": [arena.as_json() for arena in arenas]})
        else:
            print_swept(swept)
            print_arenas(arenas, arena_dir)


@app.command("drop")
def drop(
    name: Annotated[str | None, typer.Argument(help="Name of an arena; all by default.")] = None,
    arena_dir: ArenaDirOption = ARENA_DIR,
    as_json: JsonOption = False,
) -> None:
    """Free the memory of kept arenas. Arenas that an engine is using stay.

    What engines left that were killed during their start is removed, too.

    Examples:

        kvcascade shm drop

        kvcascade shm drop kvcascade-kept-0123456789abcdef0123456789abcdef
    """
    with answering(as_json):
        from ....tiers.cpu.arena_file import sweep
        from .kept_arenas import drop_kept, found, print_dropped, print_swept

        swept = sweep(str(arena_dir))
        arenas = [arena for arena in found(arena_dir) if name in (None, arena.path.name)]
        if name is not None and not arenas:
            raise CommandError(f"{name} is not in {arena_dir}; see shm ls", ExitCode.CANNOT_OPEN)
        dropped = [arena for arena in arenas if drop_kept(str(arena.path))]
        if as_json:
            emit("shm-drop", {"dropped": [arena.path.name for arena in dropped]})
        else:
            print_swept(swept)
            print_dropped(dropped, arenas, arena_dir)
    if name is not None and not dropped:
        finish(ExitCode.IN_USE)
