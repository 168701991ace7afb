"""A namespace that lost a part, or was half removed by hand: it starts, and is right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for, content, key

from kvcascade.errors import ConfigError
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.namespace import DESCRIPTION, NamespaceKey
from kvcascade.tiers.nvme.tier import NvmeTierConfig

KEYS = [key(i) for i in range(32)]
OTHERS = [key(i) for i in range(100, 132)]


@pytest.fixture
def config(tmp_path: Path) -> NvmeTierConfig:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    return config_for(paths, slots=32)


def filled(config: NvmeTierConfig) -> tuple[Path, ...]:
    """Store 32 blocks and close; the directories of the parts."""
    rig = Rig(config)
    rig.store_bit_by_bit(KEYS)
    rig.close()
    assert rig.backend.get_num_free_blocks() == 0, "every segment is there"
    return rig.tier.namespace.folders


def served(config: NvmeTierConfig) -> set[BlockHash]:
    """Open, and say which of the blocks are there; then the tier must take all of the others."""
    rig = Rig(config)
    found = {h for h in KEYS if rig.check(h)}
    rig.store_bit_by_bit(OTHERS)
    assert all(rig.check(h) for h in OTHERS)
    rig.check_sums()
    rig.close()
    again = Rig(config)
    assert all(again.check(h) for h in OTHERS)
    again.close()
    return found


def test_another_model_takes_the_room_of_one_part(config: NvmeTierConfig) -> None:
    folders = filled(config)
    other = replace(config, key=NamespaceKey("other", {"model": "other"}))
    rig = Rig(other)
    rig.store([key(900)])
    rig.close()
    assert [folder.exists() for folder in folders] == [False, True], (
        "each path is cleared by itself"
    )
    assert served(config) == set()


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_is_removed_by_hand(config: NvmeTierConfig, part: int) -> None:
    folders = filled(config)
    shutil.rmtree(folders[part])
    found = served(config)
    assert len(found) == (16 if part else 0), "without the index nothing is known"


def test_what_nothing_knows_is_not_kept(config: NvmeTierConfig) -> None:
    first, second = filled(config)
    shutil.rmtree(first)

    def there() -> set[BlockHash]:
        data = [path.read_bytes() for path in (second / "segments").iterdir()]
        return {h for h in KEYS if any(content(h) in each for each in data)}

    assert len(there()) == 16
    Rig(config).close()
    assert there() == set()


def test_paths_in_another_order_are_refused(config: NvmeTierConfig) -> None:
    filled(config)
    swapped = replace(config, paths=config.paths[::-1])
    with pytest.raises(ConfigError, match="was part 1 of 2 paths"):
        Rig(swapped)
    moved = replace(config, paths=(config.paths[0].parent, config.paths[0]))
    with pytest.raises(ConfigError, match="was part 0 of 2 paths"):
        Rig(moved)
    assert len(served(config)) == len(KEYS), "nothing was touched"


@pytest.mark.parametrize(
    "gone", ["", "index", "state", "segments", "index state", "segments index"]
)
def test_a_removal_by_hand_that_ended_halfway(tmp_path: Path, gone: str) -> None:
    """Whatever had left by then: the next engine starts, and serves what is there."""
    config = config_for([tmp_path], slots=32)
    (folder,) = filled(config)
    (folder / DESCRIPTION).unlink()
    for name in gone.split():
        shutil.rmtree(folder / name)
    found = served(config)
    assert found == (set() if "index" in gone or "segments" in gone else set(KEYS))


def test_a_part_that_engines_use_behind_another_first_path_is_left_alone(
    config: NvmeTierConfig, tmp_path: Path
) -> None:
    rig = Rig(config)
    rig.store_bit_by_bit(KEYS)
    (tmp_path / "c").mkdir()
    other = replace(config, paths=(tmp_path / "c", config.paths[1]))
    with pytest.raises(ConfigError, match="whose first path is another"):
        Rig(other)
    assert all(rig.check(h) for h in KEYS)
    rig = rig.reopened()
    assert all(rig.check(h) for h in KEYS)
    rig.close()
