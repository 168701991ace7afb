"""Options of a path, and the description of a namespace, as the Python API and tools need them.

Options of a path are recorded with it. So opening an existing path changes only the options that
are given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.machine import (
    Machine,
    check_nvme,
    disks_of,
    nvme_capacity,
    nvme_disk_bytes,
    refuse_namespace,
)
from ..config.options import At, read_options
from ..config.schema import CascadeConfig, NvmeTierOptions
from ..config.sizes import Bytes
from ..errors import ConfigError, os_errors
from ..tiers.nvme.disk.filesystem import FileSystem
from ..tiers.nvme.namespace import DESCRIPTION, is_namespace_name
from ..tiers.nvme.path.path_messages import NamespaceSpec, PathOptions, sendable
from ..tiers.nvme.path.writer.namespace.namespace_home import read_description
from ..tiers.nvme.path.writer.path_options import PathRecord, check_paths, load_record
from ..tiers.policies import known_names, order_class

GivenPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A folder, or a list or tuple with one folder for each device."""

OPTIONS_OF_PATH = {
    "capacity": "capacity_bytes",
    "min_free": "min_free_bytes",
    "policy": "policy",
    "write_budget": "write_budget_bytes",
    "segment_size": "segment_bytes",
    "durability": "durability",
}
"""Options of a path: names in the configuration, and in `PathOptions`."""
SIZES = {"capacity", "min_free", "segment_size"}
"""Options of a path that are checked: they must fit the disk, or each other."""


@dataclass(frozen=True, slots=True)
class PathParts:
    """A path and the options with which it is opened."""

    tier: NvmeTierOptions
    options: PathOptions
    """Options in force if this process becomes the writer."""
    record: PathRecord | None
    """Facts that are recorded with the path; None if nobody has opened it."""

    @property
    def roots(self) -> tuple[Path, ...]:
        """All folders of the tier in order."""
        return self.tier.path

    def min_share_bytes(self, name: str) -> int:
        """Return the recorded share of a namespace, by the name of its directory."""
        return 0 if self.record is None else self.record.min_shares.get(name, 0)


def path_parts(fs: FileSystem, path: GivenPath, given: Mapping[str, object], key: str) -> PathParts:
    """Return a path with its options: those `given`, else those recorded, else the defaults.

    `given` has names and values as in the configuration of an NVMe tier; `key` names the caller in
    messages. If the path has several folders and is open for the first time, all are needed; later
    the first is enough. Raises `ConfigError`, `CorruptionError` or `TierIOError`.
    """
    asked = {"path": _absolute(path, key), **given}
    tier = read_options(NvmeTierOptions, At(key, policies=known_names()), asked, also=())
    machine = Machine()
    for root in tier.path:
        refuse_namespace(At(key).below("path"), root, machine)
    record = load_record(fs, tier.path[0])
    if record is not None:
        if _are_first(fs, tier.path, record.paths):
            asked["path"] = record.paths
        # A recorded policy may be unknown here: it is the writer's.
        asked = _as_configured(record.options) | asked
        tier = read_options(NvmeTierOptions, At(key), asked, also=())
        check_paths(record.paths, list(map(str, tier.path)))
    if "policy" in given and (record is None or record.options.policy != tier.policy):
        order_class(tier.policy)
    if record is None or not given.keys().isdisjoint(SIZES):
        check_nvme(CascadeConfig("", (tier,)), machine)
    return PathParts(tier, path_options(tier, machine), record)


def path_options(tier: NvmeTierOptions, machine: Machine) -> PathOptions:
    """Return what a tier's options ask of its path. Raises `ConfigError` or `TierIOError`."""
    budget, segment = tier.write_budget, tier.segment_size
    with os_errors(f"looking at the disks of {tier.path[0]}"):
        disks = disks_of(tier, machine)
    return PathOptions(
        nvme_capacity(tier, machine),
        min(tier.min_free.of(disk.total) for disk in disks),  # it is kept on each of them
        tier.policy,
        None if budget is None else budget.of(nvme_disk_bytes(tier, machine)),
        None if segment is None else segment.of(0),
        str(tier.durability),
    )


def make_folders(roots: Sequence[Path], key: str = "") -> None:
    """Create the folders of a path where they are missing. Raises `TierIOError`.

    `key` names the option that lists them.
    """
    for root in roots:
        with os_errors(f"creating {root} ({key})" if key else f"creating {root}"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)


def described(
    fs: FileSystem, parts: PathParts, name: str, block_bytes: int | None
) -> NamespaceSpec | None:
    """Return the namespace in a directory; None if there is none.

    Raises `ConfigError` if its blocks have another size than `block_bytes`, `FormatError` if it is
    of another version, or `CorruptionError`.
    """
    folder = parts.roots[0] / name
    with os_errors(f"looking for {folder}"):
        if not fs.exists(folder / DESCRIPTION):
            return None
    found = read_description(fs, folder)
    size = int(found["block_bytes"])
    if block_bytes is not None and block_bytes != size:
        raise ConfigError(
            f"block_bytes: blocks of {name} have {size} bytes, not {block_bytes}; leave it out, or "
            "name another namespace"
        )
    return NamespaceSpec(
        sendable(str(found.get("label", ""))),
        json.dumps(found["fields"]).encode(),
        json.dumps(found.get("about", {})).encode(),
        size,
        parts.min_share_bytes(name),
    )


def existing_names(fs: FileSystem, root: Path) -> list[str]:
    """Return the names of all namespaces in a path."""
    with os_errors(f"listing {root}"):
        if not fs.exists(root):
            return []
        names = [name for name in fs.list_dir(root) if is_namespace_name(name)]
        return [name for name in names if fs.exists(root / name / DESCRIPTION)]


def _are_first(fs: FileSystem, given: Sequence[Path], recorded: Sequence[str]) -> bool:
    """Return True if the first recorded folder, or all of them, are given, also through links."""
    if len(given) not in (1, len(recorded)):
        return False
    pairs = zip(given, recorded, strict=False)
    return all(str(path) == name or fs.is_same(path, Path(name)) for path, name in pairs)


def _absolute(path: object, key: str) -> object:
    """Return the folders as absolute paths.

    What is none stays as it is, also an empty text and `~name` without a user of that name.

    Raises `ConfigError` for a relative path in a working directory that was deleted.
    """
    if isinstance(path, list | tuple):
        return [_absolute(one, key) for one in path]
    if not isinstance(path, str | os.PathLike):
        return path
    expanded = os.path.expanduser(path)
    if not path or os.fsdecode(expanded).startswith("~"):
        return path
    try:
        return os.path.abspath(expanded)
    except FileNotFoundError:
        problem = "is relative, and the working directory was deleted; give an absolute path"
        raise At(key).below("path").wrong(str(path), problem) from None


def _as_configured(options: PathOptions) -> dict[str, object]:
    """Return options as values of a configuration."""
    values = {word: getattr(options, name) for word, name in OPTIONS_OF_PATH.items()}
    return {word: str(Bytes(v)) if isinstance(v, int) else v for word, v in values.items()}
