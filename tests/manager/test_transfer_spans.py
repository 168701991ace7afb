"""Promotions and demotions become spans, and the pinned slots of the first tier are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from support.cascade import BLOCK_SIZE, Cascade
from support.inside import demoters
from support.keys import keys

from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.observe.tracing import NS_PER_S, TransferSpans
from kvcascade.tiers.base import BlockOutcome

Attributes = Mapping[str, str | int | float]
WALL_NS = 1_700_000_000 * NS_PER_S


@dataclass
class Spans:
    """Spans that were made."""

    made: list[tuple[str, int, int, Attributes]] = field(default_factory=list)

    def __call__(
        self, span_name: str, start_time: int, end_time: int, attributes: Attributes
    ) -> None:
        self.made.append((span_name, start_time, end_time, attributes))


def traced() -> tuple[Cascade, Spans]:
    """A traced cascade of two tiers, whose wall clock stands still."""
    spans, made = Spans(), list[Cascade]()
    on_transfer = TransferSpans(spans, lambda: made[0].now_s, lambda: WALL_NS)
    made.append(Cascade((8, 16), ManagerOptions(on_transfer=on_transfer)))
    return made[0], spans


def ask(cascade: Cascade, request: Request, start: int, end: int) -> None:
    """Look blocks up, and end the step, so that their promotion starts."""
    for block_hash in keys(start, end):
        cascade.manager.lookups.lookup_block(block_hash, request)
    cascade.manager.end_step()


def test_a_demotion_is_a_span_from_its_start_to_its_end() -> None:
    cascade, spans = traced()
    cascade.store(keys(0, 3))
    demoters(cascade.manager)[0].demote_coldest(3)
    assert spans.made == [], "it has not ended"
    cascade.pass_time(0.25)
    cascade.run_transfers()
    ((name, start_ns, end_ns, attributes),) = spans.made
    assert (name, end_ns) == ("kvcascade.demote", WALL_NS)
    assert start_ns == WALL_NS - NS_PER_S // 4
    assert attributes["kvcascade.tier"] == "M1"
    assert attributes["kvcascade.blocks"] == 3
    assert attributes["kvcascade.bytes"] == 3 * BLOCK_SIZE


def test_a_promotion_says_which_blocks_failed() -> None:
    cascade, spans = traced()
    cascade.below_only(keys(0, 3))
    spans.made.clear()
    lost = iter([BlockOutcome.OK, BlockOutcome.CORRUPT, BlockOutcome.OK])
    cascade.up[0].fate = lambda source, target: next(lost)
    ask(cascade, Request(), 0, 3)
    cascade.run_transfers()
    ((name, _, _, attributes),) = spans.made
    assert name == "kvcascade.promote"
    assert attributes["kvcascade.blocks"] == 3
    assert attributes["kvcascade.blocks.corrupt"] == 1


def test_a_tracer_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fails(span_name: str, start_time: int, end_time: int, attributes: Attributes) -> None:
        calls.append(span_name)
        raise RuntimeError("no exporter")

    cascade = Cascade((8, 16), ManagerOptions(on_transfer=TransferSpans(fails)))
    cascade.below_only(keys(0, 3))
    cascade.below_only(keys(3, 6))
    assert len(calls) == 1 and "no exporter" in caplog.text


def test_pinned_slots_are_counted_by_what_pins_them() -> None:
    cascade = Cascade((8, 16))
    cascade.below_only(keys(0, 2))

    def pinned() -> tuple[int, int]:
        first = cascade.manager.tier_states()[0]
        return first.writing_blocks, first.reading_blocks

    assert pinned() == (0, 0)
    cascade.manager.prepare_store(keys(10, 13))
    assert pinned() == (3, 0), "workers write them"
    request = Request()
    ask(cascade, request, 0, 2)
    assert pinned() == (5, 0), "two more come from below"
    cascade.run_transfers()
    assert pinned() == (3, 2), "kept for the request"
    for block_hash in keys(0, 2):
        cascade.manager.lookups.lookup_block(block_hash, request)
    cascade.manager.prepare_load(keys(0, 2), request)
    assert pinned() == (3, 2), "a slot counts once"
    cascade.manager.complete_store(keys(10, 13))
    cascade.manager.complete_load(keys(0, 2))
    cascade.manager.finish_request(request)
    assert pinned() == (0, 0)
    demoters(cascade.manager)[0].demote_coldest(3)
    assert pinned() == (0, 3), "writes read them"
    cascade.run_transfers()
    assert pinned() == (0, 0)


def test_every_store_with_new_blocks_is_one_sample() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    cascade.store(keys(0, 3))
    cascade.store(keys(2, 5))
    assert list(cascade.manager.counters.store_sizes) == [3, 2]
