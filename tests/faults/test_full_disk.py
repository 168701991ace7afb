"""A disk, or an index, that is really full: LMDB and the file system say so themselves.

The tier takes no writes then, serves what it holds, and takes writes again by itself as soon as
there is room; several processes share what there is and never go beyond it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.executors import SteppingExecutor
from support.fault_rig import STEPS_MAX, FaultRig
from support.keys import keys
from support.nvme_peer import Peer
from support.nvme_rig import config_for
from support.small_disk import Filler, free_bytes, on_small_disk

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.index.index_port import CommitOutcome, Removal
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.segments.format import IndexEntry
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.nvme.writer.capacity import index_bytes
from kvcascade.tiers.nvme.writer.growth import RECHECK_S, RETRY_AFTER_S

SECOND_S = 1.0
OK, NO_SPACE = BlockOutcome.OK.value, BlockOutcome.NO_SPACE.value
FOREIGN = IndexEntry(1 << 30, 1, 1, 1)
SHARED_SLOTS = 1024
DISK_OF_TWO_BYTES = 11 << 20
"""Room for the indexes of two models with so many slots each, the reserve, and a few segments."""
SPARE_BYTES = 256 << 10
"""Not enough for one more segment and what comes with it."""
MANY_SLOTS = 2048
"""So many that their entries need pages which the index does not have yet."""


def stores_go_on(rig: FaultRig, first: int, batches: int = 10) -> None:
    """The engine stores, whatever becomes of it below; one second each."""
    for i in range(first, first + 8 * batches, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.clock.advance(SECOND_S)


# ---- LMDB's map ------------------------------------------------------------------------------


def fill_the_map(rig: FaultRig, added: list[BlockHash]) -> None:
    """Put foreign entries into the index until LMDB has no room; `added` gets the keys."""
    index, epoch = rig.rig.tier.index, rig.rig.tier.directory.epoch
    for size in (40_000, 1000, 10, 1):
        for _ in range(STEPS_MAX):
            first = len(added)
            names = [BlockHash(i.to_bytes(4, "big") * 120) for i in range(first, first + size)]
            outcome = index.commit(epoch, (), [(name, FOREIGN) for name in names])
            if outcome is not CommitOutcome.DONE:
                assert outcome is CommitOutcome.NO_PAGES
                break
            added += names


def empty_the_map(rig: FaultRig, added: list[BlockHash]) -> None:
    """Take them out again; a few at first, for that needs pages, too."""
    index, epoch = rig.rig.tier.index, rig.rig.tier.directory.epoch
    start = 0
    while start < len(added):
        part = added[start : start + max(1, start)]
        removals = [Removal(name, FOREIGN.slot, FOREIGN.generation) for name in part]
        assert index.commit(epoch, removals) is CommitOutcome.DONE
        start += len(part)


def test_a_full_map_takes_no_more_blocks_until_there_is_room(tmp_path: Path) -> None:
    """They are dropped, and counted; the tier is not given up, for pages may come back any time."""
    rig = FaultRig(tmp_path)
    rig.rig.tier.index.pause = rig.clock.advance
    rig.on_disk(keys(0, 8))
    added: list[BlockHash] = []
    for i in range(100, 180, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        fill_the_map(rig, added)  # pages that nobody reads any more are used again
        assert rig.write_down(), "nothing is kept to be tried again"
        rig.clock.advance(SECOND_S)
    assert added
    counters = rig.counters
    assert counters.demote_no_space_blocks == rig.rig.tier.store.counters.refused > 0
    assert counters.demote_openings == 0 and counters.demote_failed_blocks == 0
    assert rig.read(keys(0, 8)) == 8
    empty_the_map(rig, added)
    rig.recovers(300)
    assert rig.read(keys(0, 8)) == 8
    rig.close()


def test_a_flush_keeps_nobodys_pages_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that end together would keep one another from committing what they wait for."""
    executor = SteppingExecutor()
    rig = FaultRig(tmp_path, executor)
    executor.run_all()
    assert rig.store(keys(0, 8)) == keys(0, 8)
    was_released: list[bool] = []

    def wait(*_: object) -> None:
        was_released.append(rig.rig.tier.directory._is_released)
        executor.run_all()

    def note(*_: object) -> bool:
        was_released.append(rig.rig.tier.directory._is_released)
        return True

    monkeypatch.setattr(rig.down, "wait", wait)
    assert rig.write_down()
    assert was_released == [True] and rig.counters.demoted_blocks == 8
    monkeypatch.setattr(rig.down, "shutdown", note)
    monkeypatch.setattr(rig.rig.tier.arrays, "sync", note)
    rig.close()
    assert was_released == [True] * 3, "nor while it closes"


# ---- the disk under the index ----------------------------------------------------------------


def full_under_the_index(path: Path) -> None:
    """Payload has its space from the start; LMDB asks for a page, and the disk has none."""
    rig = FaultRig(path, nvme_slots=MANY_SLOTS)
    rig.on_disk(keys(0, 8))
    filler = Filler(path)
    assert free_bytes(path) == 0
    stores_go_on(rig, 1000, batches=100)
    counters = rig.counters
    assert counters.demote_no_space_blocks > 0 and counters.demote_openings > 0
    assert counters.demote_failed_blocks == 0
    assert free_bytes(path) == 0
    rig.forget_top()
    assert rig.read(keys(0, 8)) == 8, "what is there is served"
    filler.remove()
    rig.recovers(3000)
    openings = counters.demote_openings
    stores_go_on(rig, 4000, batches=50)
    assert counters.demote_openings == openings
    rig.close()


def test_the_disk_is_full_when_the_index_commits(tmp_path: Path) -> None:
    on_small_disk(full_under_the_index, tmp_path)


# ---- several processes -----------------------------------------------------------------------


def shared_config(path: Path, model: int = 0, min_free_bytes: int = 0) -> NvmeTierConfig:
    """Room for more than the disk has, taken bit by bit."""
    base = config_for([path], slots=SHARED_SLOTS)
    key = NamespaceKey(f"model-{model}", {"n": model})
    return replace(base, ready_bytes=1, key=key, min_free_bytes=min_free_bytes)


def full_for_all(path: Path) -> None:
    """Two processes and a stranger: they serve what they have, and grow again when he is gone."""
    with Peer(shared_config(path)) as one, Peer(shared_config(path)) as two:
        peers = (one, two)
        assert set(one.store(range(32))) == set(two.store(range(100, 132))) == {OK}
        filler = Filler(path)
        for round_ in range(20):
            for i, peer in enumerate(peers):
                first = 1000 + 1000 * i + 16 * round_
                assert set(peer.store(range(first, first + 16))) <= {OK, NO_SPACE}
                peer.maintain(int(RECHECK_S))
        assert free_bytes(path) == 0
        assert one.hits(range(1000, 4000)) == two.hits(range(1000, 4000)) > 0
        held = sum(len(peer.ask("own")) for peer in peers)
        filler.remove()
        for round_ in range(20):
            for i, peer in enumerate(peers):
                peer.maintain(int(RETRY_AFTER_S))
                first = 5000 + 1000 * i + 16 * round_
                assert set(peer.store(range(first, first + 16))) == {OK}
        assert sum(len(peer.ask("own")) for peer in peers) > held, "and they grow"
        for peer in peers:
            peer.ask("check_sums")


def test_a_full_disk_is_survived_by_all_who_share_it(tmp_path: Path) -> None:
    on_small_disk(full_for_all, tmp_path)


def reserve_is_kept(path: Path) -> None:
    """Three processes of two models write for ever: whenever one looks, the reserve is there."""
    reserve = free_bytes(path) // 4
    with Peer(shared_config(path, model=9)) as old:
        assert set(old.store(range(64))) == {OK}
    assert list(path.glob("model-9*"))
    configs = [shared_config(path, model, reserve) for model in (0, 1, 0)]
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(config)) for config in configs]
        for number, peer in enumerate(peers):
            peer.begin("write_for_ever", 1000 * number, 900)
        least = free_bytes(path)
        for _ in range(150):
            for peer in peers:
                peer.end()
            least = min(least, free_bytes(path))
        for peer in peers:
            peer.kill()
    assert least >= reserve, "index growth included"
    indexes = 2 * index_bytes(SHARED_SLOTS)
    assert least < reserve + indexes + SPARE_BYTES, "and what is not reserved is used"
    assert not list(path.glob("model-9*")), "what nobody has open left first"
    assert len(list(path.glob("model-*"))) == 2, "what somebody has open did not"
    with Peer(configs[0]) as peer:
        peer.ask("check_sums")


def test_the_reserve_is_kept_by_all_together(tmp_path: Path) -> None:
    on_small_disk(reserve_is_kept, tmp_path, DISK_OF_TWO_BYTES)
