"""The small cases under `compute-sanitizer`: `make sanitize-gpu`."""

from __future__ import annotations

import pytest
from support.sanitizer import run_sanitizer, small_cases

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_no_access_is_wrong() -> None:
    verdict = run_sanitizer(small_cases())
    if not verdict.is_checked:
        pytest.skip(f"compute-sanitizer checked nothing: {verdict.words}")
    assert verdict.errors == 0, verdict.words
