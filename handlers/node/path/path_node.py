"""The deciding part of a node: its relation to the writer of the path, and the jobs of its engine.

    JOINING -> LEADING or FOLLOWING -> SILENT (no answers) or ORPHANED (socket closed) -> JOINING
    OFF: the path refused the node of an engine that no writer has served, or is of a newer version

No I/O happens here. Sockets are behind `NodeMeans`, threads and files behind `BlockIO`, and the
clock is passed in. All methods are called by one thread, the node's own. A node whose process is
the writer talks to it by the same messages.

Invariants: from a reset to its `Epoch` every get misses, and the reset is the first message after a
new `Welcome`. After the end of a connection nothing is submitted under its grants. The node hangs
up only when its running writes have ended, because that frees its slots. It joins again after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from ....errors import KVCascadeError
from ....tiers.nvme.path.path_messages import (
    MAX_CHAIN_HEADS,
    MAX_KEYS_PER_MESSAGE,
    PROTOCOL,
    Chain,
    CommitDone,
    Epoch,
    FromNode,
    FromWriter,
    Granted,
    Hello,
    KeysListed,
    ListKeys,
    Refused,
    RefusedWhy,
    Removed,
    Retire,
    SegmentsRemoved,
    StillOpening,
    Stored,
    TierFigures,
    Touch,
    Welcome,
)
from ..path_wire import (
    CAN_READ,
    CAN_WRITE,
    GetJob,
    NodeJoined,
    NodeNote,
    NodeOrder,
    NodeState,
    PutJob,
    ResetJob,
)
from .path_jobs import BlockIO, GetJobs, JobMeans, PutJobs, ResetJobs

SILENCE_LIMIT_S = 10.0
"""Longest time without an answer to a request. Then writes rest until the writer answers."""
WELCOME_LIMIT_S = 5.0
"""Longest silence of a writer before its `Welcome`."""
JOIN_PAUSE_S = 0.05
"""Pause after the first failed attempt to join; it doubles up to `MAX_JOIN_PAUSE_S`."""
MAX_JOIN_PAUSE_S = 1.0
MAX_REFUSED_PAUSE_S = 30.0
"""The same after a refusal that another attempt cannot change: each one opens the index."""
SHORT_LINK_S = 5.0
"""A link that ends sooner is short. After the second short one in a row, the node pauses before it
joins again. A writer that fails at each commit would otherwise be followed at once."""
LINK_PAUSE_S = 0.5
"""Pause after the second short link; it doubles up to `SHORT_LINK_S`."""
NOBODY_LIMIT_S = 20.0
"""Longest time without a writer until the log says so. The node goes on trying."""
REASONS_MAX = 8
"""Limit on the reasons that the log gives for one such time."""
STILL_OPENING = (
    "the writer of the path opens the namespace; after a loss of power this may take minutes"
)
FINAL_REFUSALS = frozenset({RefusedWhy.PATHS, RefusedWhy.NAMESPACE})
"""Refusals that another attempt cannot change; while an engine runs, the path may be mended."""


class NodeMeans(Protocol):
    """Sockets of a node. No method waits for the writer."""

    def join(self) -> None:
        """Try to become the writer, or else to connect to it.

        `PathNode.linked` or `PathNode.not_linked` is called later, by the node's own thread.
        """
        ...

    def send(self, message: FromNode) -> None:
        """Send to the writer. There is a link, though it may be broken already."""
        ...

    def hang_up(self) -> None:
        """Close the link to the writer; idempotent. `PathNode.lost` is not called for it."""
        ...

    def tell(self, message: msgspec.Struct) -> None:
        """Send to the scheduler's process."""
        ...


class JoinAttempts:
    """Times at which a node tries to join, since it searches for a writer or was served last."""

    def __init__(
        self,
        now_s: float,
        patience_s: float,
        next_s: float = math.inf,
        link_pause_s: float = 0.0,
    ) -> None:
        """`link_pause_s`: pause if the next link is short."""
        self.next_s = next_s
        """Time of the next attempt; infinite while none is planned."""
        self._patience_s = patience_s
        self._began_s = now_s
        self._pause_s = JOIN_PAUSE_S
        self._link_pause_s = link_pause_s
        self._noted: set[str] = set()
        """Reasons that were noted."""

    def served(self, now_s: float) -> JoinAttempts:
        """Return attempts that begin now, because a writer serves the node."""
        return JoinAttempts(now_s, self._patience_s, link_pause_s=self._link_pause_s)

    def lost(self, now_s: float) -> JoinAttempts:
        """Return attempts that begin now, at the end of a link that began with these."""
        pause_s = following_s = 0.0
        if now_s - self._began_s < SHORT_LINK_S:
            pause_s = self._link_pause_s
            following_s = min(SHORT_LINK_S, max(LINK_PAUSE_S, 2 * pause_s))
        return JoinAttempts(now_s, self._patience_s, now_s + pause_s, following_s)

    def failed(self, now_s: float, *, is_final: bool) -> None:
        """Plan the next attempt. `is_final`: it fails, too, unless somebody mends the path."""
        pause_s = min(MAX_REFUSED_PAUSE_S if is_final else MAX_JOIN_PAUSE_S, self._pause_s)
        self.next_s = now_s + pause_s
        self._pause_s = 2 * pause_s

    def should_note(self, text: str, now_s: float) -> bool:
        """Return True once for each reason, when they go on for too long."""
        is_news = text not in self._noted and len(self._noted) < REASONS_MAX
        if not is_news or now_s - self._began_s <= min(NOBODY_LIMIT_S, self._patience_s):
            return False
        self._noted.add(text)
        return True


class PathNode:
    """State machine of one node."""

    def __init__(
        self,
        hello: Hello,
        means: NodeMeans,
        io: BlockIO,
        clock: Callable[[], float],
        patience_s: float = math.inf,
    ) -> None:
        """`clock` returns monotonic seconds; `patience_s` is that of `NodeSetup`."""
        self.state = NodeState.JOINING
        self._hello = hello
        """First message to the next writer. Its epoch is the one that a writer said last, to this
        node or an earlier one."""
        self._means = means
        self._io = io
        self._clock = clock
        block_bytes = hello.namespace.block_bytes
        jobs = JobMeans(self._send, means.tell, io, clock)
        self._gets = GetJobs(jobs, block_bytes)
        self._puts = PutJobs(jobs, block_bytes)
        self._resets = ResetJobs(jobs)
        self._attempts = JoinAttempts(clock(), patience_s)
        self._heard_s = 0.0
        """Time of the last message of the writer, or of the begin of the connection."""
        self._is_linked = False
        self._is_leader = False
        self._welcome: Welcome | None = None
        """Answer of the writer that serves this node; None while none does."""
        self._should_retire_it = False
        """True if the last writer had another version: on the next link it is asked to close."""
        self._has_asked_to_retire = False
        """True on a link on which the writer was asked to close: an older one does, a newer one
        refuses. Another engine of the older version may lead after it; that one is asked, too."""

    def start(self) -> None:
        """Begin to join."""
        self._means.join()

    # -- from the scheduler --------------------------------------------------------------------

    def order(self, message: NodeOrder) -> None:
        """Begin a job of the scheduler, or pass on a note."""
        match message:
            case GetJob():
                may_read = self.state in CAN_READ and not self._resets
                if may_read:  # now, because these blocks are soon looked up again
                    self._use(Touch(message.keys))
                self._gets.begin(message, may_read=may_read)
            case PutJob():
                self._puts.begin(message, may_write=self.state in CAN_WRITE)
            case Touch():
                self._use(message)
            case ListKeys() | Chain():
                self._send(message)
            case ResetJob():
                self._gets.forget()
                self._puts.outdate()
                self._resets.begin(message, may_send=self._welcome is not None)

    # -- from the path -------------------------------------------------------------------------

    def linked(self, is_leader: bool) -> None:
        """Begin a connection. `is_leader`: its other end is the writer of this process."""
        self._is_linked, self._is_leader = True, is_leader
        self._heard_s = self._clock()
        self._attempts.next_s = math.inf
        self._has_asked_to_retire, self._should_retire_it = self._should_retire_it, False
        if self._has_asked_to_retire:
            self._means.send(Retire(PROTOCOL))
            return
        self._means.send(self._hello)

    def not_linked(self, text: str, *, is_final: bool = False) -> None:
        """Note a failed attempt to join.

        With `is_final` a new engine makes no other attempt, and one that was served makes few.
        """
        if is_final and self._is_new:
            self._turn_off(text, is_misconfigured=True)
        else:
            self._retry_later(text, is_final=is_final)

    def received(self, message: FromWriter) -> None:
        """Handle a message of the writer; one of a link that was given up is ignored."""
        if not self._is_linked:
            return
        self._heard_s = self._clock()
        if self.state is NodeState.SILENT:
            self._enter(self._served_state, "the writer of the path answers again")
        match message:
            case Granted():
                self._puts.granted(message)
            case CommitDone():
                self._puts.committed(message)
            case Welcome():
                self._welcomed(message)
            case Refused():
                self._refused(message)
            case Epoch():
                self._epoch(message)
            case SegmentsRemoved():
                self._io.forget_segments(message.numbers)
            case StillOpening():
                self._note_absence(STILL_OPENING)
            case Stored() | Removed() | KeysListed() | TierFigures():
                self._means.tell(message)
            case _:
                """Answers of questions that a node never asks."""

    def lost(self) -> None:
        """Note that the writer ended the connection, or that it broke; idempotent.

        `tick` hangs up when no write runs: this end of it is open until then.
        """
        if not self._is_linked:
            return
        was_served = self._welcome is not None
        self._end_link()
        if not was_served:
            text = "the writer of the path closes the connection; its log says why"
            if self._has_asked_to_retire:
                text = "writers of the path have another version, and are asked to close"
            self._retry_later(text)
            return
        self._attempts = self._attempts.lost(self._clock())  # `tick` joins when no write runs
        self._enter(
            NodeState.ORPHANED,
            "the writer of the path is gone; reads go on, and writes rest until an engine takes "
            "over, usually within seconds",
        )

    def tick(self) -> None:
        """Check the limits of time. Called about every 50 ms, and after a write has ended."""
        now_s, attempts = self._clock(), self._attempts
        if not (self._gets or self._puts):  # a device that is stuck is no life
            self._resets.show_life()
        if not self._is_linked:
            if self._puts.has_running_io:
                return
            self._means.hang_up()
            self._io.release_writes()
            if now_s >= attempts.next_s:
                attempts.next_s = math.inf
                self._means.join()
            return
        if self._welcome is None:
            if now_s - self._heard_s > WELCOME_LIMIT_S:
                self._hang_up(f"the writer of the path does not answer; {self._remedy}")
            return
        oldest_s = self._puts.oldest_request_s()
        if oldest_s is not None and now_s - max(oldest_s, self._heard_s) > SILENCE_LIMIT_S:
            self._enter(
                NodeState.SILENT,
                f"the writer of the path does not answer; reads go on, and writes rest; "
                f"{self._remedy}",
            )
            self._puts.writer_is_silent()
        self._gets.report_bytes()

    # -- inside --------------------------------------------------------------------------------

    @property
    def _served_state(self) -> NodeState:
        return NodeState.LEADING if self._is_leader else NodeState.FOLLOWING

    @property
    def _is_new(self) -> bool:
        """True if no writer has served this engine yet."""
        return self._hello.epoch is None

    @property
    def _remedy(self) -> str:
        """What to do about a writer that is stopped, or whose disk hangs."""
        command = f"kvcascade inspect {self._hello.paths[0]}"
        return f"continue or end its process, which `{command}` names"

    def _send(self, message: FromNode) -> None:
        """Send a message if the writer serves this node; drop it otherwise."""
        if self._welcome is not None:
            self._means.send(message)

    def _use(self, touch: Touch) -> None:
        """Send a use in parts. The first part goes last, because its keys are the most recent.

        A chain is cut instead: a policy would take each part for a request of its own.
        """
        if touch.is_chain:
            self._send(Touch(touch.keys[:MAX_CHAIN_HEADS], is_chain=True))
            return
        starts = range(0, len(touch.keys), MAX_KEYS_PER_MESSAGE)
        for start in reversed(starts):
            keys = touch.keys[start : start + MAX_KEYS_PER_MESSAGE]
            self._send(Touch(keys, is_settle=touch.is_settle))

    def _welcomed(self, welcome: Welcome) -> None:
        try:
            folder = self._io.open(welcome)
        except KVCascadeError as error:
            self._hang_up(str(error))
            return
        self._welcome = welcome
        self._hello = msgspec.structs.replace(self._hello, epoch=welcome.epoch)
        self._attempts = self._attempts.served(self._clock())
        self.state = self._served_state
        self._resets.send_waiting()
        self._means.tell(NodeJoined(self.state, folder, welcome.slots, welcome.epoch))
        for text in welcome.notes:
            self._means.tell(NodeNote(self.state, text))

    def _refused(self, refused: Refused) -> None:
        is_other_version = refused.why is RefusedWhy.PROTOCOL
        is_misconfigured = refused.why in FINAL_REFUSALS and self._is_new
        if is_misconfigured or (is_other_version and self._has_asked_to_retire):
            self._end_link()
            self._means.hang_up()
            self._turn_off(refused.text, is_misconfigured=is_misconfigured)
            return
        self._hang_up(refused.text, is_final=refused.why in FINAL_REFUSALS)
        self._should_retire_it = is_other_version

    def _epoch(self, message: Epoch) -> None:
        self._hello = msgspec.structs.replace(self._hello, epoch=message.epoch)
        self._means.tell(message)
        if message.request:
            self._puts.reset_epoch = message.epoch
            self._resets.answered(message.request)

    def _hang_up(self, text: str, *, is_final: bool = False) -> None:
        """Close a connection that is of no use, and try again later."""
        self._end_link()
        self._means.hang_up()
        self._retry_later(text, is_final=is_final)

    def _end_link(self) -> None:
        self._is_linked, self._welcome = False, None
        self._puts.writer_is_lost()
        self._resets.writer_is_lost()

    def _retry_later(self, text: str, *, is_final: bool = False) -> None:
        self._attempts.failed(self._clock(), is_final=is_final)
        self._note_absence(text)

    def _note_absence(self, text: str) -> None:
        """Say why no writer serves this node, if that lasts."""
        if self._attempts.should_note(text, self._clock()):
            self._means.tell(NodeNote(self.state, text))

    def _turn_off(self, text: str, *, is_misconfigured: bool) -> None:
        self._attempts.next_s = math.inf
        self._enter(NodeState.OFF, text, is_misconfigured=is_misconfigured)

    def _enter(self, state: NodeState, text: str, *, is_misconfigured: bool = False) -> None:
        self.state = state
        self._means.tell(NodeNote(state, text, is_misconfigured))
