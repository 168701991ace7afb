"""Questions of tools to the writer of a path. Bodies and answers are JSON objects.

| question | body | answer |
| --- | --- | --- |
| `stat` | | `options`, `bytes` that all namespaces take, `left_bytes`, `budget_left_bytes` |
| `list` | | `namespaces`: `name`, `clients`, `is_open` |
| `remove` | `name` | `is_removed`, or `error` |
| `hand_over` | | the writer closes the path cleanly, so that the asker may lead |
| `namespace` | `name` | numbers, totals and engines: see below |
| `blocks` | `name`, `after`, `start`, `limit` | `blocks`: see below; `next`, null at the end |
| `drop` | `name`, `blocks` | `dropped`: number of these blocks whose entry still was the same |
| `take` | `name`, `segments`, flags | `taken`: numbers of the deleted, `blocks`: see below |

An answer with `error` says in one sentence what to do, and names the `kind` of the error
(`ErrorKind`). `left_bytes` has what is left of the capacity of each path, which may be negative.
Older writers tell neither `kind` nor `left_bytes`.

The last four are about one namespace. One that no node has open is opened, and stays open for some
minutes, unless its room is needed. `namespace` is answered with `blocks`, `slots`, `epoch`,
`written_bytes`, `read_bytes`, `day` (`written_bytes`, `read_bytes`), `granted_slots`,
`dropped_at_opening`: number of blocks whose segment files were missing, and `engines`: the names of
the nodes that have joined, at most `MAX_ENGINES_NAMED`.

A block is its hash, slot, checksum and the time of its last use in seconds since 1970; `drop` needs
the first three. Hashes are hexadecimal. `after` is the last `next`, or empty. With `start`, only
blocks whose hash begins with it are named.

`take` removes segments, and is answered when their files are deleted. Segments are taken one after
the other, and other messages are served between. `take` passes over a segment that nodes write to
for longer than `TAKE_WAIT_S`. With `if_empty` it passes over every one that has a block or is being
written to. With `if_unused` it ends once a node has the namespace open; a segment that is being
taken then is the last one. Older writers ignore that. `blocks` is the number of blocks that were
removed with their segments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from ......errors import ConfigError, KVCascadeError
from ....segments.format import MAX_KEY_BYTES
from ...path_messages import Ask, Told

if TYPE_CHECKING:
    from ..namespace.namespace_writer import NamespaceWriter
    from ..path_writer import PathWriter

MAX_BLOCKS_PER_ANSWER = 1024
"""Most blocks of one answer; other messages wait for it."""
MAX_ENGINES_NAMED = 64
TAKE = "take"
"""Name of the question whose answer waits until segments are deleted."""
MAX_OPEN_TAKES = 16
"""Most of these questions that wait for an answer at a time."""
MAX_SEGMENTS_PER_TAKE = 4096
TAKE_WAIT_S = 2.0
"""Longest wait for the writes of nodes to a segment that is to be taken."""
Answer = dict[str, Any]


class WriterQuestions:
    """Answers of one `PathWriter`; on its thread."""

    def __init__(self, writer: PathWriter, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._writer = writer
        self._clock = clock
        self._takes: list[tuple[int, int, Generator[None, None, Answer]]] = []
        """Questions that take segments and have no answer, in order: client, request and work."""
        self._answers: dict[str, Callable[[Answer], Answer]] = {
            "stat": self._stat,
            "list": self._list,
            "remove": self._remove,
            "hand_over": self._hand_over,
            "namespace": self._describe,
            "blocks": self._some_blocks,
            "drop": self._drop,
        }

    @property
    def is_busy(self) -> bool:
        """True while an answer waits for segments to be deleted."""
        return bool(self._takes)

    def ask(self, client: int, message: Ask) -> Told | None:
        """Return the answer to a question; None if `poll` has it later."""
        try:
            body = json.loads(message.body or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            wrong = ConfigError("the question's body is no JSON object")
            return told(message.request, refusal(wrong))
        answer = self._answers.get(message.what)
        try:
            if message.what == TAKE:
                self._begin_take(client, message.request, body)
                return None
            if answer is None:
                names = ", ".join(sorted([*self._answers, TAKE]))
                raise ConfigError(f"unknown question {message.what!r}; use one of {names}")
            return told(message.request, answer(body))
        except KVCascadeError as error:
            return told(message.request, refusal(error))

    def poll(self) -> list[tuple[int, Told]]:
        """Go on with segments that are taken; return answers and their clients."""
        if not self._takes or self._writer.path.space.is_taking:
            return []
        client, request, work = self._takes[0]
        try:
            next(work)
        except StopIteration as end:
            self._takes.pop(0)
            return [(client, told(request, end.value))]
        return []

    def forget(self, client: int) -> None:
        """Drop the open questions of a client that is gone."""
        self._takes = [each for each in self._takes if each[0] != client]

    # -- the path ------------------------------------------------------------------------------

    def _stat(self, _: Answer) -> Answer:
        writer, space = self._writer, self._writer.path.space
        own_bytes = [space.own_bytes(path) for path in range(space.capacity.paths)]
        return {
            "options": msgspec.to_builtins(writer.path.options),
            "bytes": sum(own_bytes),
            "left_bytes": [space.capacity.left_bytes(*each) for each in enumerate(own_bytes)],
            "budget_left_bytes": writer.path.budget_left_bytes(),
        }

    def _list(self, _: Answer) -> Answer:
        clients = {name: len(each.clients) for name, each in self._writer.namespaces.items()}
        names = {*clients, *self._writer.path.space.idle.names}
        return {
            "namespaces": [
                {"name": name, "clients": clients.get(name, 0), "is_open": name in clients}
                for name in sorted(names)
            ]
        }

    def _hand_over(self, _: Answer) -> Answer:
        self._writer.wants_close = True
        return {}

    def _remove(self, body: Answer) -> Answer:
        writer, name = self._writer, str(body.get("name"))
        namespace = writer.namespaces.get(name)
        if namespace is not None and namespace.clients:
            engines = len(namespace.clients)
            raise ConfigError(f"{name} is in use by {engines} engines; stop them")
        if namespace is not None:
            return {"is_removed": writer.path.remove(namespace)}
        if name not in writer.path.space.idle.names:
            raise ConfigError(f"there is no namespace {name}")
        return {"is_removed": writer.path.remove_idle(name)}

    # -- one namespace -------------------------------------------------------------------------

    def _describe(self, body: Answer) -> Answer:
        namespace = self._namespace(body)
        written, read = namespace.totals()
        day = namespace.day_totals()
        engines = [each.name for each in self._writer.clients if each.namespace is namespace]
        return {
            "blocks": namespace.space.used,
            "slots": namespace.home.slots,
            "epoch": namespace.epoch,
            "written_bytes": written,
            "read_bytes": read,
            "day": {"written_bytes": day.written, "read_bytes": day.read},
            "granted_slots": namespace.space.granted,
            "dropped_at_opening": namespace.space.dropped_at_opening,
            "engines": engines[:MAX_ENGINES_NAMED],
        }

    def _some_blocks(self, body: Answer) -> Answer:
        limit = body.get("limit", MAX_BLOCKS_PER_ANSWER)
        if type(limit) is not int or not 0 < limit <= MAX_BLOCKS_PER_ANSWER:
            raise ConfigError(f"give `limit`, from 1 to {MAX_BLOCKS_PER_ANSWER}")
        after, start = _key(body.get("after", "")), _key(body.get("start", ""))
        namespace = self._namespace(body)
        found = namespace.table.keys_after(max(after, start), limit)
        if start and after < start and len(start) <= MAX_KEY_BYTES:
            (entry,) = namespace.table.get_many([start])
            found = [*([] if entry is None else [(start, entry)]), *found][:limit]
        inside = [each for each in found if each[0].startswith(start)]
        has_more, found = len(inside) == len(found) > 0, inside
        used_s = namespace.recency.last_used_s([entry.slot for _, entry in found])
        rows = [
            [key.hex(), entry.slot, entry.checksum, used]
            for (key, entry), used in zip(found, used_s, strict=True)
        ]
        return {"blocks": rows, "next": rows[-1][0] if has_more else None}

    def _drop(self, body: Answer) -> Answer:
        rows = body.get("blocks")
        if not isinstance(rows, list) or len(rows) > MAX_BLOCKS_PER_ANSWER:
            raise ConfigError(f"give `blocks`, at most {MAX_BLOCKS_PER_ANSWER}")
        try:
            wanted = {_key(key): (int(slot), int(checksum)) for key, slot, checksum, *_ in rows}
        except (OverflowError, TypeError, ValueError):
            raise ConfigError("each of `blocks` is a hash, a slot and a checksum") from None
        removed = self._writer.drop_blocks(self._namespace(body), wanted)
        if removed is None:
            raise ConfigError("the index could not be written; see the log of the writer")
        return {"dropped": len(removed)}

    def _namespace(self, body: Answer) -> NamespaceWriter:
        """Return the namespace of a question, open. Raises as `PathNamespaces.look_at`."""
        return self._writer.path.look_at(str(body.get("name")))

    # -- segments that are taken ---------------------------------------------------------------

    def _begin_take(self, client: int, request: int, body: Answer) -> None:
        if len(self._takes) >= MAX_OPEN_TAKES:
            raise ConfigError("too many are under way; try again later")
        numbers = body.get("segments")
        is_list = isinstance(numbers, list) and len(numbers) <= MAX_SEGMENTS_PER_TAKE
        if not is_list or not all(type(number) is int for number in numbers or ()):
            raise ConfigError(f"give `segments`, at most {MAX_SEGMENTS_PER_TAKE} numbers")
        name = self._namespace(body).home.name
        flags = body.get("if_empty") is True, body.get("if_unused") is True
        self._takes.append((client, request, self._taken(name, numbers or [], *flags)))

    def _taken(
        self, name: str, numbers: list[int], is_if_empty: bool, is_if_unused: bool
    ) -> Generator[None, None, Answer]:
        """Take segments, and return the answer. It goes on while no segment is being taken."""
        space = self._writer.path.space
        taken: list[int] = []
        removed = 0
        for number in numbers:
            until_s = self._clock() + TAKE_WAIT_S
            while True:
                namespace = self._writer.namespaces.get(name)
                if namespace is None or (is_if_unused and namespace.clients):
                    return {"taken": taken, "blocks": removed}
                slots = namespace.space
                is_here = number in slots.segments or number in slots.left_out
                blocks = len(slots.used_in(number)) if is_here else 0
                if not is_here or (is_if_empty and blocks):
                    break
                if space.take(name, number):
                    yield
                    if number not in space.files.numbers(name):
                        taken.append(number)
                        removed += blocks
                    break
                if is_if_empty or self._clock() >= until_s:
                    break
                yield  # nodes write to it
        return {"taken": taken, "blocks": removed}


def _key(text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise ConfigError(f"{text!r} is not a hash in hexadecimal") from None


def refusal(error: KVCascadeError) -> Answer:
    """Return the answer to a question that the writer cannot answer."""
    return {"error": str(error), "kind": error.kind.value}


def told(request: int, answer: Answer) -> Told:
    """Return the answer to a question."""
    return Told(request, json.dumps(answer).encode())
