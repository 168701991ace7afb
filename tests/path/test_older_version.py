"""A writer beside engines of the version before it, which share a path by locks (format 2)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.executors import InlineExecutor
from support.keys import keys
from support.nvme_rig import Rig, config_for
from support.path_rig import BLOCK_BYTES, PathRig, RigNode

from kvcascade.errors import FormatError, KVCascadeError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey, remove_namespace
from kvcascade.tiers.nvme.opening import open_nvme_tier
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

FIELDS = {"model": "model"}
"""Fields of the namespace that `RigNode` asks for by default."""


def beside(tmp_path: Path, segments: int = 24) -> PathRig:
    return PathRig(segments, roots=(tmp_path,), real=RealFileSystem())


def used(folder: Path) -> int:
    return RealFileSystem().used_bytes(folder)


def fill(node: RigNode, blocks: int, first: int = 0) -> None:
    for start in range(first, first + blocks, 4):
        node.store(list(range(start, start + 4)), steps=300)
        node.rig.step(seconds=1.0)


def test_an_old_engine_opens_no_new_namespace_and_says_why(tmp_path: Path) -> None:
    rig = beside(tmp_path)
    node = RigNode(rig)
    node.store([1, 2])
    old = replace(config_for([tmp_path]), key=NamespaceKey("model", FIELDS))
    with pytest.raises(FormatError, match="has format version 3, this kvcascade reads 2"):
        open_nvme_tier(old, InlineExecutor(), RealFileSystem())
    assert node.store([3]) and node.held([1, 2, 3]) == [1, 2, 3]
    rig.close()
    with pytest.raises(FormatError, match="format version 3"):
        open_nvme_tier(old, InlineExecutor(), RealFileSystem())
    rig.start()
    assert RigNode(rig).held([1, 2, 3]) == [1, 2, 3]


def test_a_new_engine_refuses_an_old_namespace_with_the_remedy(tmp_path: Path) -> None:
    config = config_for([tmp_path])
    tier = Rig(config)
    tier.store(keys(4))
    name = config.key.directory_name
    rig = beside(tmp_path, 60)
    refused = RigNode(rig, "some/model", fields=dict(config.key.fields)).refused[0]
    assert "format version 2" in refused.text and f"remove the directory {tmp_path / name}" in (
        refused.text
    )
    assert all(map(tier.check, keys(4)))
    tier.close()


def test_an_old_engine_removes_nothing_that_a_writer_keeps(tmp_path: Path) -> None:
    rig = beside(tmp_path)
    RigNode(rig, "idle").store([1])
    rig.close()
    rig.start()
    node = RigNode(rig, "model")
    fill(node, 32)
    fs = RealFileSystem()
    folders = [each for each in tmp_path.iterdir() if (each / "lock").exists()]
    assert len(folders) == 2
    assert not any(remove_namespace(fs, folder) for folder in folders)
    # The old engine has room for nothing, and takes nothing.
    config = config_for([tmp_path], slots=32)
    with pytest.raises(KVCascadeError):
        tier = Rig(config)
        for start in range(0, 64, 4):
            tier.store(keys(64)[start : start + 4])
    assert all(folder.exists() for folder in folders)
    rig.close()
    assert remove_namespace(fs, folders[0]), "without a writer it is one of many again"


def test_both_together_keep_the_capacity(tmp_path: Path) -> None:
    rig = beside(tmp_path, 90)
    capacity = rig.options.capacity_bytes
    config = replace(config_for([tmp_path]), capacity_bytes=capacity, ready_bytes=0)
    tier = Rig(config)
    tier.store_bit_by_bit(keys(64))
    node = RigNode(rig, "model")
    fill(node, 900)
    assert used(tmp_path) <= capacity
    assert len(next(iter(rig.writer.namespaces.values())).space.segments) > 4
    assert all(map(tier.check, keys(64)[-8:]))
    tier.close()
    fill(node, 300, first=2000)
    assert used(tmp_path) <= capacity


def test_an_old_namespace_that_nobody_has_open_leaves_when_its_room_is_needed(
    tmp_path: Path,
) -> None:
    config = config_for([tmp_path])
    tier = Rig(config)
    tier.store_bit_by_bit(keys(64))
    tier.close()
    old = tmp_path / config.key.directory_name
    rig = PathRig(
        roots=(tmp_path,),
        real=RealFileSystem(),
        capacity_bytes=capacity_of(8, 8, BLOCK_BYTES) + used(old) // 2,
    )
    node = RigNode(rig)
    fill(node, 80)
    assert not old.exists()
    assert used(tmp_path) <= rig.options.capacity_bytes
    assert node.welcome is not None
    document = json.loads((tmp_path / node.welcome.folder / "namespace.json").read_text())
    assert document["format_version"] == 3
