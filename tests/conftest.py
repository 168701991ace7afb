"""Conditions of every test: no network, Hypothesis profiles, order, GPU tests skipped."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.children import Start, children
from support.parallel import is_left_out, is_shared, mark_lengthy, scheduler, sort_for_shares

# Before anything imports vLLM: it must neither look for models outside nor report its use.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")


def _load_profile() -> None:
    from hypothesis import HealthCheck, settings

    common = settings(
        deadline=None,  # time is the machine's business, not the property's
        derandomize=False,
        print_blob=True,  # a failure prints what replays it: @reproduce_failure(...)
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile("test", common, max_examples=60)
    settings.register_profile("quick", common, max_examples=15)
    settings.register_profile("soak", common, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


# tests/gpu runs where hypothesis and pytest-timeout are not installed.
if find_spec("hypothesis"):
    _load_profile()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of pytest-timeout where that plugin is missing: options are strict."""
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", "limit per test in seconds; needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of pytest-timeout, too."""
    config.addinivalue_line("markers", "timeout(seconds): limit of a test; needs pytest-timeout")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it would look at every imported module ten times.
    Afterwards it leaves them alone, so it costs the tests less."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which `-m` would choose no test; None leaves the choice to others."""
    return is_left_out(collection_path, config) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark before `-m` chooses, and sort for several processes."""
    mark_lengthy(items)
    if is_shared(config):
        sort_for_shares(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadgroup`: the engine tests stay together, and so do those of a file."""
    return scheduler(config, log)


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is none; torch is loaded for such tests only."""
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is false here")


@pytest.fixture
def child() -> Iterator[Start]:
    """Starts a process from a few lines of code; it is killed at the end."""
    with children() as start:
        yield start


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """pytest's, with every warning of ours: other tests may have used up what our loggers let pass,
    or made an adapter, which gives them vLLM's level.
    """
    caplog.set_level(logging.WARNING, "kvcascade")
    # An adapter would add vLLM's handlers, among them pytest's: each line would come twice.
    monkeypatch.setattr(logging.getLogger("kvcascade"), "handlers", [logging.NullHandler()])
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("kvcascade.") and isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "filters", [])
    return caplog


@pytest.fixture(autouse=True)
def _no_order_fails(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Only damage makes an order of eviction fail. The writer goes on, so no test would see it."""
    if request.path.parent.name not in ("path", "model") or request.path.name == "test_recency.py":
        yield
        return
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvcascade.tiers.nvme.path.writer.namespace.recency")
    monkeypatch.setattr(logger, "filters", [])  # these limit the rate
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not [text for text in said if "order of eviction" in text]
