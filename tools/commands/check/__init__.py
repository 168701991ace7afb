"""`kvcascade check`: options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..command_line import (
    CommandError,
    ExitCode,
    JsonOption,
    answering,
    answering_apart,
    check_is_file,
    emit,
    finish,
)

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG.json",
        help="vLLM's --kv-transfer-config, as a file; -: standard input.",
        readable=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Folder with a config.json, hub name, or known name."
    ),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--kv-bytes-per-token",
        metavar="N",
        min=1,
        help="Instead of --model: KV-cache bytes per token over all ranks.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--kv-dtype", metavar="TYPE", help="vLLM's --kv-cache-dtype, such as fp8."),
]
SizeOption = Annotated[
    int, typer.Option("--block-size", metavar="N", min=1, help="vLLM's --block-size in tokens.")
]
WorldOption = Annotated[
    int, typer.Option("--world-size", metavar="N", min=1, help="Workers (tensor parallel size).")
]


def check(
    config: ConfigArgument,
    model: ModelOption = None,
    kv_bytes_per_token: BytesOption = None,
    kv_dtype: DtypeOption = None,
    block_size: SizeOption = 16,
    world_size: WorldOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Validate a configuration, and show how much each tier will hold.

    Nothing is created. Some memory is allocated briefly, to estimate the duration of a start.

    Examples:

        kvcascade check transfer.json

        kvcascade check transfer.json --model llama-3.1-8b

        jq .kv_transfer_config all.json | kvcascade check -

        kvcascade check kv.json --kv-bytes-per-token 131072 --block-size 32
    """
    with answering(as_json):
        if model is not None and kv_bytes_per_token is not None:
            raise CommandError("give --model or --kv-bytes-per-token, not both", ExitCode.USAGE)
        with answering_apart(True):  # vLLM prints to standard output
            from ....assembly.named import sweep_arenas
            from ..kv_bytes import kv_shape
            from . import config_check
            from .transfer_config import STANDARD_INPUT, read_config

            if config != STANDARD_INPUT:
                check_is_file("CONFIG", config)
            given = read_config(config)
            sweep_arenas({} if given.is_tiering else given.extra)
            tokens = config_check.tokens_in_config(given, block_size)
            note = shape = None
            if model is not None:
                found = kv_shape(model, kv_dtype, world_size)
                note, kv_bytes_per_token = f"{model} ({found.note})", found.bytes_per_token
            if kv_bytes_per_token is not None:
                shape = config_check.BlockShape(tokens, kv_bytes_per_token, world_size)
            report = config_check.check(given, shape, note)
        if as_json:
            emit("check", report.as_json())
        else:
            config_check.print_checked(report)
    finish(ExitCode.PROBLEMS if report.problem else ExitCode.OK)
