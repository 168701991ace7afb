"""Namespaces of a path: opened for nodes, closed at the end, removed when their room is needed.

Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from .....errors import ConfigError, KVCascadeError, TierIOError, os_errors
from .....logs import get_logger
from ...disk.filesystem import FileSystem
from ..path_messages import Hello, PathOptions
from .idle_namespaces import IdleNamespaces
from .namespace_home import NamespaceHome, make_home, open_home, remove_home
from .namespace_start import StartMeans, open_namespace_writer
from .namespace_writer import NamespaceWriter
from .path_budget import WriteBudget
from .path_capacity import PathCapacity
from .path_options import (
    POWER,
    PathRecord,
    check_options,
    check_paths,
    load_record,
    save_record,
)
from .path_space import PathSpace

_log = get_logger(__name__)


class PathNamespaces:
    """All namespaces of a path, and what is recorded with it."""

    def __init__(
        self,
        means: StartMeans,
        roots: Sequence[Path],
        options: PathOptions | None,
        clock: Callable[[], float],
        executor: Executor,
    ) -> None:
        """Put the options in force and record them; see `PathWriter`."""
        self.roots = tuple(roots)
        self._means = means
        self.record = self._record_of(options)
        in_force = self.record.options
        idle = IdleNamespaces(means, roots)
        idle.find(in_force.capacity_bytes, with_totals=in_force.write_budget_bytes is not None)
        capacity = PathCapacity(means.fs, roots, in_force, clock)
        self._looked_at: set[str] = set()
        """Namespaces that are open for a tool only; they stay, even without segments."""
        self.space = PathSpace(capacity, idle, self._open_idle, executor, clock)
        self.budget = WriteBudget(in_force.write_budget_bytes, idle.written_in_day)

    @property
    def options(self) -> PathOptions:
        """Options in force."""
        return self.record.options

    @property
    def open(self) -> dict[str, NamespaceWriter]:
        """Open namespaces by the names of their directories."""
        return self.space.namespaces

    @property
    def fs(self) -> FileSystem:
        """File system of the path."""
        return self._means.fs

    def open_for(self, hello: Hello) -> NamespaceWriter:
        """Return the namespace that a node asks for. Raises a `KVCascadeError`."""
        options, spec = self.options, hello.namespace
        home = make_home(self.fs, self.roots, spec, options.capacity_bytes, options.segment_bytes)
        namespace = self.open.get(home.name)
        if namespace is not None:
            home.close()
        else:
            namespace = self._open_home(home)
        self._looked_at.discard(home.name)
        self.note_use(namespace)
        if not namespace.clients:
            self._begin_alone(namespace, hello.epoch)
        share, shares = spec.min_share_bytes, self.record.min_shares
        if namespace.clients:  # of several engines the largest share holds
            share = max(share, namespace.min_share_bytes)
        if shares.get(home.name, 0) != share:
            shares[home.name] = share
            self._save()
        namespace.min_share_bytes = share
        return namespace

    def look_at(self, name: str) -> NamespaceWriter:
        """Return a namespace, opened if it is not open. Raises a `KVCascadeError`."""
        namespace = self.open.get(name)
        if namespace is not None:
            return namespace
        home = None
        if any(one.name == name for one in self.space.idle.all):
            home = open_home(self.fs, self.roots, name, self.options.capacity_bytes)
        if home is None:
            raise ConfigError(f"there is no namespace {name}; `list` names them all")
        self._looked_at.add(name)
        return self._open_home(home)

    def strengthen(self) -> None:
        """Sync every commit from now on, because a node asks for that."""
        self.record.options = msgspec.structs.replace(self.options, durability=POWER)
        self.space.capacity.options = self.options
        for namespace in self.open.values():
            namespace.make_durable(partial(self._means.table_of, is_durable=True))
        self._save()

    def change(self, options: PathOptions) -> list[str]:
        """Record other options, and put them in force.

        Return the names of those that open namespaces follow only when they are opened again: a
        larger capacity, since they have no more slots, and a weaker durability. Raises a
        `KVCascadeError`.
        """
        check_options(options)
        former = self.options
        if options.durability == POWER != former.durability:
            self.strengthen()
        self.record.options = self.space.capacity.options = options
        self._save()
        self.budget.limit_bytes = options.write_budget_bytes
        for namespace in self.open.values() if options.policy != former.policy else ():
            namespace.recency.close(is_clean=True)
            namespace.recency = self._means.recency_of(
                namespace.home, options.policy, namespace.space.is_used
            )
            namespace.recency.order_by_last_use()
        is_larger = options.capacity_bytes > former.capacity_bytes
        is_weaker = former.durability == POWER != options.durability
        return ["capacity_bytes"] * is_larger + ["durability"] * is_weaker

    def note_use(self, namespace: NamespaceWriter) -> None:
        """Set the time of the last use to now."""
        with suppress(KVCascadeError):  # it is a hint
            namespace.home.note_use(self.fs)

    def remove_empty(self) -> None:
        """Remove namespaces that lost their last segment while no node has them open."""
        for name, namespace in list(self.open.items()):
            is_needed = namespace.clients or name in self._looked_at
            if not is_needed and not self.space.segments_of(name):
                _log.warning("%s is removed: its room was needed", name)
                self.remove(namespace)

    def remove(self, namespace: NamespaceWriter) -> bool:
        """Delete an open namespace that no node uses, with all its blocks.

        Return False if its files could not be deleted: the next writer finds them again.
        """
        name = namespace.home.name
        self.budget.removed_written += namespace.table.day_totals().written
        namespace.abandon()
        self.space.forget(name)
        self.record.min_shares.pop(name, None)
        self.record.epochs.pop(name, None)
        self._looked_at.discard(name)
        try:
            self._save()
            return remove_home(self.fs, namespace.home)
        except KVCascadeError as error:
            _log.warning("%s could not be removed: %s", name, error)
            return False

    def remove_idle(self, name: str) -> bool:
        """Delete a namespace that is not open. Return False if another process has it open.

        Raises a `KVCascadeError`.
        """
        self.space.idle.take(name)
        home = open_home(self.fs, self.roots, name, self.options.capacity_bytes)
        return home is None or remove_home(self.fs, home)

    def close(self, *, is_clean: bool) -> None:
        """Close all namespaces; without `is_clean` as a kill would."""
        for name, namespace in list(self.open.items()):
            if not is_clean:
                namespace.abandon()
            else:
                self._close(namespace)
            self.space.forget(name)
        self.space.idle.close()

    # -- inside --------------------------------------------------------------------------------

    def _record_of(self, options: PathOptions | None) -> PathRecord:
        """Return paths and options in force, and record them if options are given."""
        found = load_record(self.fs, self.roots[0])
        if options is None:  # a tool may reach the paths by other names
            if found is None or len(found.paths) != len(self.roots):
                raise ConfigError(
                    f"{self.roots[0]} has no record of {len(self.roots)} paths; give all paths of "
                    "a tier that an engine has used"
                )
            return found
        check_options(options)
        paths = tuple(map(str, self.roots))
        if found is not None:
            check_paths(found.paths, paths)
        record = PathRecord(paths, options)
        if found is not None:
            record.min_shares, record.epochs = found.min_shares, found.epochs
        if found is None or found.options != options:
            save_record(self.fs, self.roots[0], record)
        return record

    def _begin_alone(self, namespace: NamespaceWriter, known_epoch: int | None) -> None:
        """Record the epoch in which an engine begins that finds no other one.

        Blocks that were stored after a reset may be of weights that were updated in place. An
        engine that starts has the weights of the disk, so it may not find them. Raises a
        `KVCascadeError`.
        """
        name, epochs = namespace.home.name, self.record.epochs
        if namespace.epoch in (epochs.get(name, 0), known_epoch):
            return
        if not namespace.reset():
            raise TierIOError(
                None,
                f"the blocks of {name} from after a reset could not be removed; look at the disk, "
                "or remove the directory",
            )
        epochs[name] = namespace.epoch
        self._save()

    def _open_home(self, home: NamespaceHome) -> NamespaceWriter:
        is_durable = self.options.durability == POWER
        namespace = open_namespace_writer(
            self._means, home, self.options.policy, is_durable=is_durable
        )
        namespace.min_share_bytes = self.record.min_shares.get(home.name, 0)
        self.space.add(namespace)
        return namespace

    def _open_idle(self, name: str) -> bool:
        """Open a namespace without a node, because its room is needed."""
        try:
            home = open_home(self.fs, self.roots, name, self.options.capacity_bytes)
            if home is not None:
                self._open_home(home)
                return True
        except KVCascadeError as error:
            _log.warning("the room of %s cannot be taken: %s", name, error)
        self.space.idle.mark_unusable(name)
        return False

    def _close(self, namespace: NamespaceWriter) -> None:
        if namespace.clients:
            self.note_use(namespace)
        try:
            with os_errors(f"closing {namespace.home.name}"):
                namespace.close()
        except KVCascadeError as error:
            _log.warning("%s was not closed cleanly: %s", namespace.home.name, error)

    def _save(self) -> None:
        save_record(self.fs, self.roots[0], self.record)
