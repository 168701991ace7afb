"""How long a shutdown may write: what vLLM allows, or what was configured."""

from __future__ import annotations

from typing import Any

import pytest

from kvcascade.config import parse
from kvcascade.vllm_common import with_time_to_flush

CPU = {"type": "cpu", "capacity": "1GiB"}
NVME = {"type": "nvme", "capacity": "8GiB", "path": "/mnt/kv"}


class Config:
    """As much of vLLM's configuration as is asked for."""

    def __init__(self, shutdown_timeout: int) -> None:
        self.shutdown_timeout = shutdown_timeout


def flush_s(given: dict[str, Any], vllm: object) -> tuple[float | None, str | None]:
    settings, said = with_time_to_flush(parse({"tiers": [CPU, NVME], **given}), vllm)
    return settings.shutdown_flush_s, said


@pytest.mark.parametrize(("timeout_s", "expected_s"), [(60, 58.0), (3, 1.0), (1, 1.0)])
def test_the_time_that_vllm_gives_less_that_of_a_stop(timeout_s: int, expected_s: float) -> None:
    assert flush_s({}, Config(timeout_s)) == (expected_s, None)


def test_what_is_configured_counts() -> None:
    assert flush_s({"shutdown_flush_s": 5}, Config(60)) == (5, None)


@pytest.mark.parametrize(("given", "needed"), [({}, "22"), ({"shutdown_flush_s": 5}, "7")])
def test_no_time_is_said_with_the_flag(given: dict[str, Any], needed: str) -> None:
    _, said = flush_s(given, Config(0))
    assert said is not None and said.endswith(f"--shutdown-timeout {needed}")


def test_nothing_is_said_where_nothing_can_be_written_or_vllm_has_no_limit() -> None:
    assert flush_s({}, None) == (None, None)
    alone = parse({"tiers": [CPU]})
    assert with_time_to_flush(alone, Config(0)) == (alone, None)
