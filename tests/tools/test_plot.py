"""The pictures: PNG files with something on them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from support.cache_rig import call, fill

from kvcascade.errors import NoSpaceError
from kvcascade.tools.bench.plot import plot
from kvcascade.tools.bench.results import Quantity, Row, Table, document
from kvcascade.tools.cache import plot as namespace_plot
from kvcascade.tools.commands.common import ExitCode


def colours(path: Path) -> int:
    """How many colours a PNG file has."""
    from matplotlib.image import imread

    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 300
    pixels = (imread(path)[:, :, :3] * 255).astype(np.uint32)
    return len(np.unique(pixels[:, :, 0] << 16 | pixels[:, :, 1] << 8 | pixels[:, :, 2]))


@pytest.mark.parametrize("blocks", [0, 20])
def test_a_namespace(tmp_path: Path, blocks: int) -> None:
    fill(tmp_path, blocks)
    answer = call("inspect", tmp_path, "--plot", tmp_path / "cache.png")
    assert answer.code == ExitCode.OK and "Saved" in answer.out
    assert colours(tmp_path / "cache.png") > 50


def test_a_picture_that_cannot_be_written_is_all_that_is_said(tmp_path: Path) -> None:
    fill(tmp_path)
    answer = call("inspect", tmp_path, "--json", "--plot", tmp_path / "no" / "cache.png")
    assert answer.code == ExitCode.USAGE and "--plot" in answer.document["message"]
    answer = call("inspect", tmp_path, "--json", "--plot", "/dev/full")
    assert answer.code == ExitCode.NO_SPACE and answer.document["error"] == "no_space"
    with pytest.raises(NoSpaceError, match="/dev/full"):
        plot(document([], {}), Path("/dev/full"))


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fill(tmp_path)
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = call("inspect", tmp_path, "--plot", tmp_path / "cache.png")
    assert answer.code == ExitCode.MISSING and namespace_plot.MISSING in answer.err


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
