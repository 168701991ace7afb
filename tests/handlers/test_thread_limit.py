"""A limit of processes: what needs threads has all of them before it serves, or refuses."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.path_engine import PathEngine
from support.thread_limit import Limited

from kvcascade.errors import TierIOError
from kvcascade.handlers.node.path import path_loop
from kvcascade.manager.ticker import Ticker
from kvcascade.threads import run_on_each, start_thread, started_pool
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import PathOptions


def nothing() -> None:
    """Do nothing."""


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limited:
    return Limited(monkeypatch)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_pool_that_lacks_threads_is_refused_and_leaves_none(limit: Limited, left: int) -> None:
    limit.left = left
    with pytest.raises(TierIOError, match="raise the limit"):
        started_pool(4, "test")
    for thread in limit.started:
        thread.join(10.0)
    assert len(limit.started) == left and not any(map(threading.Thread.is_alive, limit.started))


def test_a_started_pool_needs_no_thread_later(limit: Limited) -> None:
    with started_pool(4, "test") as pool:
        limit.left = 0
        assert [*pool.map(abs, range(-50, 0))] == [*range(50, 0, -1)]
        seen: list[int] = []
        run_on_each(pool, 4, lambda: seen.append(threading.get_ident()))
        assert len(seen) == len({*seen}) == 4 == len(limit.started)


@pytest.mark.parametrize("start", [lambda: Ticker(nothing), lambda: start_thread(nothing, "test")])
def test_a_thread_that_cannot_be_started_is_an_error_of_ours(
    limit: Limited, start: Callable[[], object]
) -> None:
    limit.left = 0
    with pytest.raises(TierIOError, match="raise the limit"):
        start()


@pytest.mark.parametrize("has_huge_pages", [False, True])
def test_a_node_of_a_path_needs_no_thread_later(
    limit: Limited, tmp_path: Path, has_huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_loop, "has_huge_pages", lambda: has_huge_pages)
    engine = PathEngine([tmp_path], PathOptions(16 << 20), is_thread=True)
    try:
        engine.open()
        limit.left = 0
        engine.store(range(8))
        assert list(engine.get(range(8))) == [BlockOutcome.OK] * 8
    finally:
        engine.close()


@pytest.mark.parametrize("left", range(1, 7))
def test_a_node_that_lacks_threads_leaves_none(limit: Limited, tmp_path: Path, left: int) -> None:
    """The keeper tries it three times, and `left` threads may be started in all."""
    limit.left = left
    engine = PathEngine([tmp_path], PathOptions(16 << 20), is_thread=True, io_threads=1)
    gc.disable()  # it would end the threads of what nobody holds any more
    try:
        with pytest.raises(TierIOError, match="did not start"):
            engine.keeper.start()
        for thread in limit.started[1:]:  # the first one is the keeper's
            thread.join(10.0)
            assert not thread.is_alive()
    finally:
        gc.enable()
        engine.close()


def test_a_node_that_lacks_descriptors_has_a_sentence_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", none_left)
    engine = PathEngine([tmp_path], PathOptions(16 << 20), is_thread=True)
    with pytest.raises(TierIOError, match="did not start"):
        engine.keeper.start()
    engine.close()
    said = "Too many open files while starting the thread that moves blocks"
    assert said in caplog.text and "Traceback" not in caplog.text
