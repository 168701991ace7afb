"""The demo's requests: chats that share a few long system prompts, turn by turn.

Every prompt is the system prompt, all earlier turns with their answers, and a new message. The
order of conversations is shuffled in each round of turns. Between two turns of one chat all others
run, so its blocks are evicted from the faster tiers. The same shape always gives the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_TOKEN = 3
"""First ordinary token; lower numbers are special tokens."""


class Turn(NamedTuple):
    """One request: a conversation, and the number of the turn in it (from 1)."""

    conversation: int
    number: int


Answers = Mapping[Turn, Sequence[int]]
"""Answers of the model by turn."""


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Number and length of the requests."""

    prefixes: int = 3
    """Number of system prompts, which conversations share evenly."""
    conversations: int = 18
    turns: int = 4
    prefix_tokens: int = 608
    message_tokens_min: int = 120
    message_tokens_max: int = 200
    answer_tokens: int = 16
    vocabulary: int = 1024
    seed: int = 0

    @property
    def prompt_tokens_max(self) -> int:
        """Return the largest length of a prompt with its answer."""
        return self.prefix_tokens + self.turns * (self.message_tokens_max + self.answer_tokens)


class Workload:
    """The conversations of a shape."""

    def __init__(self, shape: ChatShape) -> None:
        self.shape = shape

    def prompt(self, turn: Turn, answers: Answers) -> list[int]:
        """Return the tokens of a request; `answers` holds those of the earlier turns."""
        length = self.shape.prefix_tokens
        tokens = self._tokens(f"prefix {turn.conversation % self.shape.prefixes}", length, length)
        for number in range(1, turn.number):
            earlier = Turn(turn.conversation, number)
            tokens += self._message(earlier)
            tokens += answers[earlier]
        return tokens + self._message(turn)

    def order(self, number: int, shuffle: str = "") -> list[Turn]:
        """Return turn `number` of every conversation, shuffled; `shuffle` names another order."""
        turns = [Turn(c, number) for c in range(self.shape.conversations)]
        self._random(f"order {number} {shuffle}").shuffle(turns)
        return turns

    def _message(self, turn: Turn) -> list[int]:
        shortest, longest = self.shape.message_tokens_min, self.shape.message_tokens_max
        return self._tokens(f"message {turn.conversation} {turn.number}", shortest, longest)

    def _tokens(self, name: str, shortest: int, longest: int) -> list[int]:
        source = self._random(name)
        count = source.randint(shortest, longest)
        return [source.randrange(FIRST_TOKEN, self.shape.vocabulary) for _ in range(count)]

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.shape.seed} {name}")


def waves(turns: Sequence[Turn], width: int) -> Iterator[Sequence[Turn]]:
    """Yield the requests that are sent together: `width` at a time, in order."""
    for start in range(0, len(turns), width):
        yield turns[start : start + width]
