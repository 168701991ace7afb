"""Questions of tools to the writer of a path. Bodies and answers are JSON objects.

| question | body | answer |
| --- | --- | --- |
| `stat` | | `paths`, `options`, `bytes`, `clients` (name, namespace), `budget_left_bytes` |
| `list` | | `namespaces`: name, label, bytes, blocks, slots, epoch, clients, last_used_s |
| `remove` | `name` | `is_removed`, or `error` |
| `set` | options | `options` recorded, `later`: names that open namespaces do not follow yet |
| `shrink` | `bytes` | `bytes` that are taken at the end; the coldest segments leave |

`block_questions` has those about the blocks of one namespace.
An answer with `error` says in one sentence what to do. `blocks`, `slots` and `epoch` are null for a
namespace that is not open, `last_used_s` for one that is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .....errors import ConfigError, KVCascadeError
from ..path_messages import Ask, PathOptions, Told
from .block_questions import describe, drop, some_blocks

if TYPE_CHECKING:
    from .path_writer import PathWriter

MAX_SHRINKS = 16
"""Most `shrink` questions that are open at a time."""
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Shrink:
    """A `shrink` that is not answered yet."""

    client: int
    request: int
    goal_bytes: int


class WriterQuestions:
    """Answers of one `PathWriter`; on its thread."""

    def __init__(self, writer: PathWriter) -> None:
        self._writer = writer
        self._shrinks: list[_Shrink] = []
        self._answers: dict[str, Callable[[Answer], Answer]] = {
            "stat": self._stat,
            "list": self._list,
            "remove": self._remove,
            "set": self._set,
            "namespace": lambda body: describe(writer, body),
            "blocks": lambda body: some_blocks(writer, body),
            "drop": lambda body: drop(writer, body),
        }

    @property
    def is_busy(self) -> bool:
        """True while an answer waits for segments to be deleted."""
        return bool(self._shrinks)

    def ask(self, client: int, message: Ask) -> Told | None:
        """Return the answer to a question; None if `poll` has it later."""
        try:
            body = json.loads(message.body or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return told(message.request, {"error": "the question's body is no JSON object"})
        if message.what == "shrink":
            return self._begin_shrink(client, message.request, body)
        answer = self._answers.get(message.what)
        if answer is None:
            names = ", ".join(sorted([*self._answers, "shrink"]))
            error = f"unknown question {message.what!r}; use one of {names}"
            return told(message.request, {"error": error})
        try:
            return told(message.request, answer(body))
        except KVCascadeError as error:
            return told(message.request, {"error": str(error)})

    def poll(self) -> list[tuple[int, Told]]:
        """Go on with `shrink`; return answers and their clients."""
        if not self._shrinks:
            return []
        space = self._writer.path.space
        taken = self._taken_bytes()
        ended = [each for each in self._shrinks if taken <= each.goal_bytes]
        if len(ended) < len(self._shrinks) and not space.has_jobs:
            if not space.take_coldest(None, set(range(space.capacity.paths))):
                ended = self._shrinks  # nothing is left that may be taken
        self._shrinks = [each for each in self._shrinks if each not in ended]
        return [(each.client, told(each.request, {"bytes": taken})) for each in ended]

    def forget(self, client: int) -> None:
        """Drop the open questions of a client that is gone."""
        self._shrinks = [each for each in self._shrinks if each.client != client]

    # -- inside --------------------------------------------------------------------------------

    def _taken_bytes(self) -> int:
        space = self._writer.path.space
        return sum(map(space.own_bytes, range(space.capacity.paths)))

    def _begin_shrink(self, client: int, request: int, body: Answer) -> Told | None:
        goal = body.get("bytes")
        if type(goal) is not int or goal < 0:
            return told(request, {"error": "give `bytes`, a whole number that is not negative"})
        if len(self._shrinks) >= MAX_SHRINKS:
            return told(request, {"error": "too many are under way; try again later"})
        self._shrinks.append(_Shrink(client, request, goal))
        return None

    def _stat(self, _: Answer) -> Answer:
        writer = self._writer
        return {
            "paths": list(map(str, writer.path.roots)),
            "options": msgspec.to_builtins(writer.path.options),
            "bytes": self._taken_bytes(),
            "clients": [{"name": c.name, "namespace": c.folder} for c in writer.clients],
            "budget_left_bytes": writer.path.budget.left_bytes(writer.namespaces.values()),
        }

    def _list(self, _: Answer) -> Answer:
        space = self._writer.path.space
        found: list[Answer] = [
            {
                "name": name,
                "label": each.home.description.get("label"),
                "bytes": space.bytes_of(name),
                "blocks": each.space.used,
                "slots": each.home.slots,
                "epoch": each.epoch,
                "clients": len(each.clients),
                "last_used_s": None,
            }
            for name, each in space.namespaces.items()
        ]
        for one in space.idle.all:
            rest = dict.fromkeys(("label", "blocks", "slots", "epoch"))
            more = {"bytes": sum(one.bytes_by_path), "clients": 0, "last_used_s": one.last_used_s}
            found.append({"name": one.name, **rest, **more})
        return {"namespaces": sorted(found, key=lambda each: str(each["name"]))}

    def _set(self, body: Answer) -> Answer:
        writer = self._writer
        try:
            asked = {**msgspec.to_builtins(writer.path.options), **body}
            options = msgspec.convert(asked, PathOptions)
            unknown = sorted(body.keys() - set(PathOptions.__struct_fields__))
            if unknown:
                raise ConfigError(f"unknown options {', '.join(unknown)}; see `stat`")
            return {"later": writer.path.change(options), "options": asked}
        except (KVCascadeError, msgspec.ValidationError) as error:
            return {"error": str(error)}

    def _remove(self, body: Answer) -> Answer:
        writer, name = self._writer, str(body.get("name"))
        namespace = writer.namespaces.get(name)
        if namespace is not None and namespace.clients:
            return {"error": f"{name} is in use by {len(namespace.clients)} engines; stop them"}
        if namespace is not None:
            writer.path.remove(namespace)
            return {"is_removed": True}
        if all(one.name != name for one in writer.path.space.idle.all):
            return {"error": f"there is no namespace {name}; `list` names them all"}
        try:
            return {"is_removed": writer.path.remove_idle(name)}
        except KVCascadeError as error:
            return {"error": str(error)}


def told(request: int, answer: Answer) -> Told:
    """Return the answer to a question."""
    return Told(request, json.dumps(answer).encode())
