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

from .....config.sizes import MAX_BYTES
from .....errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    InUseError,
    KVCascadeError,
    NoSpaceError,
    TierIOError,
    os_errors,
)
from .....logs import get_logger
from ....endurance import day_totals, merged
from ...disk.filesystem import FileSystem
from ..block_table import block_table_bytes
from ..path_messages import Hello, NamespaceSpec, PathOptions
from ..presence_file import recorded_slots
from ..presence_table import presence_bytes
from .idle_namespaces import IdleNamespaces
from .namespace.namespace_home import (
    BLOCKS,
    NamespaceHome,
    check_home,
    check_same,
    key_of,
    make_home,
    open_home,
    remove_home,
)
from .namespace.namespace_openings import BeingOpenedError, NamespaceOpenings, NamespaceToOpen
from .namespace.namespace_start import StartMeans
from .namespace.namespace_writer import NamespaceWriter
from .path_capacity import PathCapacity
from .path_options import (
    POWER,
    check_mounted,
    differences,
    record_in_force,
    save_record,
    sync_blocks,
    was_reset,
)
from .path_plan import fixed_bytes, plan_namespace
from .path_space import PathSpace
from .unused_namespaces import UnusedNamespaces

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
        self._clock = clock
        self.fs: FileSystem = means.fs
        self.record = record_in_force(means.fs, roots, options)
        in_force = self.record.options
        idle = IdleNamespaces(means, roots, clock)
        idle.find(in_force)
        capacity = PathCapacity(means.fs, roots, in_force, clock)
        self._unknown_epochs: dict[str, int] = {}
        """Epochs that `begin` made and could not record, by namespace: no engine is in them."""
        self.openings = NamespaceOpenings(means, executor, self._home_of, self._room_for, clock)
        open_idle = partial(self._begin_opening, is_for_room=True)
        self.space = PathSpace(capacity, idle, self.openings, open_idle, executor, clock)
        self.unused = UnusedNamespaces(self.space, self._close, executor)

    @property
    def options(self) -> PathOptions:
        """Options in force."""
        return self.record.options

    def budget_left_bytes(self) -> int | None:
        """Return the bytes that may still be granted today; None without a budget.

        Totals of a day lie in the block tables and in the record of the path, so they survive every
        crash. What is granted and not committed yet counts as written, and so do blocks of commits
        that came to nothing.
        """
        limit_bytes = self.options.write_budget_bytes
        if limit_bytes is None:
            return None
        removed = day_totals(self.record.removed_day, self._means.wall_clock())
        spent = self.space.idle.written_in_day() + removed.written
        for namespace in self.space.namespaces.values():
            spent += namespace.table.day_totals().written
            space = namespace.space
            spent += (space.granted + space.written_in_vain) * namespace.home.block_bytes
        return max(0, limit_bytes - spent)

    def open_for(self, hello: Hello) -> NamespaceWriter:
        """Return the namespace that a node asks for.

        Raises a `KVCascadeError`, or `BeingOpenedError` while it is not open yet.
        """
        spec = hello.namespace
        if not 0 <= spec.min_share_bytes <= MAX_BYTES:  # no record could hold it
            raise ConfigError(
                f"min_share is {spec.min_share_bytes} bytes; it may be 0 to {MAX_BYTES}"
            )
        key = key_of(spec)
        name = key.name_among(self.space.own_names)
        namespace = self.space.namespaces.get(name)
        if namespace is None:
            self._begin_new(spec, name)
            raise BeingOpenedError(name)
        check_same(namespace.home, key, spec.block_bytes)
        namespace.home.is_kept = False
        namespace.home.note_use(self.fs)
        share, shares = spec.min_share_bytes, self.record.min_shares
        if namespace.clients:  # of several engines the largest share holds
            share = max(share, namespace.min_share_bytes)
        if shares.get(name, 0) != share:
            try:
                self._record(min_shares={**shares, name: share})
            except NoSpaceError as error:  # the next engine tries again
                _log.warning("the min_share of %s holds until the writer ends: %s", name, error)
        namespace.min_share_bytes = share
        return namespace

    def look_at(self, name: str) -> NamespaceWriter:
        """Return a namespace, opened if it is not open.

        Raises a `KVCascadeError`, or `BeingOpenedError` while it is not open yet.
        """
        namespace = self.space.namespaces.get(name)
        if namespace is not None:
            return namespace
        if name not in self.openings.waiting:
            if name not in self.space.idle.names:
                why = self.space.idle.unusable.get(name, "there is none of this name")
                raise ConfigError(f"{name} cannot be used: {why}")
            self._begin_opening(name)
        raise BeingOpenedError(name)

    def take_opened(self) -> dict[str, KVCascadeError | None]:
        """Take in the namespaces that have been opened since the last call.

        Return their names, with the error of those that could not be opened.
        """
        ended: dict[str, KVCascadeError | None] = {}
        while (one := self.openings.take()) is not None:
            opening, found = one
            if isinstance(found, NamespaceWriter):
                ended[opening.name] = self._adopt(opening, found)
                continue
            ended[opening.name] = found
            if opening.is_for_room:
                _log.warning("the room of %s cannot be taken: %s", opening.name, found)
                is_damaged = isinstance(found, CorruptionError | FormatError)
                self.space.give_up_idle(opening.name, is_final=is_damaged)
        return ended

    def begin(self, namespace: NamespaceWriter, known_epoch: int | None, *, is_alone: bool) -> bool:
        """Keep blocks of other weights from an engine that joins. Return True if that needed a
        reset.

        Blocks that were stored after a reset may be of weights that were updated in place. An
        engine that starts (it knows no epoch) has the weights of the disk, so it may not find them
        if it is alone. Its epoch is recorded. An engine that comes back from an older epoch may
        have updated weights: alone it begins empty, and the next start after it does, too. If
        that cannot be recorded, the next engine that tries begins in the same epoch. Raises a
        `KVCascadeError`.
        """
        name, epoch = namespace.home.name, namespace.epoch
        is_new = self._unknown_epochs.pop(name, None) == epoch and not namespace.space.used
        is_of_reset = was_reset(self.record, name, epoch)
        if known_epoch == epoch or (known_epoch is None and not (is_of_reset and is_alone)):
            return False
        had_blocks = is_alone and namespace.space.used > 0
        if is_alone and not is_new and not namespace.reset(self._clock()):
            raise TierIOError(
                None,
                f"the blocks of {name} from another epoch could not be removed; look at the disk, "
                "or remove the directory",
            )
        if had_blocks:
            _log.warning(
                "%s begins empty: its blocks were stored before or after a reset that this engine "
                "did not see, perhaps with other weights",
                name,
            )
        started = namespace.epoch if known_epoch is None else namespace.epoch - 1
        if known_epoch is None or not was_reset(self.record, name, namespace.epoch):
            if is_alone:
                self._unknown_epochs[name] = namespace.epoch
            self._record(epochs={**self.record.epochs, name: started})
            self._unknown_epochs.pop(name, None)
        return is_alone

    def notes_for(self, hello: Hello, namespace: NamespaceWriter) -> list[str]:
        """Return sentences for the log of a node."""
        notes = differences(hello.options, self.options)
        if notes:
            _log.warning("%s: %s", hello.name, notes[0])
        home = namespace.home
        name = home.name
        if home.news:
            notes.append(home.news)
            home.news = ""
        if hello.epoch not in (None, namespace.epoch):
            notes.append(
                f"other engines of {name} were reset, or started, while this node was away; all "
                "of them need the weights of this engine"
            )
        elif hello.epoch is None and was_reset(self.record, name, namespace.epoch):
            remedy = "an engine that starts alone removes those"
            if not hello.is_reader:
                remedy = "update and reset this engine, too, before it serves"
            notes.append(
                f"the engines of {name} were reset, so blocks may be of weights that were updated "
                f"in place; {remedy}"
            )
        return notes

    def strengthen(self) -> None:
        """Sync every commit from now on, because a node asks for that. Raises a `KVCascadeError`,
        and then the promise is not made."""
        sync_blocks(self.fs, self.roots)
        for namespace in self.space.namespaces.values():
            namespace.make_durable(partial(self._means.table_of, is_durable=True))
        self._record(options=msgspec.structs.replace(self.options, durability=POWER))

    def remove_empty(self) -> None:
        """Remove namespaces that lost their last segment while no node has them open."""
        for name, namespace in list(self.space.namespaces.items()):
            is_needed = namespace.clients or namespace.home.is_kept
            if not is_needed and not self.space.files.numbers(name):
                _log.warning("%s is removed: its room was needed", name)
                self.remove(namespace)

    def remove(self, namespace: NamespaceWriter) -> bool:
        """Delete an open namespace that no node uses, with all its blocks.

        Return False if its files could not be deleted: the next writer finds them again.
        """
        namespace.write_totals()
        name, day = namespace.home.name, namespace.table.day_record()
        namespace.abandon()
        self.space.forget(name)
        try:
            return remove_home(self.fs, self.roots, name)
        except KVCascadeError as error:
            _log.warning("%s could not be removed: %s", name, error)
            return False
        finally:  # afterwards: a full disk may have no room for the record before
            self._record_removal(name, day)

    def forget_gone(self) -> list[NamespaceWriter]:
        """Forget the namespaces that another program removed. Return those that were open."""
        gone = self.space.gone()
        for namespace in gone:
            home, day = namespace.home, namespace.table.day_record()
            _log.warning(
                "%s was removed or replaced by another program: it begins anew", home.folders[0]
            )
            namespace.abandon()
            self.space.forget(home.name)
            self.space.idle.add(home, day)  # a part of its directory may be there still
        for name, day in self.space.idle.take_gone(self.openings.waiting):
            self._record_removal(name, day)
        return gone

    def remove_idle(self, name: str) -> bool:
        """Delete a namespace that is not open. Return False if another process has it open.

        Raises a `KVCascadeError`.
        """
        if name in self.openings.waiting or self.unused.is_closing(name):
            raise InUseError(f"{name} is being opened or closed; try again later")
        home = open_home(self.fs, self.roots, name, self.options)  # an error changes nothing
        if home is not None:
            home.close()
        day = self.space.idle.take(name)
        try:
            return remove_home(self.fs, self.roots, name)
        finally:
            self._record_removal(name, day)

    def close(self, *, is_clean: bool) -> None:
        """Close all namespaces; without `is_clean` as a kill would."""
        self.openings.close()
        for name, namespace in list(self.space.namespaces.items()):
            if not is_clean:
                namespace.abandon()
            else:
                self._close(namespace)
            self.space.forget(name)
        self.space.idle.close()

    # -- inside --------------------------------------------------------------------------------

    def _begin_new(self, spec: NamespaceSpec, name: str) -> None:
        """Begin to open the namespace of a node, which may not exist.

        Raises a `KVCascadeError` if its directory, or the capacity, lets nobody open it.
        """
        options, paths = self.options, len(self.roots)
        sizes: Sequence[int] = ()
        for gone, day in self.space.idle.take_gone(self.openings.waiting):
            self._record_removal(gone, day)
        is_known = name in self.space.idle.names
        if not (is_known and self.fs.exists(self.roots[0] / name / BLOCKS)):
            # A refusal comes before others leave for the room of new tables.
            check_home(self.fs, self.roots, name, spec, options)
            plan = plan_namespace(options, spec.block_bytes, paths)
            sizes = [fixed_bytes(plan.slots, path, options.policy) for path in range(paths)]
        # One that lost its tables waits for nothing: its own segments give the room afterwards.
        self._begin_opening(name, spec, sizes, () if is_known else sizes)

    def _room_for(self, opening: NamespaceToOpen) -> tuple[list[int], int | None]:
        """Return the bytes of our files in each path, with the tables of a new namespace.

        Return also a path in which these tables lack room that segments have, in the capacity or on
        the disk.
        """
        space, sizes = self.space, opening.bytes_by_path
        own = [space.own_bytes(path, with_new=False) + size for path, size in enumerate(sizes)]
        for path, size in enumerate(sizes):
            with suppress(OSError):  # the opening itself says what is wrong
                short = size + self.options.min_free_bytes - self.fs.free_bytes(self.roots[path])
                missing = max(short, -space.capacity.left_bytes(path, own[path]))
                if not 0 < missing <= space.freeable_bytes(path):
                    continue
                # The capacity counts more bytes than leave the disk: all that tables may take. The
                # directories are searched once, because what leaves them is no longer lacking.
                can_have = opening.can_have_room
                if short > 0 and path not in can_have:
                    can_have[path] = short <= _leaving_bytes(space, self.fs, self.roots[path], path)
                if short <= 0 or can_have[path]:
                    return own, path
        return own, None

    def _begin_opening(
        self,
        name: str,
        spec: NamespaceSpec | None = None,
        sizes: Sequence[int] = (),
        bytes_by_path: Sequence[int] = (),
        *,
        is_for_room: bool = False,
    ) -> None:
        """Begin to open a namespace; see `NamespaceToOpen`."""
        is_durable = self.options.durability == POWER
        self.space.capacity.own = self.space.own_names | {name}
        self.openings.begin(
            NamespaceToOpen(name, is_durable, spec, sizes, bytes_by_path, is_for_room)
        )

    def _home_of(self, opening: NamespaceToOpen) -> NamespaceHome:
        """Open the directories of a namespace, or make those of a node's. Runs on an I/O thread.

        If new tables have no room, namespaces of older versions leave. Raises a `KVCascadeError`,
        such as `NoSpaceError` if that is not enough.
        """
        fs, roots, capacity = self.fs, self.roots, self.space.capacity
        self.unused.await_closing(opening.name)
        check_mounted(fs, roots)
        for path, size in enumerate(opening.sizes):
            if fs.exists(roots[path]):
                own_bytes = opening.own_bytes[path] if opening.own_bytes else 0
                with capacity.claim(path, size, own_bytes):
                    pass
        if opening.spec is not None:
            home = make_home(fs, roots, opening.name, opening.spec, self.options)
            return _with_room(fs, home, capacity)
        found = open_home(fs, roots, opening.name, self.options)
        if found is None:
            raise ConfigError(f"there is no namespace {opening.name} any more")
        return _with_room(fs, found, capacity)

    def _adopt(self, opening: NamespaceToOpen, namespace: NamespaceWriter) -> KVCascadeError | None:
        """Count a namespace that was opened, and sync its commits if a node asked for that."""
        try:
            if self.options.durability == POWER and not opening.is_durable:
                namespace.make_durable(partial(self._means.table_of, is_durable=True))
            day = self.space.add(namespace)
        except KVCascadeError as error:
            namespace.abandon()
            return error
        written = namespace.table.day_totals().written
        if written < day_totals(day, self._means.wall_clock()).written:  # another table is there
            self._record_removal(opening.name, day)
        is_for_tool = opening.spec is None and not opening.is_for_room
        namespace.home.is_kept = is_for_tool and not self.space.files.numbers(opening.name)
        namespace.min_share_bytes = self.record.min_shares.get(opening.name, 0)
        return None

    def _close(self, namespace: NamespaceWriter) -> None:
        if namespace.clients:
            namespace.home.note_use(self.fs)
        try:
            with os_errors(f"closing {namespace.home.name}"):
                namespace.close()
        except KVCascadeError as error:
            _log.warning("%s was not closed cleanly: %s", namespace.home.name, error)

    def _record_removal(self, name: str, day: bytes) -> None:
        """Forget what is recorded of a namespace, but not what was written to it in a day."""
        record = self.record
        if day:  # it counts even if it cannot be recorded
            record.removed_day = merged(record.removed_day, day, self._means.wall_clock())
        shares = {key: value for key, value in record.min_shares.items() if key != name}
        epochs = {key: value for key, value in record.epochs.items() if key != name}
        try:
            self._record(min_shares=shares, epochs=epochs)
        except KVCascadeError as error:
            _log.warning("the removal of %s is not recorded with the path: %s", name, error)

    def _record(self, **changes: object) -> None:
        """Record other facts with the path; they hold only once they are on the disk."""
        record = msgspec.structs.replace(self.record, **changes)
        save_record(self.fs, self.roots[0], record)
        self.record = record


def _leaving_bytes(space: PathSpace, fs: FileSystem, root: Path, path: int) -> int:
    """Return the bytes in a path that leave the disk with all segments and idle namespaces."""
    total = 0
    for name in space.idle.names.union(space.namespaces):
        if name in space.namespaces and space.namespaces[name].clients:
            total += space.files.segment_bytes(name, path)
        elif fs.exists(root / name):
            total += fs.used_bytes(root / name)
    return total


def _with_room(fs: FileSystem, home: NamespaceHome, capacity: PathCapacity) -> NamespaceHome:
    """Find room for the tables of an existing namespace after the capacity was changed.

    Larger tables claim what they take more. A smaller presence table is made beside the former one,
    which other processes may have mapped. Without that room the namespace keeps its former number
    of slots. Runs on an I/O thread. Raises a `KVCascadeError`; `home` is closed then.
    """
    try:
        former = recorded_slots(fs, home.folders[0])
        if former % home.layout.slots or former in (0, home.slots):
            return home
        if former > home.slots:
            with os_errors(f"opening {home.folders[0]}"):
                _keep_tables_if_full(fs, home, former)
            return home
        with os_errors(f"opening {home.folders[0]}"):
            more = home.bytes_beside_segments(0) - fs.used_bytes(home.folders[0] / BLOCKS)
        try:
            with capacity.claim(0, more, 0):
                pass
        except NoSpaceError as error:
            segments = max(home.segments.found(), default=-1) + 1
            home.slots = max(former, segments * home.layout.slots)
            _log.warning("%s keeps its %d slots for now: %s", home.name, home.slots, error)
    except BaseException:
        home.close()
        raise
    return home


def _keep_tables_if_full(fs: FileSystem, home: NamespaceHome, former: int) -> None:
    """Keep the former, larger number of slots if the smaller presence table has no room.

    The opening cuts off the index what it needs no more. Raises an `OSError`.
    """
    unused = fs.used_bytes(home.folders[0] / BLOCKS) - block_table_bytes(home.slots)
    if fs.free_bytes(home.folders[0]) + max(0, unused) < presence_bytes(home.slots):
        home.slots = former
        _log.warning("%s keeps its %d slots for now: the disk is full", home.name, former)
