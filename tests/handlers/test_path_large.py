"""A writer of many blocks is killed under load: reads go on, and writes resume within seconds."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest
from support.keys import key
from support.path_engine import PathEngine
from support.writer_twin import namespace_spec

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.manager.below.port import Put
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.block_table import Changes
from kvcascade.tiers.nvme.path.lmdb_block_table import open_block_table
from kvcascade.tiers.nvme.path.path_messages import Committed, PathOptions
from kvcascade.tiers.nvme.path.presence_file import boot_id
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import key_of, make_home
from kvcascade.tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

BLOCK, SEGMENTS = 4096, 8
BATCH = 16_384
RESUME_LIMIT_S = 5.0
"""Holds where nothing else runs: `make soak`. Elsewhere it is only printed."""
GIVEN_UP_S = 120.0
SOAK = [pytest.mark.slow, pytest.mark.timeout(600)]
OK = BlockOutcome.OK
FAR, SLOTS_OF_READS = 1000, 32
KNOWN = range(32)
"""Blocks that are really stored; all others are in the index only."""


def options_for(entries: int) -> PathOptions:
    """Options of a path with room for so many blocks, and a segment more."""
    per_segment = entries // SEGMENTS
    capacity = capacity_of(SEGMENTS + 1, per_segment, BLOCK)
    return PathOptions(capacity, segment_bytes=per_segment * BLOCK)


def fill_index(root: Path, entries: int) -> None:
    """Make a closed path whose index names so many blocks, and segments without contents."""
    options, fs = options_for(entries), RealFileSystem()
    spec = namespace_spec(BLOCK)
    name = key_of(spec).directory_name
    home = make_home(fs, [root], name, spec, options)
    for number in range(SEGMENTS):
        home.segments.create([number])
    table = StartMeans(fs, time.time, open_block_table, boot_id()).table_of(home, is_durable=False)
    slots = list(range(entries))
    random.Random(1).shuffle(slots)
    for first in range(0, entries, BATCH):
        some = range(first, min(first + BATCH, entries))
        puts = [(bytes(key(1 << 24 | number)), slots[number], number) for number in some]
        assert table.apply(Changes(0, puts)).outcome is Committed.OK
    table.close()
    home.close()


def resume_s(leader: PathEngine, other: PathEngine, new: range) -> float:
    """Kill the writer beside reads and a write; the seconds until another has stored a block."""
    under_way = range(new.start + FAR, new.stop + FAR)
    assert other.begin_put(under_way, SLOTS_OF_READS) == [Put.STARTED] * len(under_way)
    leader.kill()
    killed_s = monotonic()
    rng, longest_s = random.Random(2), 0.0
    while True:
        begin_s = monotonic()
        assert begin_s < killed_s + GIVEN_UP_S
        some = rng.sample(KNOWN, 8)
        assert other.holds(some) == some and list(other.get(some)) == [OK] * 8, "reads go on"
        longest_s = max(longest_s, monotonic() - begin_s)
        other.tier.maintain()
        if other.tier.takes_puts and OK in other.put(list(new)):
            took_s = monotonic() - killed_s
            print(f"writes resume after {took_s:.2f} s; a read took {longest_s:.2f} s at most")
            assert {*other.get(under_way)} <= {OK, BlockOutcome.GONE}, "and no wrong byte"
            return took_s


@pytest.mark.parametrize(
    ("entries", "limit_s"),
    [
        pytest.param(40_000, GIVEN_UP_S, id="40 thousand"),
        pytest.param(1_000_000, RESUME_LIMIT_S, id="a million", marks=SOAK),
    ],
)
def test_a_killed_writer_of_many_blocks(tmp_path: Path, entries: int, limit_s: float) -> None:
    fill_index(tmp_path, entries)
    options = options_for(entries)
    with ExitStack() as stack:
        pair = []
        for name in ("one", "two", "three"):
            engine = PathEngine([tmp_path], options, name=name, capacity=entries)
            stack.callback(engine.close)
            pair.append(engine.open())
        pair[0].store(KNOWN)
        for round_number in range(3):
            leader = next(each for each in pair if each.state is NodeState.LEADING)
            others = [each for each in pair if each is not leader]
            new = range(1000 + 8 * round_number, 1008 + 8 * round_number)
            assert resume_s(leader, others[0], new) < limit_s
            leader.until(lambda e=leader: e.state is not NodeState.LEADING)  # type: ignore[misc]
            for each in pair:
                each.until(lambda each=each: each.tier.takes_puts)  # type: ignore[misc]
                assert list(each.get(KNOWN)) == [OK] * len(KNOWN)
                assert each.tier.feed.figures is not None
        assert pair[0].tier.feed.figures.blocks >= entries  # type: ignore[union-attr]


def test_a_stopped_writer_keeps_its_lock_and_its_late_messages_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_for(64)
    with ExitStack() as stack:
        one = PathEngine([tmp_path], options, name="one", capacity=64)
        two = PathEngine([tmp_path], options, name="two", capacity=64, is_thread=True)
        for engine in (one, two):
            stack.callback(engine.close)
            engine.open()
        one.store(range(8))
        note = (tmp_path / ".kvcascade" / "writer.json").read_bytes()
        one.signal(signal.SIGSTOP)
        monkeypatch.setattr("kvcascade.handlers.node.path.path_node.SILENCE_LIMIT_S", 0.3)
        try:
            assert list(two.put([9])) == [BlockOutcome.CANCELLED]
            two.until(lambda: two.state is NodeState.SILENT)
            end_s = monotonic() + 2.0
            while monotonic() < end_s:
                assert list(two.get(range(8))) == [OK] * 8, "reads go on"
                assert two.put([10]) == [] and two.state is NodeState.SILENT
            silent = [r.getMessage() for r in caplog.records if "does not answer" in r.getMessage()]
            assert len(silent) == 1 and "inspect" in silent[0]
            assert (tmp_path / ".kvcascade" / "writer.json").read_bytes() == note, "no election"
        finally:
            one.signal(signal.SIGCONT)
        two.until(lambda: two.tier.takes_puts)
        assert two.state is NodeState.FOLLOWING
        two.store(range(9, 20))
        assert list(one.get(range(20))) == [*[OK] * 8, BlockOutcome.GONE, *[OK] * 11]
