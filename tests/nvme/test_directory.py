"""What the directory remembers of the index within a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for, content, key

from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.index.index_port import CommitOutcome
from kvcascade.tiers.nvme.index_directory import REFRESH_EVERY_CHANGES
from kvcascade.tiers.nvme.segments.format import parse_entry

OK = BlockOutcome.OK
KEY = key(0)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(config_for([tmp_path], slots=32))
    rig.store([KEY])
    rig.maintain()  # the index has it, nothing else does
    rig.tier.directory.refresh()
    yield rig
    rig.close()


def entry_slot(rig: Rig) -> int:
    (value,) = rig.tier.directory.values_of([KEY])
    assert value is not None
    entry = parse_entry(KEY, value)
    assert entry is not None
    return entry.slot


def test_who_found_a_block_asks_the_index_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rig.tier.directory._overlay and not rig.tier.directory._tombstones
    rig.maintain()
    found = rig.policy.get(KEY)
    assert found is not None
    monkeypatch.setattr(rig.tier.index, "value_of", pytest.fail)
    assert rig.policy.get(KEY) is found
    assert entry_slot(rig) == found.block_id


def test_the_next_step_asks_anew(rig: Rig) -> None:
    assert rig.policy.get(KEY) is not None
    raw = rig.tier.index.entry(KEY)
    assert raw is not None
    rig.tier.index.take_away(rig.tier.index.epoch, [(KEY, raw.pack(KEY))])
    rig.maintain()
    assert rig.policy.get(KEY) is None
    assert rig.tier.directory.values_of([KEY]) == [None]


def test_what_left_is_not_found(rig: Rig) -> None:
    assert rig.policy.get(KEY) is not None
    rig.drop(KEY)
    assert rig.policy.get(KEY) is None


def test_what_was_stored_anew_is_found_where_it_lies_now(rig: Rig) -> None:
    before = rig.policy.get(KEY)
    assert before is not None
    rig.drop(KEY)
    assert rig.store([key(1), KEY]) == [OK, OK]
    after = rig.policy.get(KEY)
    assert after is not None and after.block_id != before.block_id
    assert entry_slot(rig) == after.block_id
    assert rig.load(KEY) == (OK, content(KEY))


def test_a_reset_forgets_it(rig: Rig) -> None:
    assert rig.policy.get(KEY) is not None
    rig.reset()
    assert rig.policy.get(KEY) is None


def test_what_never_reaches_the_index_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset the index is of the old epoch until the first commit: it may be long till then,
    on a disk that is full."""
    with monkeypatch.context() as full:
        full.setattr(rig.tier.index, "commit", lambda *_: CommitOutcome.NO_SPACE)
        rig.reset()
        for i in range(100):
            outcomes = rig.store([key(j) for j in range(8 * i, 8 * i + 8)])
            assert set(outcomes) == {BlockOutcome.NO_SPACE}
        assert len(rig.tier.directory._to_sweep) <= 2 * REFRESH_EVERY_CHANGES
    assert rig.store([key(5)]) == [OK] and rig.check(key(5))
    rig.check_sums()
