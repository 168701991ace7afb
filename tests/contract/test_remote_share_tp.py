"""`share_tp`: engines of other tensor-parallel sizes share blocks that all ranks hold alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.keys import keys
from support.kv_bytes import Shape, offloading_config
from support.remote_rig import PAYLOAD_BYTES, content
from support.remote_tier_rig import RemoteTierRig

from kvcascade.assembly.node_parts import EngineFacts, Replicas, SlotMemory
from kvcascade.assembly.remote_parts import remote_setup
from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.errors import ConfigError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.namespace import NamespaceKey

BLOCKS = 3
SHARING = parse_remote(At("tiers[1]"), {"url": "valkey://127.0.0.1", "share_tp": True})
ALONE = parse_remote(At("tiers[1]"), {"url": "valkey://127.0.0.1"})
OF_RANKS = {"parallel": "replicated", "row_layout": ""}


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (8, 2)])
def test_every_rank_gets_the_bytes_of_the_first(writers: int, readers: int) -> None:
    writer = RemoteTierRig(ranks=writers)
    reader = RemoteTierRig(writer.twin, writer.clock, ranks=readers)
    for rig in (writer, reader):
        rig.pump()
    for slot, block_hash in enumerate(keys(BLOCKS)):
        writer.arena.view(slot)[:] = content(block_hash, PAYLOAD_BYTES) * writers
    writer.tier.put(1, keys(BLOCKS), range(BLOCKS))
    writer.pump()
    reader.tier.get(1, 1, keys(BLOCKS), range(BLOCKS))
    reader.pump()
    (ended,) = reader.tier.poll()
    assert list(ended.outcomes) == [BlockOutcome.OK] * BLOCKS
    for slot, block_hash in enumerate(keys(BLOCKS)):
        assert reader.arena.view(slot) == content(block_hash, PAYLOAD_BYTES) * readers


def engine(ranks: int, layout: str = "rows", *, is_replicated: bool = True) -> EngineFacts:
    """An engine with so many ranks, whose slots are padded."""
    fields = {"weights": "w", "parallel": f"tp{ranks}", "tensors": ",".join([layout] * ranks)}
    facts = {**OF_RANKS, "tensors": layout}
    replicas = Replicas(ranks, PAYLOAD_BYTES, facts) if is_replicated else None
    memory = SlotMemory((ranks + 1) * PAYLOAD_BYTES, 1, memoryview(b""))
    return EngineFacts(NamespaceKey("model", fields), memory, False, False, 10.0, replicas)


def test_the_number_of_ranks_is_no_part_of_a_shared_namespace() -> None:
    one, two = (remote_setup(SHARING, engine(ranks)) for ranks in (1, 2))
    assert one.fingerprint == two.fingerprint
    assert (two.slot_bytes, two.payload_bytes) == (3 * PAYLOAD_BYTES, PAYLOAD_BYTES)
    assert two.copies == 2
    assert remote_setup(SHARING, engine(2, "columns")).fingerprint != two.fingerprint


def test_without_the_option_each_size_has_blocks_of_its_own() -> None:
    one, two = (remote_setup(ALONE, engine(ranks)) for ranks in (1, 2))
    shared = remote_setup(SHARING, engine(1))
    assert len({one.fingerprint, two.fingerprint, shared.fingerprint}) == 3
    assert (two.slot_bytes, two.payload_bytes) == (3 * PAYLOAD_BYTES, 3 * PAYLOAD_BYTES)
    assert two.copies == 1


def test_kv_that_is_not_replicated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.share_tp: this vLLM does not say"):
        remote_setup(SHARING, engine(2, is_replicated=False))


@pytest.mark.parametrize(
    ("world_size", "is_replicated", "use_mla", "shares"),
    [
        (1, False, True, True),
        (1, False, False, False),
        (2, True, True, True),
        (2, False, True, False),
    ],
)
def test_vllm_says_what_is_replicated(
    world_size: int, is_replicated: bool, use_mla: bool, shares: bool
) -> None:
    modern = pytest.importorskip("kvcascade.vllm.v0_26")
    config = offloading_config(Shape(pages=(1024,)), {}, "engine", 0)
    if not hasattr(config, "replicated_layout"):
        pytest.skip("this vLLM does not say it")
    parallel: Any = replace(config.parallel, world_size=world_size, tp_size=world_size)
    config = replace(config, parallel=parallel, replicated_layout=is_replicated)
    engine_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    found = modern.replicated_facts(config, engine_config)
    assert found == (OF_RANKS if shares else None)
