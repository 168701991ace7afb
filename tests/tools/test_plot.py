"""The pictures: PNG files with something on them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from support.cache_rig import call
from support.path_cache import fill_path

from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.picture import MISSING


def colours(path: Path) -> int:
    """How many colours a PNG file has."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 300
    pixels = (imread(path)[:, :, :3] * 255).astype(np.uint32)
    return len(np.unique(pixels[:, :, 0] << 16 | pixels[:, :, 1] << 8 | pixels[:, :, 2]))


@pytest.mark.parametrize("blocks", [0, 20])
def test_a_namespace(tmp_path: Path, blocks: int) -> None:
    fill_path(tmp_path, blocks)
    answer = call("inspect", tmp_path, "--plot", tmp_path / "cache.png")
    assert answer.code == ExitCode.OK and "Saved" in answer.out
    assert colours(tmp_path / "cache.png") > 50


def test_a_picture_that_cannot_be_written_is_all_that_is_said(tmp_path: Path) -> None:
    fill_path(tmp_path)
    answer = call("inspect", tmp_path, "--json", "--plot", tmp_path / "no" / "cache.png")
    assert answer.code == ExitCode.USAGE and "--plot" in answer.document["message"]
    (tmp_path / "folder").mkdir()
    answer = call("inspect", tmp_path, "--json", "--plot", tmp_path / "folder")
    assert answer.code == ExitCode.USAGE and "is a folder" in answer.document["message"]
    answer = call("inspect", tmp_path, "--json", "--plot", "/dev/full")
    assert answer.code == ExitCode.NO_SPACE and answer.document["error"] == "no_space"


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fill_path(tmp_path)
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = call("inspect", tmp_path, "--plot", tmp_path / "cache.png")
    assert answer.code == ExitCode.MISSING and MISSING in answer.err
