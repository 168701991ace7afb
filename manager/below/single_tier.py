"""`SingleTier`: the parts of the port `Below` that all tiers behind a node share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..counters import Departures, LinkCounters
from .node_inbox import NodeInbox
from .node_traffic import NodeClient, NodeReads, Traffic
from .port import Below, Ended, TierFacts

NODE_STOP_S = 1.0
"""Minimum time in seconds that a node gets to end its transfers at a shutdown."""
OnNote = Callable[[Any], None]


FeedT = TypeVar("FeedT", bound=NodeInbox)
WritesT = TypeVar("WritesT", bound=Traffic[Any])


class SingleTier(Below, Generic[FeedT, WritesT]):
    """One tier, whose blocks a node moves. A subclass sets `reads` and `writes`.

    A reset is sent to the node, and again to the next node if that one dies before it answered.
    """

    reads: NodeReads[Any]
    writes: WritesT
    feed: FeedT

    def __init__(
        self,
        client: NodeClient,
        feed: FeedT,
        facts: TierFacts,
        departures: Departures,
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns monotonic seconds."""
        self.tiers = (facts,)
        self.links = (LinkCounters(),)
        self.departures = (departures,)
        self.feed = feed
        self._client = client
        self._clock = clock
        self._resets_due = 0
        """Number of resets that no node has carried out."""
        self._reset_order: Callable[[int], Any] | None = None
        """Function that builds the message of the last reset from its ticket."""
        self._is_reset_sent = False

    def poll(self) -> Sequence[Ended]:
        reads, writes, counters = self.reads, self.writes, self.links[0]
        if reads.jobs or writes.jobs or self._is_asking:
            self._client.poll()
        self.feed.process()
        reads.breaker.look_at_clock()
        writes.breaker.look_at_clock()
        counters.promote_openings = reads.breaker.openings
        counters.demote_openings = writes.breaker.openings
        if not (reads.ended or writes.ended):
            return ()
        ended = [*reads.ended, *writes.ended]
        reads.ended.clear()
        writes.ended.clear()
        return ended

    def take_marks(self) -> Sequence[int]:
        marks = self.feed.marks
        if marks:
            self.feed.marks = []
        return marks

    def wait(self, tickets: set[int], limit_s: float) -> None:
        reads, writes = self.reads.open_tickets, self.writes.open_tickets
        mine = {ticket for ticket in tickets if ticket in reads or ticket in writes}
        if mine:
            self._client.wait(lambda: mine.isdisjoint(reads) and mine.isdisjoint(writes), limit_s)

    def shutdown(self, deadline_s: float) -> bool:
        left_s = max(NODE_STOP_S, deadline_s - self._clock())
        has_ended = self._client.wait(self._is_quiet, left_s) or self._client.kill()
        self.feed.process()
        return has_ended

    # -- inside ------------------------------------------------------------------------------

    @property
    def _is_asking(self) -> bool:
        """True while requests wait for an answer that is neither a read nor a write."""
        return False

    def _listen(self) -> None:
        """Take in what the node said, and send a reset that no node has."""
        self._client.listen()
        self.feed.process()
        if self._resets_due and not self._is_reset_sent:
            self._send_reset()

    def _begin_reset(self, order: Callable[[int], Any]) -> None:
        self._reset_order = order
        self._resets_due += 1
        self._send_reset()

    def _send_reset(self) -> None:
        due, order = self._resets_due, self._reset_order
        assert order is not None, "a reset is due"

        def end(done: Any) -> None:
            self.feed.end(lambda answer: self._end_reset(due, answer), done)

        self._is_reset_sent = self._client.submit(order, end)

    def _end_reset(self, due: int, done: Any) -> None:
        if done is None:
            self._is_reset_sent = False  # `maintain` sends it to the next node
        elif due == self._resets_due:
            self._resets_due, self._is_reset_sent = 0, False
            self._after_reset(done)

    @abstractmethod
    def _after_reset(self, done: Any) -> None:
        """Find blocks again: the node has carried out the last reset."""

    def _is_quiet(self) -> bool:
        return not (self.writes.open_tickets or self.reads.open_tickets)
