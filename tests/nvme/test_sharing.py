"""Several processes with one NVMe tier: what one stores another finds, and nothing is mixed up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.keys import key, keys
from support.nvme_peer import Peer, PeerFailed
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.segments.format import PAGE_BYTES
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.nvme.writer import capacity
from kvcascade.tiers.nvme.writer.growth import BALANCE_EVERY_S, RECHECK_S
from kvcascade.tiers.nvme.writer.moved import BATCH_BLOCKS

SLOTS, PER_SEGMENT = 64, 8
COMMITS = 200
OK, HELD, GONE = BlockOutcome.OK, BlockOutcome.HELD, BlockOutcome.GONE
STEP_S = int(max(BALANCE_EVERY_S, RECHECK_S))


@pytest.fixture
def config(tmp_path: Path) -> NvmeTierConfig:
    """No process takes everything at once when it opens."""
    config = config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT)
    return replace(config, ready_bytes=1)


@pytest.fixture
def rig(config: NvmeTierConfig) -> Iterator[Rig]:
    rig = Rig(config)
    yield rig
    rig.close()


def step(rig: Rig, seconds: float = 0.0) -> bool:
    """The end of a step, so much later."""
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(seconds)
    return rig.maintain()


def index_bytes(rig: Rig) -> int:
    return (rig.tier.namespace.index_folder / "data.mdb").stat().st_size


def test_each_finds_what_the_other_stores(rig: Rig) -> None:
    rig.store(keys(8))
    with Peer(rig.config) as other:
        assert other.hits(range(8)) == 8
        assert set(other.store(range(100, 108))) == {OK.value}
        step(rig)
        assert all(rig.check(h) for h in keys(100, 108))
        assert len(rig.policy) == 8, "what lies in its own segments is what may be evicted"
        assert other.ask("blocks") == 8
        assert set(other.ask("own")).isdisjoint(rig.tier.namespace.owners.segments)
        assert other.store(range(8)) == [], "what is there already is not stored again"
        rig.check_sums()
        other.ask("check_sums")


def test_the_first_of_two_that_store_the_same_block_wins(rig: Rig) -> None:
    with Peer(rig.config) as other:
        other.ask("begin_store", 5)
        assert rig.store([key(5)]) == [OK]
        assert other.ask("end_store") == HELD.value
        other.ask("check_sums")
        assert other.hits([5]) == 1 and other.ask("blocks") == 0
        assert other.ask("counters")["held"] == 1
    assert rig.check(key(5))


def test_a_block_that_is_overwritten_before_it_is_read_is_gone(rig: Rig) -> None:
    """Its entry was read at lookup, and its slot used again since: a miss, not damage."""
    size = rig.tier.segments.layout.slots
    rig.store_bit_by_bit(keys(size))
    with Peer(rig.config) as other:
        other.ask("find", 0)
        evicted = rig.policy.evict(size, ())
        assert evicted is not None
        for _, status in evicted:
            rig.backend.free(status)
        rig.store(keys(500, 500 + size))
        assert other.ask("read_found") == GONE.value
        assert other.ask("counters") == {"held": 0, "corrupt": 0, "gone": 1}
        assert other.hits(range(500, 500 + size)) == size


def test_damage_is_found_by_whoever_reads_and_the_block_is_stored_anew(rig: Rig) -> None:
    rig.store(keys(4))
    rig.tier.directory.refresh()
    layout = rig.tier.segments.layout
    with rig.tier.segments.path_of(0).open("r+b") as file:
        file.seek(layout.header_bytes)
        file.write(b"damaged" * 100)
    with Peer(rig.config) as other:
        assert other.hits(range(4)) == 3
        assert other.ask("counters")["corrupt"] == 1
        assert other.store([0]) == [OK.value]
        step(rig)
        assert all(rig.check(h) for h in keys(4)), "one of them is the other process's now"
        # The slot that lost its block is found when it shall be evicted, and used again.
        assert len(rig.policy) == len(rig.policy.coldest(4)) == 4
        evicted = rig.policy.evict(4, ())
        assert evicted is not None
        for _, status in evicted:
            rig.backend.free(status)
        assert rig.backend.get_num_free_blocks() == rig.backend.available
        assert set(rig.store(keys(50, 58))) == {OK}
        rig.check_sums()


def test_a_reset_is_everybodys(rig: Rig) -> None:
    rig.store(keys(4))
    with Peer(rig.config) as other:
        other.store(range(100, 104))
        other.ask("begin_store", 200)
        rig.reset()
        assert other.maintain() is True and other.maintain() is False
        assert other.hits([*range(4), *range(100, 104)]) == 0
        assert not any(rig.check(h) for h in [*keys(4), *keys(100, 104)])
        assert other.ask("end_store") != OK.value, "what was begun before does not cross"
        other.store([7])
        step(rig)
        assert rig.check(key(7))
        other.ask("reset")
        assert step(rig) and not rig.check(key(7))
        rig.check_sums()
    with Peer(rig.config) as other:
        assert other.hits([*range(8), *range(100, 104), 200]) == 0


def test_who_does_not_know_of_a_reset_yet_searches_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot's block can be told then, and each that is asked for costs a look at the index."""
    rig.store_bit_by_bit(keys(SLOTS // 2))
    rig.tier.directory.refresh()
    looks = 0
    refresh = rig.tier.index.refresh

    def noted() -> None:
        nonlocal looks
        looks += 1
        refresh()

    with Peer(rig.config) as other:
        other.ask("reset")
        other.store([7])
        rig.tier.directory.release()
        monkeypatch.setattr(rig.tier.index, "refresh", noted)
        assert rig.policy.evict(4, ()) is None and rig.policy.coldest(4) == []
        assert looks == 2
        assert step(rig)
        rig.store(keys(8))
        rig.tier.directory.refresh()
        assert len(rig.policy.coldest(8)) == 7, "one of them is the other's"
        rig.check_sums()


def test_a_store_of_one_who_does_not_know_of_a_reset_yet(rig: Rig) -> None:
    with Peer(rig.config) as other:
        rig.reset()
        assert other.store([1]) == [GONE.value]
        assert not rig.check(key(1))
        other.maintain()
        assert other.store([1]) == [OK.value]
        step(rig)
        assert rig.check(key(1))


def test_one_is_killed_while_it_writes(rig: Rig) -> None:
    """The other goes on; a third takes the dead one's segments, and all that is read is right."""
    rig.store_bit_by_bit(keys(20))
    own = set(rig.tier.namespace.owners.segments)
    step(rig)
    with Peer(rig.config) as other:
        other.begin("write_for_ever", 1000, 60)
        for _ in range(25):
            other.end()
        other.kill()
    step(rig)
    assert all(rig.check(h) for h in keys(20))
    assert set(rig.store(keys(30, 34))) == {OK}
    orphans = sum(rig.check(h) for h in keys(1000, 1060))
    assert orphans > 0, "its blocks can still be read"
    step(rig)
    with Peer(rig.config) as third:
        assert third.opened["clean"] is False
        assert third.ask("blocks") > 0 and own.isdisjoint(third.ask("own"))
        third.ask("check_sums")
        assert third.hits(range(1000, 1060)) == orphans
        third.store(range(2000, 2030))
        third.ask("check_sums")
    assert rig.tier.store.counters.corrupt == 0
    rig.check_sums()


def test_who_starts_again_finds_its_own(config: NvmeTierConfig) -> None:
    """Two come back after a clean end, in either order: nothing is scanned, recency is kept."""
    with Peer(config) as first, Peer(config) as second:
        first.store(range(12))
        second.store(range(100, 112))
        owned = [first.ask("own"), second.ask("own")]
    with Peer(config) as first, Peer(config) as second:
        assert first.opened == {"clean": True, "blocks": 24}
        assert second.opened["clean"] is True
        assert [first.ask("own"), second.ask("own")] == owned
        assert first.ask("blocks") == second.ask("blocks") == 12
        assert second.ask("coldest", 5) == [103, 102, 101, 100, 107], "four at a time"
        assert first.hits([*range(12), *range(100, 112)]) == 24


def test_orphans_are_adopted_as_the_coldest(config: NvmeTierConfig) -> None:
    with Peer(config) as first, Peer(config) as second:
        second.store(range(100, 100 + SLOTS // 2))
        first.store(range(8))
        second.kill()
    rig = Rig(config)
    for start in range(200, 200 + SLOTS, 4):
        step(rig, STEP_S)
        rig.policy.touch(reversed(keys(8)))
        rig.store(keys(start, start + 4))
    assert rig.backend.available == SLOTS
    assert all(rig.check(h) for h in keys(8)), "its own are warmer than what it adopted"
    assert not any(rig.check(h) for h in keys(100, 100 + SLOTS // 2))
    rig.check_sums()
    rig.close()


def test_a_starved_process_gets_its_share(rig: Rig) -> None:
    """One has everything; another comes, and no block is lost by the handing over."""
    for start in range(0, SLOTS, 8):
        rig.store(keys(start, start + 8))
        step(rig, STEP_S)
    assert rig.backend.available == SLOTS
    rig.policy.touch(reversed(keys(16)))
    with Peer(rig.config) as other:
        assert other.ask("own") == []
        for _ in range(2 * SLOTS // PER_SEGMENT):
            other.maintain(STEP_S)
            step(rig, STEP_S)
            rig.backend.get_num_free_blocks()  # it wants more, too
            other.ask("own")
        assert len(other.ask("own")) == rig.backend.available // PER_SEGMENT == 4
        other.maintain()
        assert sum(rig.check(h) for h in keys(SLOTS)) == SLOTS
        assert other.ask("blocks") == 32 and other.hits(range(SLOTS)) == SLOTS
        assert {h for h, _ in rig.policy.coldest(SLOTS)} > set(keys(16)), "the coldest went"
        step(rig)
        assert set(other.store(range(300, 330))) == {OK.value}
        other.ask("check_sums")
        rig.check_sums()
        assert set(rig.store_bit_by_bit(keys(400, 430))) == {OK}
        assert all(rig.check(h) for h in keys(300, 330))


def moved(rig: Rig) -> tuple[set[BlockHash], set[BlockHash]]:
    """Names of what came and went, as the manager takes them."""
    came: set[BlockHash] = set()
    left: set[BlockHash] = set()
    while (batch := rig.backend.take_moved()) is not None:
        assert len(batch.block_hashes) <= BATCH_BLOCKS
        (left if batch.removed else came).update(batch.block_hashes)
    return came, left


def test_what_a_reset_took_is_named_after_it(rig: Rig) -> None:
    assert moved(rig) == (set(), set())
    rig.store_bit_by_bit(keys(6))
    with Peer(rig.config) as other:
        other.store(range(100, 104))
        other.ask("reset")
        assert step(rig)
        other.store([7])
        rig.store([key(50)])  # into one of the slots: its old name is lost
        came, left = moved(rig)
        assert came == set()
        assert left - {key(50)} < set(keys(6)) and len(left) >= 5
        assert moved(rig) == (set(), set()), "each once"
        other.ask("reset")
        assert step(rig)
        assert moved(rig)[1] >= {key(50)}


def test_what_changes_hands_is_named_by_both(rig: Rig) -> None:
    moved(rig)
    for start in range(0, SLOTS, 8):
        rig.store(keys(start, start + 8))
        step(rig, STEP_S)
    with Peer(rig.config) as other:
        while len(other.ask("own")) < 2:
            other.maintain(STEP_S)
            step(rig, STEP_S)
        came, left = moved(rig)
        assert came == set()
        assert left == {h for h in keys(SLOTS) if not rig.policy.owns(h)}
        assert len(left) >= 2 * PER_SEGMENT and all(rig.check(h) for h in left)
        own = other.ask("own")
        other.kill()
    for _ in range(SLOTS):
        step(rig, STEP_S)
        rig.backend.get_num_free_blocks()
    assert rig.backend.available == SLOTS and len(own) >= 2
    assert moved(rig)[0] == left


def test_one_that_has_nothing_to_do_holds_no_pages_of_the_index(rig: Rig) -> None:
    """From its start: a held page is not used again, and the index may only become so large."""
    with Peer(rig.config) as other:
        other.maintain()
        size_bytes = index_bytes(rig)
        for round_number in range(COMMITS):
            rig.store([key(round_number)])
            step(rig)
        assert index_bytes(rig) < size_bytes + COMMITS * PAGE_BYTES
        assert other.hits([COMMITS - 1]) == 1


def test_who_hands_a_segment_over_sees_what_comes_into_it_at_once(rig: Rig) -> None:
    """An idle engine: nothing of the index is held from one look around to the next question."""
    for start in range(0, SLOTS, 8):
        rig.store(keys(start, start + 8))
        step(rig, STEP_S)
    with Peer(rig.config) as other:
        for _ in range(SLOTS):
            if rig.backend.available < SLOTS:
                break
            assert other.ask("own") == []  # it wants some
            other.maintain(STEP_S)
            step(rig, STEP_S)
        other.maintain(STEP_S)
        assert other.ask("own"), "nothing happened here since"
        other.maintain()
        assert set(other.store(range(300, 304))) == {OK.value}
        assert all(rig.check(h) for h in keys(300, 304))


def test_nothing_is_named_for_nobody(rig: Rig) -> None:
    rig.store(keys(6))
    with Peer(rig.config) as other:
        other.ask("reset")
        assert step(rig)
    assert moved(rig) == (set(), set())


@pytest.mark.parametrize("policy", ["arc", "fifo", "lirs", "s3fifo", "sieve", "slru"])
def test_segments_change_hands_under_every_policy(config: NvmeTierConfig, policy: str) -> None:
    rig = Rig(config, policy=policy)
    for start in range(0, SLOTS, 8):
        rig.store(keys(start, start + 8))
        step(rig, STEP_S)
    rig.policy.touch(keys(8))
    with Peer(config, policy) as other:
        for _ in range(SLOTS // PER_SEGMENT):
            other.maintain(STEP_S)
            step(rig, STEP_S)
            other.ask("own")
        other.maintain()
        for start in range(300, 500, 10):
            assert set(other.store(range(start, start + 10))) <= {OK.value}
            rig.store(keys(start + 300, start + 310))
            other.maintain(STEP_S)
            step(rig, STEP_S)
        assert len(other.ask("own")) == 4
        other.ask("check_sums")
        rig.check_sums()
    rig.close()


def used_bytes(path: Path) -> int:
    """What a watcher sees; files may vanish while it looks."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.lstat().st_blocks * 512 if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize("models", [1, 2])
def test_the_capacity_holds_for_all_together(tmp_path: Path, models: int) -> None:
    """Processes of one model, or of two, grow at once; whenever one looks, it is not too much."""
    base = config_for([tmp_path], slots=models * 3 * SLOTS, per_segment=PER_SEGMENT)
    set_aside = models * capacity.index_bytes(models * 3 * SLOTS)
    roomy = base.capacity_bytes + set_aside * (models - 1) // models
    base = replace(base, ready_bytes=1, capacity_bytes=roomy)
    configs = [replace(base, key=NamespaceKey(f"model-{i}", {"n": i})) for i in range(models)]
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(configs[i % models])) for i in range(3)]
        for peer in peers:
            peer.begin("write_for_ever", 1000 * peers.index(peer), 300)
        for _ in range(60):
            for peer in peers:
                peer.end()
            assert used_bytes(tmp_path) <= base.capacity_bytes
        for peer in peers:
            peer.kill()
    assert used_bytes(tmp_path) + set_aside > base.capacity_bytes * 3 // 4
    with Peer(configs[0]) as peer:
        peer.ask("check_sums")


def test_no_more_processes_than_there_are_state_numbers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = rig.tier.namespace.owners
    for number in range(1, 64):
        assert owners._locks.try_lock(64 + number)
    with pytest.raises(PeerFailed, match="64 processes"):
        Peer(rig.config)
    for number in range(1, 64):
        owners._locks.unlock(64 + number)
    Peer(rig.config).__exit__()
