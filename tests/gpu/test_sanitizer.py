"""The small cases under `compute-sanitizer`: `make sanitize-gpu`."""

from __future__ import annotations

import pytest
from support.sanitizer import TIMEOUT_S, run_sanitizer, small_cases

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


def test_no_access_is_wrong() -> None:
    verdict = run_sanitizer(small_cases())
    assert verdict.errors == 0, verdict.words
    if not verdict.is_checked:
        pytest.skip(f"compute-sanitizer did not check every case: {verdict.words}")
