"""`kvcascade.open` with arguments that it refuses before it makes anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import kvcascade
from kvcascade.errors import ConfigError, NoSpaceError

BLOCK = 4096
SMALL: dict[str, Any] = {"capacity": "64MiB", "min_free": 0}


def open_new(folder: Path, **options: Any) -> kvcascade.BlockCache:
    """A cache in a new path."""
    given = {"namespace": "mine", "block_bytes": BLOCK, "buffer_size": 16 * BLOCK}
    return kvcascade.open(folder / "kv", **{**SMALL, **given, **options})


def namespace_in(path: Path) -> str:
    (found,) = (one.name for one in path.iterdir() if (one / "namespace.json").exists())
    return found


@pytest.mark.parametrize("was_opened", [False, True])
def test_a_namespace_directory_is_no_path(tmp_path: Path, was_opened: bool) -> None:
    """It became a tier of its own, which the removal of the namespace deleted with its blocks."""
    open_new(tmp_path).close()
    inner = tmp_path / "kv" / namespace_in(tmp_path / "kv")
    if was_opened:
        (inner / ".kvcascade").mkdir()
        shutil.copy(tmp_path / "kv" / ".kvcascade" / "path.json", inner / ".kvcascade")
    before = sorted(inner.rglob("*"))
    with pytest.raises(ConfigError, match=f"namespace of the tier in .*; give {tmp_path}/kv"):
        kvcascade.open(inner, namespace="mine", block_bytes=BLOCK)
    assert sorted(inner.rglob("*")) == before


@pytest.mark.parametrize("letters", [1 << 20, 3 << 20, 64 << 20])
def test_a_name_that_its_description_cannot_hold_is_refused(tmp_path: Path, letters: int) -> None:
    """Such a namespace was made, and could never be opened again."""
    for _ in range(2):
        with pytest.raises(ConfigError, match="shorter"):
            open_new(tmp_path, namespace="x" * letters)
    assert not list(tmp_path.glob("kv/x*"))
    open_new(tmp_path, namespace="x" * 100_000).close()
    with kvcascade.open(tmp_path / "kv", namespace="x" * 100_000) as cache:
        assert not cache.is_read_only


def test_a_block_that_no_path_takes_is_refused(tmp_path: Path) -> None:
    for size in (2**62, 2**40):
        with pytest.raises(ConfigError, match="open.block_bytes: .*; lower it"):
            open_new(tmp_path, block_bytes=size)
    assert not (tmp_path / "kv").exists()


def test_a_buffer_larger_than_any_address_is_no_space(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match="buffer_size"):
        open_new(tmp_path, buffer_size=2**63 - 1)


def test_a_relative_path_in_a_deleted_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in (Path("kv"), [tmp_path / "a", "kv"]):
        with pytest.raises(ConfigError, match="is relative, .*; give an absolute path"):
            kvcascade.open(path, namespace="mine", block_bytes=BLOCK)  # type: ignore[arg-type]


def test_the_home_folder_of_nobody_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `~nobody-there` was made in the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a relative path"):
        kvcascade.open("~nobody-there/kv", namespace="mine", block_bytes=BLOCK)
    assert not list(tmp_path.iterdir())
