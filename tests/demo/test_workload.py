"""The demo's requests: always the same ones, and shaped as said."""

from __future__ import annotations

import pytest

from kvcascade.tools.dev.demo.workload import FIRST_TOKEN, ChatShape, Turn, Workload, waves

SHAPE = ChatShape(conversations=6, prefix_tokens=40, message_tokens_min=5, message_tokens_max=9)


def answers(shape: ChatShape) -> dict[Turn, list[int]]:
    """A different answer for every turn."""
    return {
        Turn(c, n): [900 + 10 * c + n] * shape.answer_tokens
        for c in range(shape.conversations)
        for n in range(1, shape.turns + 1)
    }


def test_same_shape_same_requests() -> None:
    one, other = Workload(SHAPE), Workload(ChatShape(**vars_of(SHAPE)))
    for number in range(1, SHAPE.turns + 1):
        assert one.order(number) == other.order(number)
        for turn in one.order(number):
            assert one.prompt(turn, answers(SHAPE)) == other.prompt(turn, answers(SHAPE))


def test_another_seed_makes_other_requests() -> None:
    other = Workload(ChatShape(**{**vars_of(SHAPE), "seed": 1}))
    assert other.prompt(Turn(0, 1), {}) != Workload(SHAPE).prompt(Turn(0, 1), {})


def test_a_prompt_is_the_history_and_a_new_message() -> None:
    workload, given = Workload(SHAPE), answers(SHAPE)
    for conversation in range(SHAPE.conversations):
        history = workload.prompt(Turn(conversation, 1), given)
        for number in range(2, SHAPE.turns + 1):
            prompt = workload.prompt(Turn(conversation, number), given)
            history = history + given[Turn(conversation, number - 1)]
            assert prompt[: len(history)] == history
            new = len(prompt) - len(history)
            assert SHAPE.message_tokens_min <= new <= SHAPE.message_tokens_max
            history = prompt
        assert len(history) + SHAPE.answer_tokens <= SHAPE.prompt_tokens_max
        assert all(FIRST_TOKEN <= token < SHAPE.vocabulary for token in history)


def test_conversations_share_as_many_prefixes_as_there_are() -> None:
    workload = Workload(SHAPE)
    turns = workload.order(1)
    prefixes = {tuple(workload.prompt(turn, {})[: SHAPE.prefix_tokens]) for turn in turns}
    whole = {tuple(workload.prompt(turn, {})) for turn in turns}
    assert len(prefixes) == SHAPE.prefixes and len(whole) == SHAPE.conversations


def test_every_conversation_has_each_turn_once_and_orders_differ() -> None:
    workload = Workload(SHAPE)
    orders = [workload.order(1), workload.order(2), workload.order(2, "again")]
    for order, number in zip(orders, (1, 2, 2), strict=True):
        assert sorted(order) == [Turn(c, number) for c in range(SHAPE.conversations)]
    assert len({tuple(turn.conversation for turn in order) for order in orders}) == 3


@pytest.mark.parametrize("width", [1, 2, 4, 100])
def test_waves_keep_all_requests_in_order(width: int) -> None:
    turns = Workload(SHAPE).order(1)
    sent = list(waves(turns, width))
    assert [turn for wave in sent for turn in wave] == turns
    assert all(len(wave) == width for wave in sent[:-1]) and len(sent[-1]) <= width


def vars_of(shape: ChatShape) -> dict[str, int]:
    """The fields of a shape."""
    return {name: getattr(shape, name) for name in ChatShape.__dataclass_fields__}
