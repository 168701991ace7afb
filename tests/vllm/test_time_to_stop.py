"""A shutdown writes for as long as vLLM lets it, and says so where that is no time at all."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvcascade.config.schema import CascadeConfig, parse
from kvcascade.vllm.engine_facts import seconds_to_stop
from kvcascade.vllm.scheduler_side import with_time_to_flush


def configured(flush_s: float | None, *, has_disk: bool = True) -> CascadeConfig:
    cpu = {"type": "cpu", "capacity": "8GiB"}
    disk = {"type": "nvme", "capacity": "100GiB", "path": "/mnt/nvme/kv"}
    tiers = [cpu, disk] if has_disk else [cpu]
    return parse({"tiers": tiers, "shutdown_flush_s": flush_s})


def stopped_within(given_s: int) -> Any:
    """An engine's configuration, as far as it is asked here."""
    return SimpleNamespace(shutdown_timeout=given_s)


def test_vllm_has_this_setting_and_it_is_nothing_by_default() -> None:
    (found,) = (each for each in fields(VllmConfig) if each.name == "shutdown_timeout")
    default: Any = found.default
    assert getattr(default, "default", default) == 0, "a number, or pydantic's field"
    assert seconds_to_stop(stopped_within(7)) == 7 and seconds_to_stop(None) is None
    assert seconds_to_stop(SimpleNamespace()) is None, "a version without it"


@pytest.mark.parametrize(("given_s", "flush_s"), [(60, 58.0), (3, 1.0), (2, 1.0), (1, 1.0)])
def test_the_flush_takes_what_is_given_less_the_rest_of_the_stop(
    given_s: int, flush_s: float
) -> None:
    settings, said = with_time_to_flush(configured(None), stopped_within(given_s))
    assert settings.shutdown_flush_s == flush_s and said is None


@pytest.mark.parametrize("flush_s", [0, 5, 500])
def test_a_time_that_was_configured_stays(flush_s: float) -> None:
    given = configured(flush_s)
    assert with_time_to_flush(given, stopped_within(60)) == (given, None)


@pytest.mark.parametrize(("flush_s", "needed_s"), [(None, 22), (3.5, 6), (60, 62)])
def test_no_time_is_said_with_the_flag_that_gives_enough(
    flush_s: float | None, needed_s: int
) -> None:
    given = configured(flush_s)
    settings, said = with_time_to_flush(given, stopped_within(0))
    assert settings == given and said is not None
    assert said.endswith(f"--shutdown-timeout {needed_s}")


@pytest.mark.parametrize(
    ("settings", "engine_config"),
    [
        (configured(None, has_disk=False), stopped_within(0)),
        (configured(None, has_disk=False), stopped_within(60)),
        (configured(None), None),
        (configured(None), SimpleNamespace()),
        (configured(0), stopped_within(0)),
    ],
    ids=["no disk", "no disk, time", "no engine found", "no such setting", "no flush wanted"],
)
def test_nothing_changes_where_nothing_is_written_or_known(
    settings: CascadeConfig, engine_config: Any
) -> None:
    assert with_time_to_flush(settings, engine_config) == (settings, None)
