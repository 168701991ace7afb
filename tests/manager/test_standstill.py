"""Questions are put off for one step once nothing came of them for many, and only then."""

from __future__ import annotations

from kvcascade.manager.promotion.standstill import STILL_STEPS, Standstill


def step(standstill: Standstill) -> bool:
    """Whether the questions of a step were put off: all of them, or none."""
    answers = {standstill.must_defer() for _ in range(3)}
    standstill.end_step()
    (answer,) = answers
    return answer


def test_one_step_of_many_is_put_off() -> None:
    standstill = Standstill()
    steps = [step(standstill) for _ in range(3 * STILL_STEPS)]
    put_off = [number for number, is_put_off in enumerate(steps) if is_put_off]
    assert put_off[0] == STILL_STEPS and put_off[1] == 2 * STILL_STEPS and len(put_off) == 2


def test_an_engine_that_goes_on_is_never_put_off() -> None:
    standstill = Standstill()
    for _ in range(5):
        assert not any(step(standstill) for _ in range(STILL_STEPS))
        standstill.note_progress()


def test_steps_without_a_question_do_not_count() -> None:
    standstill = Standstill()
    for _ in range(10 * STILL_STEPS):
        standstill.end_step()
    assert not step(standstill)
