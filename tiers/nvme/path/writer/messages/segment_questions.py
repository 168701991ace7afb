"""The question of tools that removes segments: it is answered when the files are deleted.

| question | body | answer |
| --- | --- | --- |
| `take` | `name`, `segments`, flags | `taken`: numbers of the deleted, `blocks`: see below |

Segments are taken one after the other, and other messages are served between. `take` passes over
a segment that nodes write to for longer than `TAKE_WAIT_S`. With `if_empty` it passes over every
one that has a block or is being written to. With `if_unused` it ends once a node has the namespace
open; a segment that is being taken then is the last one. Older writers ignore that. `blocks` is the
number of blocks that were removed with their segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ......errors import ConfigError

if TYPE_CHECKING:
    from ..path_writer import PathWriter

MAX_OPEN_JOBS = 16
"""Most of these questions that wait for an answer at a time."""
MAX_SEGMENTS_PER_TAKE = 4096
TAKE_WAIT_S = 2.0
"""Longest wait for the writes of nodes to a segment that is to be taken."""
Answer = dict[str, Any]


@dataclass(slots=True)
class _Take:
    client: int
    request: int
    name: str
    left: deque[int]
    """Numbers of the segments that are not taken yet, in order."""
    is_if_empty: bool
    is_if_unused: bool
    """True if the rest stays once a node has the namespace open."""
    current: tuple[int, int] | None = None
    """Number of the segment that is being taken, and of its blocks at the beginning."""
    waits_until_s: float | None = None
    """Time at which the next segment is passed over."""
    taken: list[int] = field(default_factory=list)
    blocks: int = 0


class SegmentQuestions:
    """Open questions that take segments; on the writer's thread."""

    def __init__(self, writer: PathWriter, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._writer = writer
        self._clock = clock
        self._takes: list[_Take] = []

    @property
    def is_busy(self) -> bool:
        """True while a question is open."""
        return bool(self._takes)

    def begin(self, client: int, request: int, body: Answer) -> None:
        """Take a question; `poll` answers it. Raises `ConfigError` or another `KVCascadeError`."""
        if len(self._takes) >= MAX_OPEN_JOBS:
            raise ConfigError("too many are under way; try again later")
        numbers = body.get("segments")
        is_list = isinstance(numbers, list) and len(numbers) <= MAX_SEGMENTS_PER_TAKE
        if not is_list or not all(type(number) is int for number in numbers or ()):
            raise ConfigError(f"give `segments`, at most {MAX_SEGMENTS_PER_TAKE} numbers")
        name = self._writer.path.look_at(str(body.get("name"))).home.name
        flags = body.get("if_empty") is True, body.get("if_unused") is True
        self._takes.append(_Take(client, request, name, deque(numbers or ()), *flags))

    def forget(self, client: int) -> None:
        """Drop the open questions of a client that is gone."""
        self._takes = [each for each in self._takes if each.client != client]

    def poll(self) -> list[tuple[int, int, Answer]]:
        """Go on; return client, request and answer of a question that is done."""
        if not self._takes or self._writer.path.space.is_taking:
            return []
        first = self._takes[0]
        if first.current is not None:
            number, blocks = first.current
            if number not in self._writer.path.space.files.numbers(first.name):
                first.taken.append(number)
                first.blocks += blocks
            first.current = None
        if self._begin_next(first):
            return []
        self._takes.pop(0)
        return [(first.client, first.request, {"taken": first.taken, "blocks": first.blocks})]

    # -- inside --------------------------------------------------------------------------------

    def _begin_next(self, job: _Take) -> bool:
        """Begin with a segment, or go on waiting for one. Return False if none is left."""
        space, namespace = self._writer.path.space, self._writer.namespaces.get(job.name)
        while namespace is not None and job.left:
            if job.is_if_unused and namespace.clients:
                return False
            number = job.left[0]
            blocks = 0
            if number in namespace.space.segments or number in namespace.space.left_out:
                blocks = len(namespace.space.used_in(number))
                may_take = not (job.is_if_empty and blocks)
                if may_take and space.take(job.name, number):
                    job.current = number, blocks
                elif may_take and not job.is_if_empty and self._may_wait(job):
                    return True
            job.left.popleft()
            job.waits_until_s = None
            if job.current is not None:
                return True
        return False

    def _may_wait(self, job: _Take) -> bool:
        now_s = self._clock()
        if job.waits_until_s is None:
            job.waits_until_s = now_s + TAKE_WAIT_S
        return now_s < job.waits_until_s
