"""One namespace as its writer changes it: commits, evictions, resets.

Messages of all nodes are gathered, and `commit_batch` puts them into one commit of the block table.
The presence table follows, then the replies. A slot is free for the next grant only after that.

Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ......errors import KVCascadeError
from ......logs import get_logger
from .....endurance import DayTotals
from ....segments.format import MAX_KEY_BYTES
from ...block_table import MAX_COMMIT_BLOCKS, Applied, BlockTable, Changes
from ...path_messages import MAX_KEYS_PER_MESSAGE, Committed, Grant, Touch
from ...presence_file import OpenPresence
from ..messages.reset_messages import WaitingResets
from ..path_capacity import PATH_REST_S
from .commit_batch import CommitBatch
from .namespace_home import NamespaceHome
from .prompt_log import PromptLog
from .recency import Recency
from .slot_space import SlotSpace
from .waiting_grants import Reply, WaitingGrants

MAX_READ_REPORT_BYTES = 1 << 50
"""Most bytes that were read between two commits; more would overflow the totals."""

_log = get_logger(__name__)


@dataclass(slots=True)
class BatchResult:
    """Result of one commit, for the nodes."""

    replies: list[Reply] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    is_refused: bool = False
    """True if the index did not take the commit."""


class NamespaceWriter:
    """An open namespace. `open_namespace_writer` makes one."""

    def __init__(
        self,
        home: NamespaceHome,
        table: BlockTable,
        presence: OpenPresence,
        space: SlotSpace,
        recency: Recency,
        prompts: PromptLog,
    ) -> None:
        self.home = home
        self.table = table
        self.presence = presence.table
        self.space = space
        self.recency = recency
        self.prompts = prompts
        self.clients: set[int] = set()
        self.unsynced_clients: set[int] = set()
        """Clients that sync no segment before a commit, although every commit is to be durable."""
        self.min_share_bytes = 0
        self.evicted_blocks = 0
        self.grants = WaitingGrants(self.presence, space)
        self.batch = CommitBatch(space)
        """Reports that the next commit takes in."""
        self.resets = WaitingResets()
        self._presence = presence
        self._read_bytes = 0

    @property
    def epoch(self) -> int:
        """Number of resets."""
        return self.presence.epoch

    @property
    def is_resetting(self) -> bool:
        """True from the begin of a reset until it is durable."""
        return self.presence.epoch != self.table.epoch

    def keys_after(self, key: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` keys of committed blocks that follow `key`, in order; at most
        `MAX_KEYS_PER_MESSAGE`."""
        if self.is_resetting or limit <= 0:
            return []
        try:
            found = self.table.keys_after(key, min(limit, MAX_KEYS_PER_MESSAGE))
        except KVCascadeError as error:
            _log.warning("%s: not every block is named in events: %s", self.home.name, error)
            return []
        return [key for key, _ in found]

    # -- gathering -----------------------------------------------------------------------------

    def add_grant(self, client: int, message: Grant, until_s: float) -> bool:
        """Let a grant wait for slots, at most until `until_s`. Return False if too many wait."""
        if not self.grants.add(client, message, until_s):
            return False
        self.recency.expect(message.keys)
        return True

    def add_read(self, read_bytes: int) -> None:
        """Count bytes that were read; they are written down with the next commit.

        A report of more than `MAX_READ_REPORT_BYTES` is no report of a node, and is ignored.
        """
        if 0 <= read_bytes <= MAX_READ_REPORT_BYTES:
            self._read_bytes = min(self._read_bytes + read_bytes, MAX_READ_REPORT_BYTES)

    def write_totals(self) -> None:
        """Write down bytes since the last commit: a tier that is only read has no commit."""
        if self._read_bytes or self.space.written_in_vain:
            self._apply([], [], [])

    def totals(self) -> tuple[int, int]:
        """Return the bytes (written, read) over the life of the namespace, with the reads that are
        not written down yet."""
        written, read = self.table.totals
        return written, read + self._read_bytes

    def day_totals(self) -> DayTotals:
        """Return the totals of the last day, with the reads that are not written down yet."""
        totals = self.table.day_totals()
        return replace(totals, read=totals.read + self._read_bytes)

    def touch(self, message: Touch) -> None:
        """Note uses of blocks."""
        found = self.presence.find_many(message.keys).tolist()
        if message.is_chain and self.recency.wants_chains:
            here = list(takewhile(self._holds, found))
            self.recency.chain(here, len(message.keys))
            return
        slots = list(dict.fromkeys(filter(self._holds, found)))
        if slots:
            self.recency.settle(slots) if message.is_settle else self.recency.touch(slots)

    # -- one commit ----------------------------------------------------------------------------

    def commit_batch(self, evictions: int = 0) -> BatchResult:
        """Commit the batch, with the removal of so many of the coldest blocks."""
        result, batch = BatchResult(), self.batch
        self.batch = CommitBatch(self.space)
        batch.check(-1 if self.is_resetting else self.epoch)
        self._sync_segments(batch)
        removals = batch.damaged(self.table, self.presence)
        victims = self.recency.victims(min(evictions, MAX_COMMIT_BLOCKS), self.space.may_evict)
        if batch.entries or removals or victims:
            applied = self._apply(batch.entries, removals, victims)
            if applied.outcome is Committed.OK:
                # Removed blocks first: one with a damaged entry may be in the slot of a new block.
                result.removed = self._forget(applied.removed, set(victims))
                result.stored = self._record(batch, applied)
            else:
                batch.fail(applied.outcome)
                result.is_refused = True
        result.replies = batch.replies()
        return result

    def held_among(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of the keys that are committed; the block table has the last word."""
        found = self.presence.find_many(keys).tolist()
        maybe = [key for key, slot in zip(keys, found, strict=True) if slot >= 0]
        if not maybe:
            return frozenset()
        entries = self.table.get_many(maybe)
        return frozenset(k for k, entry in zip(maybe, entries, strict=True) if entry is not None)

    def remove_slots(self, slots: Sequence[int]) -> list[bytes] | None:
        """Remove the blocks in these slots in one commit. Return their keys; None if it failed."""
        applied = self._apply([], [], slots)
        if applied.outcome is not Committed.OK:
            return None
        return self._forget(applied.removed, set(slots))

    def reset(self, now_s: float, *, is_asked: bool = False) -> bool:
        """Begin a new epoch without any block. Return False if that is not durable yet.

        Readers see the new epoch at once in either case, so that no older block is served. While an
        epoch waits to be durable, another one begins only if `is_asked`: blocks that engines stored
        since then are of old weights, too. After the table refused an epoch, calls within
        `PATH_REST_S` do not ask it.
        """
        was_resetting = self.is_resetting
        if is_asked or not was_resetting:
            self.presence.clear(self.epoch + 1)
            self.recency.clear()
            self.space.clear()
        if was_resetting and now_s < self.resets.retry_at_s:
            return False
        applied = self.table.reset(max(self.presence.epoch, self.table.epoch + 1))
        if applied.journal is None:
            self.resets.retry_at_s = now_s + PATH_REST_S
            return False
        self.presence.apply(applied.journal)
        return True

    # -- clients -------------------------------------------------------------------------------

    def forget_requests(self, client: int) -> None:
        """Forget what a client asked for and has no answer to."""
        self.grants.leave(client)
        self.resets.leave(client)

    def leave(self, client: int) -> None:
        """Forget a client. The batch with its commits must be committed before."""
        self.clients.discard(client)
        self.unsynced_clients.discard(client)
        self.forget_requests(client)
        self.space.end_client(client)

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close cleanly: everything is durable. Raises a `KVCascadeError`; it is closed anyway."""
        self.write_totals()
        try:
            self.table.close()
            self._presence.close_clean()
            self.recency.close(is_clean=True)
        finally:
            self.home.close()

    def abandon(self) -> None:
        """Close as a kill would; nothing is synced and nothing marked as clean."""
        self.table.abandon()
        self._presence.file.close()
        self.recency.close(is_clean=False)
        self.home.close()

    def make_durable(self, reopen: Callable[[NamespaceHome], BlockTable]) -> None:
        """Sync the block table, and open it anew, so that every commit is durable.

        The segments must have been synced. Raises a `KVCascadeError`.
        """
        self.table.sync()
        self.table.abandon()  # a clean mark could fail for want of room
        self.table = reopen(self.home)
        self.unsynced_clients |= self.clients

    # -- inside --------------------------------------------------------------------------------

    def _holds(self, slot: int) -> bool:
        return 0 <= slot < len(self.space.is_used) and bool(self.space.is_used[slot])

    def _sync_segments(self, batch: CommitBatch) -> None:
        """Sync what nodes wrote that joined before commits were to be durable.

        Their blocks may be offered by other nodes, to which "held already" means durable.
        """
        if not self.unsynced_clients:
            return
        try:
            for number in batch.segments_of(self.unsynced_clients):
                self.home.segments.sync(number)
        except OSError as error:
            _log.warning("%s: a segment could not be synced (%s)", self.home.name, error)
            batch.fail(Committed.IO_ERROR)

    def _apply(
        self,
        puts: Sequence[tuple[bytes, int, int]],
        removals: Sequence[bytes],
        cleared: Sequence[int],
    ) -> Applied:
        """Commit to the block table, then to the presence table."""
        written = len(puts) + self.space.written_in_vain
        changes = Changes(
            self.table.epoch,
            puts,
            removals,
            cleared,
            written_bytes=written * self.home.block_bytes,
            read_bytes=self._read_bytes,
        )
        applied = self.table.apply(changes)
        if applied.outcome is not Committed.OK:
            why = applied.outcome.name
            _log.warning("%s: the index could not be written (%s)", self.home.name, why)
        else:
            self._read_bytes = self.space.written_in_vain = 0
            if applied.journal is not None:
                self.presence.apply(applied.journal)
        return applied

    def _record(self, batch: CommitBatch, applied: Applied) -> list[bytes]:
        """Take in a commit of the batch: slots in use, recency. Return the keys it stored."""
        stored, held = batch.succeed(applied.already)
        for key in held:
            self._show(key)
        for keys, slots in stored:
            self.recency.insert(keys, slots)
        return [key for keys, _ in stored for key in keys]

    def _show(self, key: bytes) -> None:
        """Repair a presence table that lacks a block: no engine would find or replace it."""
        (entry,) = self.table.get_many([key])
        if entry is not None and self._holds(entry.slot) and self.presence.find(key) < 0:
            self.presence.insert(key, entry.slot, entry.checksum)

    def _forget(self, removed: Sequence[tuple[bytes, int]], victims: set[int]) -> list[bytes]:
        """Free the slots of removed blocks. Return the keys of those that were in use."""
        gone = [(key, slot) for key, slot in removed if self._holds(slot)]
        left = [(key, slot) for key, slot in gone if slot in victims]
        other = [slot for _, slot in gone if slot not in victims]
        if left:
            self.recency.evicted([key for key, _ in left], [slot for _, slot in left])
            self.evicted_blocks += len(left)
        self.recency.remove(other)
        self.space.unuse([slot for _, slot in gone])
        nameless = victims - {slot for _, slot in gone}
        if nameless:
            self.recency.set_aside(sorted(nameless))
        return [key for key, _ in gone]


def is_within_limits(keys: Sequence[bytes], most: int = MAX_KEYS_PER_MESSAGE) -> bool:
    """Return True if a message of at most `most` keys may have these keys."""
    are_few = len(keys) <= most
    return are_few and all(0 < len(key) <= MAX_KEY_BYTES for key in keys)
