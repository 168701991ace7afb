"""`kvcascade config`: write a configuration for `vllm serve`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .command_line import CommandError, ExitCode, JsonOption, answering, emit, settings_of
from .version import ENGINES, installed_version

FIRST_WITH_TIMEOUT = (0, 18)
"""First vLLM that has `--shutdown-timeout`."""

FolderOption = Annotated[
    list[str] | None,
    typer.Option("--path", metavar="FOLDER", help="Folder on the NVMe device (repeatable)."),
]
CpuOption = Annotated[
    str | None, typer.Option("--cpu", metavar="SIZE", help='CPU tier, such as 64GiB or "40%".')
]
DiskOption = Annotated[
    str | None, typer.Option("--disk", metavar="SIZE", help='NVMe tier, such as 2TiB or "80%".')
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other top-level key (repeatable); VALUE is JSON or text.",
    ),
]
YamlOption = Annotated[
    bool, typer.Option("--yaml", help="Print lines for the file of `vllm serve --config`.")
]


def config(
    path: FolderOption = None,
    cpu: CpuOption = None,
    disk: DiskOption = None,
    others: SetOption = None,
    as_yaml: YamlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the options of `vllm serve` that switch kvcascade on.

    Without --path, the command asks for it on a terminal. Sizes that are not given are shares of
    the machine; `kvcascade check` shows them.

    Examples:

        kvcascade config --path /mnt/nvme/kv

        kvcascade config --path /mnt/a/kv --path /mnt/b/kv --disk 2TiB --yaml

        kvcascade config --path /mnt/nvme/kv --set write_mode=through

        kvcascade config --path /mnt/nvme/kv --json | kvcascade check -
    """
    from ...config.schema import parse

    with answering(as_json):
        if as_yaml and as_json:
            raise CommandError("give --yaml or --json, not both", ExitCode.USAGE)
        if not path:
            path, cpu, disk = _asked(cpu, disk)
        transfer = transfer_config(path, cpu, disk, others or ())
        needed_s = parse(transfer["kv_connector_extra_config"]).shutdown_timeout_s
        timeout_s = needed_s if has_shutdown_timeout() else None
        if as_json:
            emit("config", {"kv_transfer_config": transfer, "shutdown_timeout": timeout_s})
        elif as_yaml:
            quoted = json.dumps(transfer).replace("'", "''")
            print(f"kv-transfer-config: '{quoted}'")
            if timeout_s is not None:
                print(f"shutdown-timeout: {timeout_s}")
        else:
            quoted = json.dumps(transfer, indent=2).replace("'", "'\\''")
            last = "" if timeout_s is None else f" \\\n--shutdown-timeout {timeout_s}"
            print(f"--kv-transfer-config '{quoted}'{last}")


def transfer_config(
    path: list[str], cpu: str | None, disk: str | None, others: Sequence[str]
) -> dict[str, Any]:
    """Return vLLM's KV transfer configuration.

    Raises `CommandError` for a malformed KEY=VALUE, or a key that other options set.
    """
    from ...config.environment import text_keys
    from ...config.schema import CascadeConfig

    folders: str | list[str] = path[0] if len(path) == 1 else path
    extra: dict[str, Any] = {"spec_name": "CascadeOffloadingSpec"}
    if cpu is None and disk is None:
        extra["path"] = folders
    else:
        memory = {"type": "cpu"} | ({} if cpu is None else {"capacity": cpu})
        storage = {"type": "nvme", "path": folders} | ({} if disk is None else {"capacity": disk})
        extra["tiers"] = [memory, storage]
    settings = settings_of(others, text_keys(CascadeConfig))
    for key in settings.keys() & extra.keys():
        raise CommandError(f"--set: {key} is set by another option; give it once", ExitCode.USAGE)
    extra |= settings
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def has_shutdown_timeout() -> bool:
    """Return True if the installed vLLM has `--shutdown-timeout`, or if none is installed."""
    number = re.match(r"(\d+)\.(\d+)", installed_version(*ENGINES) or "")
    return number is None or (int(number[1]), int(number[2])) >= FIRST_WITH_TIMEOUT


def _asked(cpu: str | None, disk: str | None) -> tuple[list[str], str | None, str | None]:
    if not sys.stdin or not sys.stdin.isatty():
        raise CommandError("give --path, a folder on the NVMe device", ExitCode.USAGE)
    try:
        path = typer.prompt("Folder on the NVMe device", default="/mnt/nvme/kv", err=True)
        cpu = cpu or typer.prompt("CPU tier (empty: a share)", default="", err=True) or None
        disk = disk or typer.prompt("NVMe tier (empty: a share)", default="", err=True) or None
    except typer.Abort:
        print(file=sys.stderr)  # end the line of the question
        raise
    return [path], cpu, disk
