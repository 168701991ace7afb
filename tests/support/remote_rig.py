"""A remote store over a twin, with clock and executor in the hands of the test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from kvcascade.config.remote import WriteWhen
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.remote.base import RemoteEngine, RemoteOutcome
from kvcascade.tiers.remote.objects import ObjectFormat, Seal
from kvcascade.tiers.remote.presence import Presence
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.remote_store import RemoteStore, StoreOptions

from .clock import ManualClock
from .executors import InlineExecutor
from .remote_twin import RemoteTwin

PAYLOAD_BYTES = 4096
UNTOUCHED = 0xEE
THROUGH = StoreOptions(when=WriteWhen.THROUGH)
WALL_S = 1_700_000_000.0


def content(
    block_hash: BlockHash, payload_bytes: int = PAYLOAD_BYTES, weights: bytes = b""
) -> bytes:
    """The one right content of a block for hosts with these weights."""
    pattern = block_hash + weights
    return (pattern * (payload_bytes // len(pattern) + 1))[:payload_bytes]


class RemoteRig:
    """One host: a store, and memory that stands for slots of the arena."""

    def __init__(
        self,
        engine: RemoteEngine | None = None,
        executor: Executor | None = None,
        options: StoreOptions = THROUGH,
        fingerprint: str = "model-1",
        seal: Seal | None = None,
        payload_bytes: int = PAYLOAD_BYTES,
        clock: ManualClock | None = None,
        *,
        was_reset: bool = False,
        **changes: object,
    ) -> None:
        self.clock = ManualClock() if clock is None else clock
        self.twin = engine if isinstance(engine, RemoteTwin) else RemoteTwin()
        self.executor = InlineExecutor() if executor is None else executor
        self.payload_bytes = payload_bytes
        self.objects = ObjectFormat(fingerprint, payload_bytes, seal)
        self.store = RemoteStore(
            self.twin if engine is None else engine,
            self.objects,
            self.executor,
            replace(options, **changes),  # type: ignore[arg-type]
            self.clock,
            lambda: WALL_S + self.clock.now_s,
            was_reset=was_reset,
        )
        self._ticket = 0
        self.read_into: list[memoryview] = []
        """Memory of the last call of `read`."""
        self.weights = b""

    def update(self) -> None:
        """Load other weights in place, and reset; all hosts that do this have the same ones."""
        self.weights = b"updated"
        self.store.reset()

    def ticket(self) -> int:
        """The next one."""
        self._ticket += 1
        return self._ticket

    def slots(self, n: int) -> list[memoryview]:
        """Memory whose bytes show whether anything was written."""
        return [memoryview(bytearray([UNTOUCHED]) * self.payload_bytes) for _ in range(n)]

    def ended(self, ticket: int, kind: Verb) -> list[RemoteOutcome]:
        """The outcomes of a call that has ended, the only one."""
        (ended,) = self.store.poll()
        assert (ended.ticket, ended.kind) == (ticket, kind)
        return [*ended.outcomes]

    def known(self, block_hash: BlockHash) -> Presence:
        """Return the presence of a block as the store remembers it."""
        return self.store._core.memory.of(block_hash)

    def names(self, hashes: Iterable[BlockHash]) -> list[str]:
        """Names of the objects of blocks, in the generation that the store knows."""
        generation = self.store.state().generation
        assert generation is not None
        return [self.objects.name(block_hash, generation) for block_hash in hashes]

    def look(self, hashes: Sequence[BlockHash]) -> list[RemoteOutcome]:
        """Ask for a chain, and wait."""
        ticket = self.ticket()
        self.store.ask(ticket, hashes)
        self.store.send()
        return self.ended(ticket, Verb.LOOKUP)

    def read(self, hashes: Sequence[BlockHash]) -> list[RemoteOutcome]:
        """Read blocks, and wait; what came is compared, and nothing else was written."""
        ticket, slots = self.ticket(), self.slots(len(hashes))
        self.read_into = slots
        self.store.get(ticket, hashes, slots)
        outcomes = self.ended(ticket, Verb.READ)
        check(hashes, slots, outcomes, self.weights)
        return outcomes

    def begin_write(self, hashes: Sequence[BlockHash]) -> int:
        """Begin to write blocks; returns the ticket."""
        ticket = self.ticket()
        payloads = [memoryview(content(h, self.payload_bytes, self.weights)) for h in hashes]
        self.store.put(ticket, hashes, payloads)
        return ticket

    def write(self, hashes: Sequence[BlockHash]) -> list[RemoteOutcome]:
        """Write blocks, and wait."""
        return self.ended(self.begin_write(hashes), Verb.WRITE)

    def host(self, **changes: object) -> RemoteRig:
        """Another host at the same server, with the same clock."""
        return RemoteRig(self.twin, clock=self.clock, **changes)  # type: ignore[arg-type]


def check(
    hashes: Sequence[BlockHash],
    slots: Sequence[memoryview],
    outcomes: Sequence[RemoteOutcome],
    weights: bytes = b"",
) -> None:
    """Compare what was read: the right bytes for `OK`, otherwise nothing was written."""
    for block_hash, slot, outcome in zip(hashes, slots, outcomes, strict=True):
        if outcome is RemoteOutcome.OK:
            assert bytes(slot) == content(block_hash, slot.nbytes, weights), "wrong bytes"
        else:
            untouched = bytes([UNTOUCHED]) * slot.nbytes
            assert bytes(slot) == untouched, "a byte was written without being verified"
