"""What the tests of the benchmark run under."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark collects all garbage before it looks at a clock, so that none is collected
    while it measures. With vLLM imported that is half a second each time, and the figures of a
    test are thrown away.
    """
    monkeypatch.setattr(gc, "collect", lambda: 0)
