"""`WriterTwin`: a small writer of a path in memory, which stalls, lies and dies on command."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import numpy as np

from kvcascade.tiers.base import new_reset_mark
from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.path_messages import (
    ALREADY_SLOT,
    NO_SLOT,
    PROTOCOL,
    Bad,
    Chain,
    Commit,
    CommitDone,
    Committed,
    Epoch,
    FromNode,
    FromWriter,
    Grant,
    Granted,
    Hello,
    KeysListed,
    ListKeys,
    NamespaceSpec,
    PathOptions,
    Read,
    Refused,
    Release,
    Removed,
    Reset,
    Retire,
    SegmentsRemoved,
    StillOpening,
    Stored,
    TierFigures,
    Touch,
    Welcome,
    Why,
)
from kvcascade.tiers.nvme.path.presence_file import open_presence
from kvcascade.tiers.nvme.segments.format import SegmentLayout, segment_name

from .memory_block_table import MemoryBlockDisk, MemoryBlockTable

FIELDS: dict[str, object] = {"model": "some/model", "dtype": "float16"}
LABEL = "some/model"


def namespace_spec(block_bytes: int, label: str = LABEL) -> NamespaceSpec:
    """The namespace of the tests; another one by another label."""
    fields = FIELDS if label == LABEL else {**FIELDS, "label": label}
    return NamespaceSpec(label, json.dumps(fields).encode(), b"{}", block_bytes)


class WriterTwin:
    """One namespace; the block that was stored first leaves first."""

    def __init__(
        self,
        fs: FileSystem,
        root: Path,
        slots: int,
        per_segment: int,
        block_bytes: int,
        options: PathOptions,
    ) -> None:
        self.held: dict[bytes, tuple[int, int]] = {}
        """Slot and checksum of each committed block."""
        self.granted: dict[int, tuple[int, bytes]] = {}
        """Client and key of each granted slot."""
        self.outbox: deque[tuple[int, FromWriter]] = deque()
        self.heard: list[FromNode] = []
        """Every message that was handled."""
        self.is_stalled = False
        """Messages are kept and not handled, like those of a stopped process."""
        self.refusal: Refused | None = None
        """The answer to every `Hello`."""
        self.refusal_to_retire: Refused | None = None
        """The answer to every `Retire`, of a newer version."""
        self.why: Why | None = None
        """No grant gets a slot, for this reason."""
        self.evicted = self.read_bytes = self.retirements = 0
        self.uses: list[tuple[list[bytes], bool, bool]] = []
        self.fs, self.root, self.slots, self.options = fs, root, slots, options
        self._block_bytes, self._per_segment = block_bytes, per_segment
        self._clients: dict[int, bool | None] = {}
        """Whether a client wants events; None before its `Hello`."""
        self._next_client = 1
        self._marks: list[int] = []
        self._waiting: deque[tuple[int, FromNode]] = deque()
        self.is_opening = False
        """Nodes that come are told to wait for the namespace."""
        self._opening: list[tuple[int, Hello]] = []
        key = NamespaceKey(LABEL, FIELDS)
        self.folder = root / key.directory_name
        self._make_files(SegmentLayout(block_bytes, per_segment, key.fingerprint))

    def _make_files(self, layout: SegmentLayout) -> None:
        fs = self.fs
        for folder in (self.root, self.folder, self.folder / "segments"):
            fs.make_dir(folder)
        for number in range(self.slots // layout.slots):
            self.make_segment(layout, number)
        table = MemoryBlockTable(MemoryBlockDisk())
        self.presence = open_presence(fs, self.folder, self.slots, table, b"boot").table
        for key, (slot, checksum) in self.held.items():
            self.presence.insert(key, slot, checksum)

    def make_segment(self, layout: SegmentLayout, number: int) -> None:
        """Create a segment's file unless it exists."""
        path = self.folder / "segments" / segment_name(number)
        if not self.fs.exists(path):
            file = self.fs.open(path, create=True)
            file.preallocate(layout.file_bytes)
            file.close()

    # -- commands of a test --------------------------------------------------------------------

    def successor(self) -> WriterTwin:
        """The next writer of the path, after this one was killed: grants are forgotten."""
        other = object.__new__(WriterTwin)
        other.__dict__.update(self.__dict__)
        other.granted, other.outbox, other._clients = {}, deque(), {}
        other._waiting, other.heard, other._marks = deque(), [], []
        other._opening = []
        other.is_stalled = other.is_opening = False
        return other

    def has_opened(self) -> None:
        """The namespace is open now: welcome the nodes that waited for that."""
        self.is_opening = False
        waiting, self._opening = self._opening, []
        for client, hello in waiting:
            if client in self._clients:
                self._hello(client, hello)

    def go_on(self) -> None:
        """Handle what came while the twin was stalled."""
        self.is_stalled = False
        while self._waiting:
            self._handle(*self._waiting.popleft())

    def replace_segment(self, number: int) -> None:
        """Delete a segment with its blocks, tell the clients, and create it anew."""
        first = number * self._per_segment
        inside = range(first, first + self._per_segment)
        self._remove([key for key, (slot, _) in self.held.items() if slot in inside])
        path = self.folder / "segments" / segment_name(number)
        self.fs.unlink(path)
        self._broadcast(SegmentsRemoved([number]))
        layout = SegmentLayout(
            self._block_bytes, self._per_segment, NamespaceKey(LABEL, FIELDS).fingerprint
        )
        self.make_segment(layout, number)

    # -- the writer ------------------------------------------------------------------------------

    def connect(self) -> int:
        """A client comes."""
        client, self._next_client = self._next_client, self._next_client + 1
        self._clients[client] = None
        return client

    def cut_off(self, client: int) -> None:
        """A client does not read, or sends nonsense: only its grants stay."""
        self._clients.pop(client, None)

    def disconnect(self, client: int) -> None:
        """A client's socket was closed."""
        self._clients.pop(client, None)
        self.granted = {s: own for s, own in self.granted.items() if own[0] != client}

    def receive(self, client: int, message: FromNode) -> None:
        """Handle a message, or keep it while stalled."""
        if self.is_stalled:
            self._waiting.append((client, message))
        else:
            self._handle(client, message)

    def _handle(self, client: int, message: FromNode) -> None:
        if client not in self._clients:
            return
        self.heard.append(message)
        match message:
            case Hello():
                self._hello(client, message)
            case Grant():
                self._grant(client, message)
            case Commit():
                self._commit(client, message)
            case Release():
                for slot in np.frombuffer(message.slots, np.int32).tolist():
                    self.granted.pop(slot, None)
            case Bad():
                self._bad(message)
            case Touch():
                self.uses.append((message.keys, message.is_chain, message.is_settle))
            case Read():
                self.read_bytes += message.read_bytes
            case Reset():
                self._reset(client, message)
            case Retire():
                self.retirements += 1
                if self.refusal_to_retire is not None:
                    self._say(client, self.refusal_to_retire)
            case ListKeys():
                after = sorted(key for key in self.held if key > message.after)
                self._say(client, KeysListed(message.after, after[: message.limit]))
            case Chain():
                """It is in `heard`."""
            case _:
                raise AssertionError(f"a node never sends {message}")

    def _hello(self, client: int, hello: Hello) -> None:
        if self.refusal is not None:
            self._say(client, self.refusal)
            return
        if self.is_opening:
            self._opening.append((client, hello))
            self._say(client, StillOpening())
            return
        self._clients[client] = hello.wants_events
        welcome = Welcome(
            PROTOCOL,
            self.presence.epoch,
            self.folder.name,
            self._per_segment,
            self.slots,
            self.options,
        )
        self._say(client, welcome)

    def _grant(self, client: int, grant: Grant) -> None:
        slots = [self._slot_for(client, key) for key in grant.keys]
        why = Why.GRANTED if NO_SLOT not in slots else self.why or Why.LATER
        packed = np.array(slots, dtype=np.int32).tobytes()
        self._say(client, Granted(grant.request, self.presence.epoch, packed, why))

    def _slot_for(self, client: int, key: bytes) -> int:
        if key in self.held:
            return ALREADY_SLOT
        if self.why is not None:
            return NO_SLOT
        used = {slot for slot, _ in self.held.values()} | self.granted.keys()
        if len(used) == self.slots:
            if not self.held:
                return NO_SLOT
            oldest = next(iter(self.held))
            used.discard(self.held[oldest][0])
            self._remove([oldest])
        slot = min(set(range(self.slots)) - used)
        self.granted[slot] = client, key
        return slot

    def _commit(self, client: int, commit: Commit) -> None:
        slots = np.frombuffer(commit.slots, np.int32).tolist()
        checksums = np.frombuffer(commit.checksums, np.uint64).tolist()
        codes: list[int] = []
        stored: list[bytes] = []
        for key, slot, checksum in zip(commit.keys, slots, checksums, strict=True):
            is_own = self.granted.get(slot) == (client, key)
            if is_own:
                del self.granted[slot]
            if not is_own or commit.epoch != self.presence.epoch:
                codes.append(Committed.STALE)
            elif key in self.held:
                codes.append(Committed.ALREADY)
            else:
                self.held[key] = slot, checksum
                self.presence.insert(key, slot, checksum)
                codes.append(Committed.OK)
                stored.append(key)
        if stored:
            self._broadcast(Stored(stored), only_events=True)
        self._say(client, CommitDone(commit.request, bytes(codes)))
        self._figures()

    def _bad(self, bad: Bad) -> None:
        slots = np.frombuffer(bad.slots, np.int32).tolist()
        checksums = np.frombuffer(bad.checksums, np.uint64).tolist()
        named = zip(bad.keys, slots, checksums, strict=True)
        self._remove([key for key, *entry in named if self.held.get(key) == tuple(entry)])

    def _remove(self, keys: list[bytes]) -> None:
        for key in keys:
            slot, _ = self.held.pop(key)
            self.presence.remove(key, slot)
        self.evicted += len(keys)
        if keys:
            self._broadcast(Removed(keys))

    def _reset(self, client: int, reset: Reset) -> None:
        mark = reset.mark or new_reset_mark()
        if mark in self._marks:
            self._say(client, Epoch(self.presence.epoch, reset.request))
            return
        self._marks.append(mark)
        if reset.is_passed_on and self.held:
            self._say(client, Removed([*self.held]))
        self.held.clear()
        self.presence.clear(self.presence.epoch + 1)
        self._say(client, Epoch(self.presence.epoch, reset.request))
        for other in self._clients:
            if other != client:
                self._say(other, Epoch(self.presence.epoch, marks=[mark]))

    def _figures(self) -> None:
        for client, wants_events in self._clients.items():
            if wants_events is not None:
                first = client == min(self._clients)
                figures = TierFigures(
                    len(self.held), self.slots, self.evicted, None, is_reporter=first
                )
                self._say(client, figures)

    def _broadcast(self, message: FromWriter, *, only_events: bool = False) -> None:
        for client, wants_events in self._clients.items():
            if wants_events or (wants_events is not None and not only_events):
                self._say(client, message)

    def _say(self, client: int, message: FromWriter) -> None:
        self.outbox.append((client, message))
