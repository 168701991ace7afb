"""Who owns a namespace is read from the kernel's table of locks; nothing is locked for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.nvme.offline.presence import owners


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock file of a namespace that process 4711 opened."""
    path = tmp_path / "lock"
    path.write_text("4711")
    return path


def table(tmp_path: Path, *lines: str) -> Path:
    """A table of locks."""
    path = tmp_path / "locks"
    path.write_text("\n".join(lines))
    return path


def test_this_process_is_an_owner(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path]))
    folders = rig.tier.namespace.folders
    assert owners(folders) == [os.getpid()]
    rig.close()
    assert owners(folders) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1: FLOCK  ADVISORY  WRITE 12 fd:00:{inode} 0 EOF", [12]),
        ("1: FLOCK  ADVISORY  READ  12 fd:00:{inode} 0 EOF", [12]),
        ("1: FLOCK  ADVISORY  WRITE 0 fd:00:{inode} 0 EOF", [4711]),
        ("1: OFDLCK ADVISORY  WRITE -1 fd:00:{inode} 64 64", []),
        ("1: POSIX  ADVISORY  WRITE 12 fd:00:{inode} 0 EOF", []),
        ("1: -> FLOCK  ADVISORY  WRITE 12 fd:00:{inode} 0 EOF", []),
        ("1: FLOCK  ADVISORY  WRITE 12 fd:00:1 0 EOF", []),
        ("1: FLOCK  ADVISORY  WRITE x fd:00:{inode} 0 EOF", []),
        ("garbage", []),
        ("", []),
    ],
)
def test_lines_of_the_table(tmp_path: Path, lock: Path, line: str, found: list[int]) -> None:
    text = line.format(inode=lock.stat().st_ino)
    assert owners([tmp_path], table(tmp_path, "0: x", text)) == found


def test_an_owner_without_a_name(tmp_path: Path, lock: Path) -> None:
    lock.write_text("nobody")
    text = f"1: FLOCK  ADVISORY  WRITE 0 fd:00:{lock.stat().st_ino} 0 EOF"
    assert owners([tmp_path], table(tmp_path, text)) == [0]


def test_without_a_table_nobody_is_seen(tmp_path: Path, lock: Path) -> None:
    assert owners([tmp_path], tmp_path / "nothing") == []
