"""`kvcascade export` from a path, closed or beside engines.

Only blocks whose payload matches its checksum are written.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from ....errors import ConfigError, file_mode, os_errors
from ....tiers.nvme.segments.chains import head_of
from ..block_scan import NamedBlock, Throttle, scan_blocks
from ..path_blocks import OpenPath
from ..path_folders import NamespaceFolder
from ..progress import Advance
from .carried import CarriedHead, SlotRecord, real_file
from .export_writer import Choice, ExportReport, ExportWriter, whole_or_nothing


def export_namespace(
    path: OpenPath,
    namespace: NamespaceFolder,
    choice: Choice,
    out: Path,
    *,
    may_replace: bool,
    throttle: Throttle,
    progress: Advance,
) -> ExportReport:
    """Write the chosen blocks of a namespace to `out`, or to the target of `out` if it is a link.

    Raises a `KVCascadeError`; no file is left behind then.
    """
    target = real_file(out)
    if not may_replace and file_mode(target):
        raise ConfigError(f"{out} exists already; give another name, or --force")
    name, epoch = namespace.name, int(path.facts(namespace.name)["epoch"])
    if path.was_reset(name):
        raise ConfigError(
            f"the engines of {name} were reset: blocks stored since then may belong to weights "
            "that were updated in place, not to those of its fingerprint; restart an engine and "
            "export from it"
        )
    heads = _prompt_heads(path, name, choice.prompts)
    chosen, missing = _chosen(path, namespace, choice, heads)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with (
        os_errors(f"writing {out}"),
        whole_or_nothing(target) as file,
        path.source(namespace) as source,
    ):
        writer = ExportWriter(
            file,
            len(chosen),
            namespace.block_bytes,
            lambda blocks: _head(namespace, blocks, created),
        )

        def put(block: NamedBlock, payload: memoryview) -> None:
            writer.put(SlotRecord(block.key, block.checksum, len(payload)), payload)

        for findings in scan_blocks(source, chosen, throttle, put):
            progress(len(findings))
        size = writer.finish()
        if int(path.facts(name)["epoch"]) != epoch:
            raise ConfigError(
                f"{name} was reset meanwhile: its weights may have changed, and all older blocks "
                "are gone; export again"
            )
    return ExportReport(name, str(out), writer.blocks, len(chosen) - writer.blocks, missing, size)


def _prompt_heads(path: OpenPath, name: str, prompts: Sequence[str]) -> set[int]:
    """Return the hash heads of all blocks of prompts. Raises `ConfigError` if one of them is not
    completely known."""
    heads: set[int] = set()
    chains = path.state(name).chains() if prompts else None
    for text in prompts:
        assert chains is not None
        block = path.only_block(name, text, "--prefix")
        found, is_whole = chains.up_to(head_of(block.key))
        if not is_whole:
            raise ConfigError(
                f"--prefix: no engine has recorded all blocks before {text}; send the prompt "
                "again, or choose blocks with --hot, --hash or --hashes"
            )
        heads.update(found)
    return heads


def _chosen(
    path: OpenPath, namespace: NamespaceFolder, choice: Choice, heads: Set[int]
) -> tuple[list[NamedBlock], int]:
    """Return the blocks to export, and how many that were asked for are not stored.

    Raises `ConfigError` if a choice was made and fits no block.
    """
    starts, is_all = frozenset(choice.prefixes), not (choice.prefixes or choice.prompts)
    lengths = {len(start) for start in starts}
    found: list[NamedBlock] = []
    missing, absent = set(heads), set(starts)
    for each in path.blocks(namespace.name):
        head = head_of(each.key)
        missing.discard(head)
        fitting = starts & {each.key[:length] for length in lengths}
        if is_all or head in heads or fitting:
            absent -= fitting
            found.append(each)
    if choice.hot_bytes is not None:
        found.sort(key=lambda each: each.used_s, reverse=True)
        del found[choice.hot_bytes // namespace.block_bytes :]
    if not found and choice != Choice():
        _refuse_empty(namespace, choice)
    return found, len(missing) + len(absent)


def _refuse_empty(namespace: NamespaceFolder, choice: Choice) -> NoReturn:
    size = namespace.block_bytes
    if choice.hot_bytes is not None and choice.hot_bytes < size:
        raise ConfigError(
            f"--hot: {choice.hot_bytes} bytes hold no block of {size} bytes; give more"
        )
    raise ConfigError(
        f"no block of {namespace.name} fits these options, so nothing was written; choose others"
    )


def _head(namespace: NamespaceFolder, blocks: int, created: str) -> CarriedHead:
    about = namespace.document
    return CarriedHead(
        label=str(about.get("label", "")),
        fields=about["fields"],
        about=about.get("about", {}),
        fingerprint=str(about["fingerprint"]),
        block_bytes=namespace.block_bytes,
        slots_per_segment=int(about["slots_per_segment"]),
        blocks=blocks,
        created=created,
    )
