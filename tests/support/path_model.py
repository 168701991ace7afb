"""Random nodes on a path whose writer dies at any call, and an oracle that knows what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from support.executors import SteppingExecutor
from support.memory_block_table import MemoryBlockDisk, MemoryBlockTable
from support.memory_file_system import MemoryFileSystem
from support.path_rig import ROOT, PathRig, RigNode, int32, key_of, slots_in, uint64

from kvcascade.tiers.nvme.path.block_table import Applied, BlockTable, Changes
from kvcascade.tiers.nvme.path.path_messages import (
    ALREADY_SLOT,
    Bad,
    Commit,
    CommitDone,
    Committed,
    Epoch,
    FromWriter,
    Granted,
    Release,
    Removed,
    Reset,
    Touch,
)

LABELS = ("one", "two")
KEYS = 90


class Killed(BaseException):
    """The writer's process ends here."""


class Fate:
    """Ends the writer at a call that was drawn."""

    def __init__(self) -> None:
        self.calls_left: int | None = None

    def pass_by(self) -> None:
        """Count a call; raise `Killed` at the drawn one."""
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0:
                self.calls_left = None
                raise Killed


class DyingFileSystem(MemoryFileSystem):
    """Files in memory; every call may be the writer's last."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.fate = fate

    def enter(self, operation: str) -> None:
        self.fate.pass_by()
        super().enter(operation)


class DyingTable(MemoryBlockTable):
    """A block table that tells the oracle what it did, and may die before or after a commit."""

    def __init__(
        self,
        disk: MemoryBlockDisk,
        identity: bytes,
        fate: Fate,
        note: Callable[[Applied], None],
        **more: Any,
    ) -> None:
        self.fate = fate
        self.note = note
        super().__init__(disk, identity, **more)

    def apply(self, changes: Changes) -> Applied:
        self.fate.pass_by()
        applied = super().apply(changes)
        self.note(applied)
        self.fate.pass_by()
        return applied

    def reset(self, epoch: int) -> Applied:
        self.fate.pass_by()
        applied = super().reset(epoch)
        self.note(applied)
        self.fate.pass_by()
        return applied


class DyingExecutor(Executor):
    """Runs tasks at once; the writer may die in them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Oracle:
    """Blocks that one namespace must hold."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, tuple[int, int]] = {}
        """(Slot, checksum) of every block that was acknowledged and not removed since."""
        self.sent: dict[int, set[tuple[int, int]]] = {}
        """All (slot, checksum) that were sent for a key in this epoch."""
        self.owners: dict[int, int] = {}
        """Client by slot, for every grant that may still be written to."""
        self.removed: set[bytes] = set()
        """Keys removed in this step."""
        self.stored_blocks = self.removed_blocks = 0
        """Blocks that were acknowledged, and blocks that left, in the whole run."""

    def note(self, applied: Applied) -> None:
        """Take in what a commit removed."""
        if applied.outcome is not Committed.OK:
            return
        for key, _ in applied.removed:
            self.removed.add(key)
            self.removed_blocks += 1
            self.acknowledged.pop(number_of(key), None)
        if applied.journal is not None and applied.journal.is_reset:
            self.acknowledged.clear()
            self.sent.clear()


class PathModel:
    """One run: `turn` does something at random and checks everything."""

    def __init__(
        self, seed: int, durability: str, segments: int = 78, *, is_late: bool = False
    ) -> None:
        """With `is_late` files are made and namespaces opened while the writer serves others."""
        self.is_late = is_late
        self.late_commits = 0
        """Number of commits of grants from before a reset."""
        self.waited = 0
        """Number of turns in which a node waited for its namespace."""
        self.joining: list[tuple[RigNode, str]] = []
        self.rng = random.Random(seed)
        self.fate = Fate()
        self.oracles = {label: Oracle() for label in LABELS}
        self.nodes: list[tuple[RigNode, str]] = []
        self.held: dict[int, dict[int, tuple[int, int]]] = {}
        """By client: (key, epoch) of each slot that was granted to it and not given back."""
        self.checksums = 0
        self.durability = durability
        self.rig = PathRig(segments, executor=DyingExecutor(), durability=durability)
        self.rig.close()
        self.rig.fs = self.rig.files = DyingFileSystem(self.fate)
        self.rig.fs.notes = iter(self.rig.wall, None)
        self.rig.fs.make_dir(ROOT)
        self.rig.disks.clear()
        setattr(self.rig, "_open_table", self._open_table)  # noqa: B010 - a method
        self._begin()

    def turn(self) -> None:
        """Do one thing, or several at once before the writer has its turn."""
        if self.rng.random() < 0.06:
            self.fate.calls_left = self.rng.randint(1, 12)
        try:
            for _ in range(self.rng.choice((1, 1, 2, 5))):
                self._act()
            for _ in range(len(self.late) if self.rng.random() < 0.3 else 0):
                self.late.step(self.rng.randrange(8))
            self._step()
        except Killed:
            self._restart(self.rng.random() < 0.4)
            return
        draw = self.rng.random()
        if draw < 0.02:
            self._restart(draw < 0.01)
        elif draw < 0.03:
            self.fate.calls_left = None
            self.rig.close()
            self._begin()

    # -- what nodes do -------------------------------------------------------------------------

    def _act(self) -> None:
        acts = [self._ask] * 6 + [self._commit] * 6 + [self._touch] * 2
        acts += [self._release, self._join, self._leave, self._bad, self._lie, self._reset]
        if not self.nodes:
            acts = [self._join]
        self.rng.choice(acts)()

    def _ask(self) -> None:
        node, _ = self.rng.choice(self.nodes)
        node.ask(self.rng.sample(range(KEYS), self.rng.randint(1, 9)))

    def _commit(self) -> None:
        node, label = self.rng.choice(self.nodes)
        held = self.held[node.client]
        chosen = [slot for slot in held if self.rng.random() < 0.8]
        for epoch in {held[slot][1] for slot in chosen}:
            slots = [slot for slot in chosen if slot in held and held[slot][1] == epoch]
            keys = [held[slot][0] for slot in slots]
            sums = [self._checksum() for _ in slots]
            oracle, blocks = self.oracles[label], list(zip(keys, slots, sums, strict=True))
            if epoch != self.rig.writer.namespaces[self._folder(label)].epoch:
                self.late_commits, blocks = self.late_commits + 1, []
            for key, slot, checksum in blocks:
                oracle.sent.setdefault(key, set()).add((slot, checksum))
            for slot in slots:
                oracle.owners.pop(slot, None)
                del held[slot]
            named = [key_of(key) for key in keys]
            request = next(node.requests)
            self.expected[node.client, request] = blocks
            message = Commit(request, epoch, named, int32(slots), uint64(sums))
            self.rig.send(node.client, message)

    def _release(self) -> None:
        node, label = self.rng.choice(self.nodes)
        slots = [slot for slot in self.held[node.client] if self.rng.random() < 0.5]
        for slot in slots:
            del self.held[node.client][slot]
            self.oracles[label].owners.pop(slot, None)
        self.rig.send(node.client, Release(int32(slots)))

    def _touch(self) -> None:
        node, _ = self.rng.choice(self.nodes)
        keys = [key_of(key) for key in sorted(self.rng.sample(range(KEYS), 6))]
        kind = self.rng.randrange(3)
        self.rig.send(node.client, Touch(keys, kind == 1, kind == 2))

    def _join(self) -> None:
        if len(self.nodes) + len(self.joining) < 6:
            self._connect(self.rng.choice(LABELS))
        elif self.joining:
            node, _ = self.joining.pop()
            self.rig.writer.disconnect(node.client)

    def _leave(self) -> None:
        chosen = self.rng.choice(self.nodes)
        if sum(label == chosen[1] for _, label in self.nodes) < 2:
            return  # one node sees every message
        node, label = chosen
        self.nodes.remove(chosen)
        self.rig.writer.disconnect(node.client)
        for slot in self.held.pop(node.client):
            self.oracles[label].owners.pop(slot, None)

    def _bad(self) -> None:
        node, label = self.rng.choice(self.nodes)
        known = list(self.oracles[label].acknowledged.items())
        if known:
            key, (slot, checksum) = self.rng.choice(known)
            wrong = checksum + self.rng.choice((0, 0, 1))
            self.rig.send(node.client, Bad([key_of(key)], int32([slot]), uint64([wrong])))

    def _lie(self) -> None:
        """Commit slots that this node was not granted, or under the key of another block."""
        node, label = self.rng.choice(self.nodes)
        slots = [slot for slot in self.oracles[label].owners if slot not in self.held[node.client]]
        slots = [*slots[:2], self.rng.randrange(500)]
        namespace = self.rig.writer.namespaces[self._folder(label)]
        # A grant may be on its way to the node.
        slots = [slot for slot in slots if namespace.space.grant_of(slot, node.client) is None]
        keys = [key_of(self.rng.randrange(KEYS)) for _ in slots]
        sums = uint64([self._checksum() for _ in slots])
        request = next(node.requests)
        self.expected[node.client, request] = []
        self.rig.send(node.client, Commit(request, namespace.epoch, keys, int32(slots), sums))

    def _reset(self) -> None:
        if self.rng.random() < 0.3:
            node, _ = self.rng.choice(self.nodes)
            self.rig.send(node.client, Reset(next(node.requests)))
            for _ in range(6):  # which the node sent before it knew of that
                self._commit()

    # -- the writer ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start a writer over the disks, with a node of each namespace that sees everything."""
        self.fate.calls_left = None
        self.late = SteppingExecutor()
        self.rig.executor = self.late if self.is_late else DyingExecutor()
        self.rig.start()
        self.nodes.clear()
        self.joining.clear()
        self.held.clear()
        self.expected: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for oracle in self.oracles.values():
            oracle.owners.clear()
            oracle.removed.clear()
        for label in LABELS:
            self._connect(label)
        self._welcome()

    def _restart(self, is_power_lost: bool) -> None:
        self.fate.calls_left = None
        if is_power_lost:
            self.rig.lose_power(self.rng)
            if self.durability != "power":
                for oracle in self.oracles.values():
                    oracle.acknowledged.clear()
        else:
            self.rig.kill()
            self.rig.fs.drop_locks()
        self._begin()

    def _connect(self, label: str) -> None:
        self.joining.append((RigNode(self.rig, label, may_wait=True), label))
        self._welcome()

    def _welcome(self) -> None:
        """Count the nodes that wait no more."""
        self.waited += bool(self.joining)
        came = [pair for pair in self.joining if pair[0].has_answer()]
        self.joining = [pair for pair in self.joining if pair not in came]
        served = {label for _, label in self.nodes}
        for label in {label for _, label in came} - served:
            self.oracles[label].removed.clear()  # what an opening removes, nobody is told
        if came:
            self._drain()  # before they count: what left before they came, they are not told
        for node, label in came:
            assert node.welcome is not None, node.refused
            self.nodes.append((node, label))
            self.held[node.client] = {}
            self._check_presence(label)

    def _step(self) -> None:
        self.rig.step(seconds=self.rng.choice((0.0, 0.1, 1.1)))
        self._welcome()
        self._drain()
        for label in {label for _, label in self.nodes}:
            self._check_presence(label)
            self._check_slots(label)
        taken = self.rig.fs.used_bytes(ROOT)
        assert taken <= self.rig.options.capacity_bytes, "the capacity is exact"

    def _drain(self) -> None:
        told: dict[int, set[bytes]] = {}
        for client, inbox in self.rig.inboxes.items():
            while inbox:
                self._take_in(client, inbox.popleft(), told)
        for label in LABELS:
            removed, oracle = set(self.oracles[label].removed), self.oracles[label]
            oracle.removed.clear()
            for node, its_label in self.nodes:
                if its_label == label:
                    assert told.get(node.client, set()) >= removed, "all are told what left"

    def _take_in(self, client: int, message: FromWriter, told: dict[int, set[bytes]]) -> None:
        match message:
            case Removed():
                told.setdefault(client, set()).update(message.keys)
            case Granted():
                self._granted(client, message)
            case CommitDone():
                self._done(client, message)
            case Epoch():
                for slot in list(self.held.get(client, ())):
                    assert self.held[client][slot][1] <= message.epoch

    def _granted(self, client: int, message: Granted) -> None:
        label = next((label for node, label in self.nodes if node.client == client), None)
        if label is None:
            return  # it left before the answer
        oracle = self.oracles[label]
        keys = self.rig.asked[client, message.request]
        presence = self.rig.writer.namespaces[self._folder(label)].presence
        for key, slot in zip(keys, slots_in(message), strict=True):
            if slot == ALREADY_SLOT:
                assert key in oracle.sent, "only a block that was committed is already there"
            if slot < 0:
                continue
            assert slot not in oracle.owners, "no slot has two owners"
            assert all(presence.find(key_of(other)) != slot for other in range(KEYS))
            oracle.owners[slot] = client
            self.held[client][slot] = key, message.epoch

    def _done(self, client: int, message: CommitDone) -> None:
        label = next((label for node, label in self.nodes if node.client == client), None)
        blocks = self.expected.pop((client, message.request), [])
        if label is None:
            return
        codes = list(map(Committed, message.outcomes))
        if not blocks:
            text = "nobody commits what is not granted to him, or was before a reset"
            assert set(codes) <= {Committed.STALE}, text
            return
        oracle = self.oracles[label]
        table = self.rig.writer.namespaces[self._folder(label)].table
        for (key, slot, checksum), code in zip(blocks, codes, strict=True):
            (entry,) = table.get_many([key_of(key)])
            if code is Committed.OK and entry is not None and entry.slot == slot:
                if entry.checksum == checksum:
                    oracle.acknowledged[key] = slot, checksum
                    oracle.stored_blocks += 1

    # -- what must hold ------------------------------------------------------------------------

    def _check_presence(self, label: str) -> None:
        namespace, oracle = self.rig.writer.namespaces[self._folder(label)], self.oracles[label]
        presence = namespace.presence
        seen: set[int] = set()
        for key in range(KEYS):
            slot = presence.find(key_of(key))
            if slot < 0:
                assert key not in oracle.acknowledged, f"acknowledged block {key} is lost"
                continue
            place = slot, presence.checksum_of(slot)
            (entry,) = namespace.table.get_many([key_of(key)])
            assert entry is not None and (entry.slot, entry.checksum) == place
            assert slot not in seen, "no slot has two blocks"
            seen.add(slot)
            if key in oracle.acknowledged:
                assert oracle.acknowledged[key] == place
            else:
                assert place in oracle.sent.get(key, ()), "nobody wrote this"
        assert len(seen) == namespace.space.used == namespace.table.count()

    def _check_slots(self, label: str) -> None:
        space = self.rig.writer.namespaces[self._folder(label)].space
        for slot in self.oracles[label].owners:
            assert not space.is_used[slot], "a granted slot holds no block"

    def _folder(self, label: str) -> str:
        return next(n.welcome.folder for n, its in self.nodes if its == label and n.welcome)

    def _checksum(self) -> int:
        self.checksums += 1
        return self.checksums

    def _open_table(
        self,
        folder: Path,
        map_bytes: int,
        identity: bytes,
        *,
        is_durable: bool,
        is_same_boot: bool,
        wall_clock: Callable[[], float],
    ) -> BlockTable:
        disk = self.rig.disks.setdefault(folder, MemoryBlockDisk())
        label = folder.parent.name.split("-")[0]
        return DyingTable(
            disk,
            identity,
            self.fate,
            self.oracles[label].note,
            is_durable=is_durable,
            wall_clock=wall_clock,
        )


def number_of(key: bytes) -> int:
    """The number whose key this is."""
    return int.from_bytes(key[:4], "big")
