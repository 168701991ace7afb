"""Blocks between two NVMe tiers: verified on the way, failures are outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.executors import InlineExecutor, SteppingExecutor
from support.nvme_rig import Rig, config_for, key

from kvcascade.handlers.node.nvme_jobs import QueueOptions
from kvcascade.handlers.node.nvme_pair import NvmePairHandler
from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus

HASHES = [key(i) for i in range(5)]


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[tuple[Rig, Rig]]:
    folders = [tmp_path / "upper", tmp_path / "lower"]
    for folder in folders:
        folder.mkdir()
    upper, lower = (Rig(config_for([folder], slots=16)) for folder in folders)
    upper.store(HASHES)
    yield upper, lower
    upper.close()
    lower.close()


def begin(handler: NvmePairHandler, upper: Rig, lower: Rig, job_id: int = 1) -> list[BlockStatus]:
    sources: list[BlockStatus] = []
    for block_hash in HASHES:
        status = upper.policy.get(block_hash)
        assert status is not None
        status.ref_cnt += 1
        sources.append(status)
    targets = lower.begin_store(HASHES)
    spec = (
        upper.backend.get_load_store_spec(HASHES, sources),
        lower.backend.get_load_store_spec(HASHES, targets),
    )
    assert handler.transfer_async(job_id, spec)
    return targets


def land(lower: Rig, targets: list[BlockStatus], outcomes: list[BlockOutcome]) -> None:
    for block_hash, status, outcome in zip(HASHES, targets, outcomes, strict=True):
        if outcome is BlockOutcome.OK:
            status.ref_cnt = 0
        else:
            lower.drop(block_hash)


def test_blocks_arrive_verified(rigs: tuple[Rig, Rig]) -> None:
    upper, lower = rigs
    handler = NvmePairHandler(upper.tier.store, lower.tier.store, InlineExecutor())
    targets = begin(handler, upper, lower)
    (result,) = handler.get_finished()
    assert result.success and result.job_id == 1
    assert result.size_bytes == 5 * upper.tier.store.block_bytes
    land(lower, targets, [BlockOutcome.OK] * 5)
    assert all(lower.check(block_hash) for block_hash in HASHES)
    assert handler.get_finished() == []


def test_damage_does_not_travel(rigs: tuple[Rig, Rig]) -> None:
    upper, lower = rigs
    victim = upper.policy.get(HASHES[2])
    assert victim is not None
    slot = victim.block_id
    segment = next((upper.config.paths[0]).glob("*/segments/*.safetensors"))
    layout_start = 4096 + slot * 4096
    with segment.open("r+b") as file:
        file.seek(layout_start + 100)
        file.write(b"\x55" * 64)
    handler = NvmePairHandler(upper.tier.store, lower.tier.store, InlineExecutor())
    targets = begin(handler, upper, lower)
    (result,) = handler.get_finished()
    assert not result.success
    expected = [BlockOutcome.OK] * 5
    expected[2] = BlockOutcome.CORRUPT
    assert list(result.outcomes) == expected
    land(lower, targets, expected)
    assert [lower.check(h) for h in HASHES] == [True, True, False, True, True]
    lower.check_sums()


def test_shutdown_cancels_what_has_not_begun(rigs: tuple[Rig, Rig]) -> None:
    upper, lower = rigs
    executor = SteppingExecutor()
    handler = NvmePairHandler(upper.tier.store, lower.tier.store, executor)
    targets = begin(handler, upper, lower)
    handler.shutdown(0.0)
    (result,) = handler.get_finished()
    assert set(result.outcomes) == {BlockOutcome.CANCELLED}
    land(lower, targets, list(result.outcomes))
    lower.check_sums()
    assert not handler.transfer_async(2, (_empty(upper), _empty(lower)))


def test_the_queue_is_bounded(rigs: tuple[Rig, Rig]) -> None:
    upper, lower = rigs
    executor = SteppingExecutor()
    options = QueueOptions(max_jobs=1)
    handler = NvmePairHandler(upper.tier.store, lower.tier.store, executor, options)
    targets = begin(handler, upper, lower)
    assert not handler.transfer_async(2, (_empty(upper), _empty(lower)))
    executor.run_all()
    assert [result.job_id for result in handler.get_finished()] == [1]
    handler.wait({1, 99})
    land(lower, targets, [BlockOutcome.OK] * 5)
    assert handler.transfer_async(3, (_empty(upper), _empty(lower)))


def _empty(rig: Rig):  # type: ignore[no-untyped-def]
    none: list[BlockHash] = []
    return rig.backend.get_load_store_spec(none, [])
