"""Options of a path, and the description of a namespace, as the Python API and tools need them.

Options of a path are recorded with it. So opening an existing path changes only the options that
are given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..config.machine import (
    Machine,
    check_nvme,
    nearest_existing,
    nvme_capacity,
    nvme_disk_bytes,
)
from ..config.options import At, read_options
from ..config.schema import CascadeConfig, NvmeTierOptions
from ..config.sizes import Bytes
from ..errors import ConfigError, os_errors
from ..tiers.nvme.disk.filesystem import FileSystem
from ..tiers.nvme.namespace import DESCRIPTION, is_namespace_name
from ..tiers.nvme.path.path_messages import NamespaceSpec, PathOptions
from ..tiers.nvme.path.writer.namespace_home import read_description
from ..tiers.nvme.path.writer.path_options import PathRecord, load_record
from ..tiers.policies import known_names

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
"""Those of them that are checked: they must fit the disk, or each other."""


@dataclass(frozen=True, slots=True)
class PathParts:
    """A path and the options with which it is opened."""

    roots: tuple[Path, ...]
    """All folders of the tier in order."""
    tier: NvmeTierOptions
    options: PathOptions
    """Options in force if this process becomes the writer."""
    record: PathRecord | None
    """Facts that are recorded with the path; None if nobody has opened it."""

    def min_share_bytes(self, name: str) -> int:
        """Return the recorded share of a namespace, by the name of its directory."""
        return 0 if self.record is None else self.record.min_shares.get(name, 0)


def path_parts(
    fs: FileSystem,
    path: GivenPath,
    given: Mapping[str, object],
    key: str,
) -> PathParts:
    """Return a path with its options: those `given`, else those recorded, else the defaults.

    `given` has names and values as in the configuration of an NVMe tier; `key` names the caller in
    messages. If the path has several folders and is open for the first time, all are needed; later
    the first is enough. Raises `ConfigError`, `CorruptionError` or `TierIOError`.
    """
    machine = Machine()
    at = At(key, policies=known_names())
    tier = read_options(NvmeTierOptions, at, {"path": _absolute(path), **given}, also=())
    roots = tier.path
    record = load_record(fs, roots[0])
    if record is not None:
        if tuple(map(str, roots)) == record.paths[:1]:
            roots = tuple(map(Path, record.paths))
        tier = _with_recorded_sizes(replace(tier, path=roots), given, record.options)
    if record is None or not given.keys().isdisjoint(SIZES):
        check_nvme(CascadeConfig("", (tier,)), machine)
    options = path_options(tier, machine)
    if record is not None:
        options = _with_recorded(options, given, record.options)
    return PathParts(roots, tier, options, record)


def path_options(tier: NvmeTierOptions, machine: Machine) -> PathOptions:
    """Return what a tier's options ask of its path. Raises `ConfigError`."""
    budget, segment = tier.write_budget, tier.segment_size
    disks = [machine.disk(nearest_existing(path, machine)) for path in tier.path]
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
        raise ConfigError(f"block_bytes: blocks of {name} have {size} bytes, not {block_bytes}")
    return NamespaceSpec(
        str(found.get("label", "")),
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


def _absolute(path: object) -> object:
    """Return the folders as absolute paths; what is none stays as it is, also an empty text."""
    if isinstance(path, str | os.PathLike):
        return path and os.path.abspath(os.path.expanduser(path))
    return [_absolute(one) for one in path] if isinstance(path, list | tuple) else path


def _with_recorded_sizes(
    tier: NvmeTierOptions, given: Collection[str], recorded: PathOptions
) -> NvmeTierOptions:
    """Return the tier with the recorded capacity and reserve, unless they were given."""
    if "capacity" not in given:
        tier = replace(tier, capacity=Bytes(recorded.capacity_bytes))
    if "min_free" not in given:
        tier = replace(tier, min_free=Bytes(recorded.min_free_bytes))
    return tier


def _with_recorded(
    options: PathOptions, given: Collection[str], recorded: PathOptions
) -> PathOptions:
    """Return the recorded options, with those that were given."""
    chosen = {
        name: getattr(options, name) for word, name in OPTIONS_OF_PATH.items() if word in given
    }
    return msgspec.structs.replace(recorded, **chosen)
