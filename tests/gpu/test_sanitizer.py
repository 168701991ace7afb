"""The small cases under `compute-sanitizer`: `make sanitize-gpu`."""

from __future__ import annotations

import pytest
from support.kv_layouts import NAMED_CASES
from support.sanitizer import run_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_no_access_is_wrong() -> None:
    test = "tests/gpu/test_device_cuda.py::test_moves_the_pages"
    names = [f"{test}[{name}-{kind}]" for name in NAMED_CASES for kind in ("pinned", "unpinned")]
    verdict = run_sanitizer(names)
    if not verdict.is_checked:
        pytest.skip(f"compute-sanitizer checked nothing: {verdict.words}")
    assert verdict.errors == 0, verdict.words
