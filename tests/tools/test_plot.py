"""The pictures: PNG files with something on them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from support.cache_rig import call
from support.path_cache import fill_path

from kvcascade.errors import NoSpaceError
from kvcascade.tools.commands.bench.bench_results import (
    CONTENDERS,
    NONE,
    OURS,
    Quantity,
    Row,
    Table,
    document,
)
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.picture import MISSING
from kvcascade.tools.dev.bench.bench_plot import COLOURS, NAMES, _unit, plot


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
    with pytest.raises(NoSpaceError, match="/dev/full"):
        plot(document([], {}), Path("/dev/full"))


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fill_path(tmp_path)
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = call("inspect", tmp_path, "--plot", tmp_path / "cache.png")
    assert answer.code == ExitCode.MISSING and MISSING in answer.err


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"unit": "tokens", "is_more_better": True}, "tokens ↑"),
        ({"unit": "B/s", "is_more_better": False}, "B/s ↓"),
        ({"unit": "GB/s"}, "GB/s ↑"),
        ({"unit": "ms"}, "ms ↓"),
    ],
)
def test_which_way_is_better(row: dict[str, object], shown: str) -> None:
    """As the row says; files of older versions do not say, and show rates upwards."""
    assert _unit(row) == shown


def test_every_contender_is_drawn(tmp_path: Path) -> None:
    row = Row("c", Quantity("q", "ms"), {OURS: [1.0], NONE: [2.0]})
    plot(document([Table("a", "First", "", [row])], {}), tmp_path / "b.png")
    pixels = (imread(tmp_path / "b.png")[:, :, :3] * 255).round().astype(int)
    colour = [int(COLOURS[NONE][at : at + 2], 16) for at in (1, 3, 5)]
    legend_only = 0.01 * pixels.shape[0] * pixels.shape[1]
    assert (pixels == colour).all(axis=2).sum() > legend_only
    assert set(CONTENDERS) == set(NAMES) == set(COLOURS)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_bench_results(tmp_path: Path, count: int) -> None:
    quantity = Quantity("store", "GB/s")
    rows = [
        Row(f"case {i}", quantity, {"ours": [1.0 + i], "vllm": [0.5], "limit": [200.0]})
        for i in range(count)
    ]
    alone = [Row("alone", quantity, {"ours": [1.0]})]
    tables = [Table("a", "First", "", rows), Table("b", "Second", "", alone)]
    plot(document(tables, {"machine": {"cores": 2}, "versions": {}, "repeats": 3}), tmp_path / "b")
    assert colours(tmp_path / "b") > 3
