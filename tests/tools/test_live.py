"""Removals and `verify --repair` beside running engines: nobody is disturbed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cache_rig import (
    PER_SEGMENT,
    UsageRig,
    call,
    config_of,
    flip,
    payload_offset,
    record_offset,
    segment,
)
from support.children import Start
from support.nvme_peer import Peer
from support.nvme_rig import config_for, key

from kvcascade.tiers.nvme.index.block_index import BlockIndex, attach_index
from kvcascade.tiers.nvme.offline import maintenance
from kvcascade.tiers.nvme.offline.maintenance import KEYS_BESIDE_ENGINES, Drop, take_entries
from kvcascade.tiers.nvme.offline.reader import read_description
from kvcascade.tools.commands.cache_access import locations, opened
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.verify import verify_blocks as core

SLOTS = 32
ROUNDS = 12
OK = "ok"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Peer]:
    """It has blocks 0 to 31, which is all that there is room for."""
    with Peer(config_of(tmp_path)) as engine:
        engine.store(range(SLOTS))
        yield engine


def folder_of(root: Path) -> Path:
    return locations(root)[0].folders[0]


def gc(root: Path, *numbers: int) -> int:
    """Take single blocks away; returns how many were there."""
    found = read_description(locations(root)[0])
    return sum(take_entries(found, drops_of(root, [number])) for number in numbers)


def drops_of(root: Path, numbers: Iterable[int]) -> list[Drop]:
    """The entries of blocks as they are now."""
    with opened(locations(root)[0]) as cache:
        return [Drop(key(i), raw) for i in numbers if (raw := cache.index.raw(key(i))) is not None]


def closed_and_right(root: Path, expected: Iterable[int]) -> None:
    """Nothing is wrong with what the engines left."""
    answer = call("verify", root, "--json")
    assert answer.code == ExitCode.OK and answer.one["space_adds_up"] is True, answer
    rig = UsageRig(config_of(root))
    assert {i for i in range(1000) if rig.check(key(i))} == set(expected)
    rig.check_sums()
    rig.close()


def test_blocks_leave_and_their_room_is_used_again(tmp_path: Path, engine: Peer) -> None:
    assert gc(tmp_path, 3, 4, 900) == 2
    assert engine.hits(range(SLOTS)) == SLOTS - 2
    engine.ask("check_sums")
    assert set(engine.store([3, 100, 101])) == {OK}
    assert engine.hits([3, 100, 101]) == 3
    assert engine.ask("counters")["corrupt"] == 0
    engine.store(range(200, 200 + SLOTS))
    assert engine.hits(range(200, 200 + SLOTS)) == engine.ask("blocks") == SLOTS
    engine.ask("check_sums")
    engine.ask("close")
    closed_and_right(tmp_path, range(200, 200 + SLOTS))


def test_what_has_not_been_evicted_when_the_engine_ends(tmp_path: Path, engine: Peer) -> None:
    assert gc(tmp_path, 3, 4) == 2
    engine.ask("close")
    closed_and_right(tmp_path, set(range(SLOTS)) - {3, 4})


def test_of_two_engines_and_an_orphan(tmp_path: Path) -> None:
    config = config_for([tmp_path], slots=3 * SLOTS, per_segment=PER_SEGMENT)
    config = replace(config, ready_bytes=1)  # none takes all the room when it opens
    with Peer(config) as first:
        first.store(range(8))
        with Peer(config) as killed:
            killed.store(range(100, 108))
            with Peer(config) as third:
                third.store(range(200, 204))
                killed.kill()
                assert gc(tmp_path, 1, 101, 201) == 3
                everything = [*range(8), *range(100, 108), *range(200, 204)]
                left = len(everything) - 3
                assert first.hits(everything) == third.hits(everything) == left
                first.ask("check_sums")
                third.ask("check_sums")
        assert first.hits(everything) == left
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.OK and answer.one["ok"] == left
    with Peer(config) as again:
        assert again.hits(everything) == left
        again.ask("check_sums")


def test_repair_drops_what_is_damaged(tmp_path: Path, engine: Peer) -> None:
    folder = folder_of(tmp_path)
    flip(segment(folder), payload_offset(2))
    flip(segment(folder), record_offset(5) + 40)
    answer = call("verify", tmp_path, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["is_live"]
    found = {each["hash"]: each["problem"] for each in answer.one["problems"]}
    assert found == {key(2).hex(): "corrupt", key(5).hex(): "record"}
    assert (answer.one["dropped"], answer.one["records_written"]) == (1, 0)
    assert engine.hits(range(SLOTS)) == SLOTS - 1
    assert engine.ask("counters")["corrupt"] == 0, "it never met the damage"
    engine.store(range(100, 100 + SLOTS - 1))
    engine.ask("maintain", 1)
    assert set(engine.store(range(300, 304))) == {OK}
    engine.ask("check_sums")
    engine.ask("close")
    assert call("verify", tmp_path).code == ExitCode.OK


def test_what_is_written_anew_while_it_is_checked_stays(tmp_path: Path, engine: Peer) -> None:
    flip(segment(folder_of(tmp_path)), payload_offset(0))
    flip(segment(folder_of(tmp_path)), payload_offset(1))
    with opened(locations(tmp_path)[0]) as cache:
        report, drops, records = core.verify(cache)
    assert len(drops) == 2
    assert engine.hits([0]) == 0, "the engine meets it first"
    assert engine.store([0]) == [OK]
    core.repair(read_description(locations(tmp_path)[0]), report, drops, records)
    assert report.dropped == 1
    assert engine.hits(range(SLOTS)) == SLOTS - 1
    engine.ask("check_sums")


@pytest.mark.parametrize("seed", range(3))
def test_while_the_engine_stores_and_evicts(tmp_path: Path, engine: Peer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        drops = drops_of(tmp_path, rng.sample(range(2 * SLOTS), 12))
        engine.begin("store", *rng.sample(range(2 * SLOTS), 12))
        taken = take_entries(read_description(locations(tmp_path)[0]), drops)
        assert taken <= len(drops)
        assert set(engine.end()) <= {OK}
        engine.hits(rng.sample(range(2 * SLOTS), 6))
        engine.ask("check_sums")
    counters = engine.ask("counters")  # what it had found before was gone when it was read
    assert counters["corrupt"] == counters["held"] == 0
    engine.ask("close")
    answer = call("verify", tmp_path, "--json")
    assert answer.code == ExitCode.OK and answer.one["space_adds_up"] is True, answer


def test_after_a_reset_there_is_nothing_to_take(tmp_path: Path, engine: Peer) -> None:
    drops = drops_of(tmp_path, range(SLOTS))
    engine.ask("reset")
    engine.store([5])
    assert take_entries(read_description(locations(tmp_path)[0]), drops) == 0
    assert engine.hits([5]) == 1


def test_each_commit_beside_engines_survives_a_loss_of_power(
    tmp_path: Path, engine: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[tuple[bool, bool]] = []

    def attached(path: Path, capacity: int, map_bytes: int, *, is_durable: bool) -> BlockIndex:
        index = attach_index(path, capacity, map_bytes, is_durable=is_durable)
        found = index._env.flags()
        flags.append((found["sync"], found["metasync"]))
        return index

    monkeypatch.setattr(maintenance, "attach_index", attached)
    assert take_entries(read_description(locations(tmp_path)[0]), drops_of(tmp_path, [1])) == 1
    assert flags == [(True, True)]


HALF_WAY = f"""
import sys
from pathlib import Path
from support.nvme_rig import config_for, key
from kvcascade.tiers.nvme.offline.maintenance import Drop, take_entries
from kvcascade.tiers.nvme.offline.reader import read_description
from kvcascade.tools.commands.cache_access import locations, opened

class Interrupted(list):
    def __getitem__(self, part):
        if part.start:
            print("half way", flush=True)
            sys.stdin.read()
        return list.__getitem__(self, part)

(location,) = locations(Path(sys.argv[1]))
with opened(location) as cache:
    drops = [Drop(key(i), cache.index.raw(key(i))) for i in range({PER_SEGMENT})]
filler = [Drop(b"nothing", b"")] * {KEYS_BESIDE_ENGINES}
take_entries(read_description(location), Interrupted(drops[:4] + filler + drops[4:]))
"""


def test_a_command_that_is_killed_half_way(tmp_path: Path, engine: Peer, child: Start) -> None:
    command = child(HALF_WAY, tmp_path)
    assert engine.store([100]) == [OK], "it holds nobody up"
    command.kill()
    command.wait()
    assert engine.hits(range(4)) == 0
    assert engine.hits([*range(4, SLOTS), 100]) == SLOTS - 4 + 1
    assert gc(tmp_path, 4) == 1, "the next one begins as if nothing had been"
    engine.store(range(200, 200 + SLOTS))
    engine.ask("check_sums")
    engine.ask("close")
    closed_and_right(tmp_path, range(200, 200 + SLOTS))


def test_a_guest_leaves_nothing_and_takes_no_engines_place(tmp_path: Path, engine: Peer) -> None:
    folder = folder_of(tmp_path)
    drops = drops_of(tmp_path, [1])

    class Looking(list[Drop]):
        def __getitem__(self, part: object) -> list[Drop]:  # type: ignore[override]
            with Peer(config_of(tmp_path)):
                return drops

    assert take_entries(read_description(locations(tmp_path)[0]), Looking(drops)) == 1
    assert sorted(path.name for path in (folder / "state").iterdir()) == ["0", "1", "epoch.arr"]
