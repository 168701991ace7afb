"""Bytes written, read from the outside of a real tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.keys import key

import kvcascade
from kvcascade.tools.dev.demo.disk import written_bytes


def test_no_namespace(tmp_path: Path) -> None:
    assert written_bytes(tmp_path) == written_bytes(tmp_path / "missing") == 0


def test_what_the_index_counts(tmp_path: Path) -> None:
    with kvcascade.open(
        tmp_path, namespace="one", block_bytes=4096, capacity="16MiB", min_free=0
    ) as cache:
        cache.put([key(n) for n in range(3)], [np.zeros(4096, np.uint8)] * 3)
    assert written_bytes(tmp_path) == 3 * 4096
