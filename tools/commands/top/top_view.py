"""`kvcascade top` on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ....errors import KVCascadeError
from .. import show
from .top_frame import Frame, Reading, TierFrame, frame

NUMBERS = ("blocks", "hits/s", "tokens/s", "up", "down", "up ms", "down ms", "queue")
"""Columns of the figures; their usual values fit into 80 columns."""


def run(
    source: str,
    read: Callable[[], Reading],
    interval_s: float,
    pause: Callable[[float], object] | None = None,
) -> NoReturn:
    """Show a new picture every `interval_s` until Ctrl-C; `pause` waits for some seconds.

    Passes on the exception of the first reading. After one of a later reading, the last picture
    stays, below its sentence, until a reading succeeds: an engine may restart.
    """
    wait = pause or threading.Event().wait
    before = read()
    picture = render(frame(source, before))
    with Live(console=show.console(), auto_refresh=False, screen=False) as live:
        live.update(picture, refresh=True)
        while True:
            wait(interval_s)
            try:
                now = read()
            except KVCascadeError as error:
                problem = Text(show.plain(str(error)), style="red")
                live.update(Group(problem, picture), refresh=True)
                continue
            picture = render(frame(source, now, before))
            live.update(picture, refresh=True)
            before = now


def render(picture: Frame) -> Group:
    """Render one picture: numbered lines with the tiers' names and states, then the figures by
    number.

    Names of namespaces are too long to fit on a line with the figures.
    """
    table = show.columns("", "", *NUMBERS, right=("", *NUMBERS))
    table.collapse_padding, table.show_edge = True, False
    lines: list[Text] = []
    for number, tier in enumerate(picture.tiers, 1):
        table.add_row(str(number), *_cells(tier))
        name = Text(f"  {number} {show.plain(tier.tier)}  {_state(tier)}", no_wrap=True)
        name.overflow = "ellipsis"
        lines.append(name)
        if tier.problem:
            lines.append(Text(f"    {show.plain(tier.problem)}", style="red"))
    title = Text(show.plain(f"kvcascade top: {picture.source}"), style="italic")
    return Group(title, *lines, table, _line(picture))


def _state(tier: TierFrame) -> str:
    used, dirty = tier.used_ratio, tier.dirty_ratio
    state = "" if used is None else f"{show.bar(used, 10)} {used:.0%} used"
    state += "" if dirty is None else f", {dirty:.0%} dirty"
    budget = tier.budget_left_bytes
    state += "" if budget is None else f", may write {show.size(budget)}"
    return state + (", accepts no writes" if tier.is_blocked else "")


def _cells(tier: TierFrame) -> list[str]:
    return [
        _count(tier.blocks),
        _count(tier.hits_per_s),
        _count(tier.tokens_per_s),
        _rate(tier.up_bytes_per_s, tier.up_bytes),
        _rate(tier.down_bytes_per_s, tier.down_bytes),
        _time(tier.up_latency_s),
        _time(tier.down_latency_s),
        _count(tier.pending_blocks),
    ]


def _line(picture: Frame) -> Table:
    table = Table.grid(padding=(0, 3))
    facts = (
        ("misses/s", picture.misses_per_s),
        ("misses", picture.misses),
        ("requests waiting for promotion", picture.waiting_requests),
        ("corrupt", picture.corrupt_blocks),
        ("dirty blocks dropped", picture.dropped_dirty_blocks),
    )
    shown = [f"{name} {_count(value)}" for name, value in facts if value is not None]
    table.add_row(*shown)
    return table


def _count(value: float | None) -> str:
    if value is None:
        return show.NOTHING
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _rate(per_s: float | None, total: float | None) -> str:
    if per_s is not None:
        return f"{show.size(per_s)}/s"
    return show.NOTHING if total is None else show.size(total)


def _time(seconds: float | None) -> str:
    return show.NOTHING if seconds is None else _count(seconds * 1000)
