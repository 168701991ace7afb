"""Questions of tools to the writer of a path. Bodies and answers are JSON objects.

| question | body | answer |
| --- | --- | --- |
| `stat` | | `options`, `bytes` that all namespaces take, `left_bytes`, `budget_left_bytes` |
| `list` | | `namespaces`: `name`, `clients`, `is_open` |
| `remove` | `name` | `is_removed`, or `error` |
| `hand_over` | | the writer closes the path cleanly, so that the asker may lead |

`block_questions` has the questions about the blocks of one namespace, `segment_questions` the one
that takes segments.

`left_bytes` has what is left of the capacity of each path, which may be negative. Older writers do
not tell it.

An answer with `error` says in one sentence what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ......errors import ConfigError, KVCascadeError
from ...path_messages import Ask, Told
from .block_questions import describe, drop, some_blocks
from .segment_questions import SegmentQuestions

if TYPE_CHECKING:
    from ..path_writer import PathWriter

TAKE = "take"
"""Name of the question whose answer waits until segments are deleted."""
Answer = dict[str, Any]


class WriterQuestions:
    """Answers of one `PathWriter`; on its thread."""

    def __init__(self, writer: PathWriter, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._writer = writer
        self._segments = SegmentQuestions(writer, clock)
        self._answers: dict[str, Callable[[Answer], Answer]] = {
            "stat": self._stat,
            "list": self._list,
            "remove": self._remove,
            "hand_over": self._hand_over,
            "namespace": lambda body: describe(writer, body),
            "blocks": lambda body: some_blocks(writer, body),
            "drop": lambda body: drop(writer, body),
        }

    @property
    def is_busy(self) -> bool:
        """True while an answer waits for segments to be deleted."""
        return self._segments.is_busy

    def ask(self, client: int, message: Ask) -> Told | None:
        """Return the answer to a question; None if `poll` has it later."""
        try:
            body = json.loads(message.body or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return told(message.request, {"error": "the question's body is no JSON object"})
        answer = self._answers.get(message.what)
        try:
            if message.what == TAKE:
                self._segments.begin(client, message.request, body)
                return None
            if answer is None:
                names = ", ".join(sorted([*self._answers, TAKE]))
                raise ConfigError(f"unknown question {message.what!r}; use one of {names}")
            return told(message.request, answer(body))
        except KVCascadeError as error:
            return told(message.request, {"error": str(error)})

    def poll(self) -> list[tuple[int, Told]]:
        """Go on with segments that are taken; return answers and their clients."""
        answers = self._segments.poll()
        return [(client, told(request, answer)) for client, request, answer in answers]

    def forget(self, client: int) -> None:
        """Drop the open questions of a client that is gone."""
        self._segments.forget(client)

    # -- inside --------------------------------------------------------------------------------

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
            return {"error": f"{name} is in use by {len(namespace.clients)} engines; stop them"}
        if namespace is not None:
            return {"is_removed": writer.path.remove(namespace)}
        if name not in writer.path.space.idle.names:
            return {"error": f"there is no namespace {name}; `list` names them all"}
        try:
            return {"is_removed": writer.path.remove_idle(name)}
        except KVCascadeError as error:
            return {"error": str(error)}


def told(request: int, answer: Answer) -> Told:
    """Return the answer to a question."""
    return Told(request, json.dumps(answer).encode())
