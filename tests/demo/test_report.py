"""What the demo prints and draws."""

from __future__ import annotations

import io
from pathlib import Path

from demo.demo_phases import phase, reference, with_tiering
from rich.console import Console

from kvcascade.tools.dev.demo.chart import draw
from kvcascade.tools.dev.demo.demo_report import ROWS, table

WIDTH = 100


def test_the_table_fits_and_says_everything() -> None:
    printed = io.StringIO()
    phases = [reference(), with_tiering("b"), *(phase(key, wrong_tokens=4) for key in "cde")]
    Console(file=printed, width=WIDTH).print(table(phases))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    cells = {line[1:24].rstrip(): line[24:].split() for line in lines}
    names = [line[1:24].rstrip() for line in lines]
    assert [name for name in names if name in dict(ROWS)] == [name for name, _ in ROWS]
    assert cells["  from NVMe tier"] == ["0", "64", "64", "64", "64"]
    assert cells["MiB written to NVMe"] == ["0.0", "3.0", "3.0", "3.0", "3.0"]
    assert cells["wrong tokens"] == ["–", "0", "4", "4", "4"]
    assert cells["    without offloading"] == ["–", "168", "168", "168", "168"]
    assert cells["    vLLM's tiering"] == ["–", "40", "–", "–", "–"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    target = tmp_path / "demo.png"
    draw(
        [reference(), with_tiering("b"), phase("c", title="[odd] $title")],
        "subtitle",
        "facts",
        target,
    )
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 10_000
