"""Shares of the test processes (`make test`), and the tests that `make test-quick` leaves out.

One process runs the tests of real engines, one after the other: an engine uses both cores, and two
of them at once slow each other down. The others run everything else, one file at a time; files that
take long come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ENGINES = "engines"
ENGINE_MARK = "pytest.mark.engine"
LENGTHY = (
    "bench/test_bare.py",
    "bench/test_command.py",
    "bench/test_faults.py",
    "bench/test_gpu.py",
    "bench/test_round_trip.py",
    "bench/test_sanitizer_output.py",
    "bench/test_shared_path.py",
    "bench/test_tier_rates.py",
    "corrupt/test_path_damage.py",
    "cpu/test_arena_processes.py",
    "crash/test_engine_crash.py",
    "crash/test_remote_node.py",
    "crash/test_stopped_together.py",
    "deploy/test_dashboard.py",
    "docs/test_snippets.py",
    "faults/test_full_disk.py",
    "faults/test_real_tier.py",
    "handlers/test_device_cuda_large.py",
    "handlers/test_path_containers.py",
    "handlers/test_path_large.py",
    "handlers/test_path_lost_files.py",
    "handlers/test_path_many.py",
    "handlers/test_path_process.py",
    "handlers/test_staging.py",
    "identity/test_engine_identity.py",
    "manager/test_claim_queue.py",
    "model/test_manager_model.py",
    "model/test_path_nodes.py",
    "model/test_remote_model.py",
    "model/test_storms.py",
    "path/test_last_release.py",
    "policy/test_prefix.py",
    "policy/test_reference.py",
    "policy/test_restart.py",
    "remote/test_bad_servers.py",
    "remote/test_object_store.py",
    "remote/test_real_servers.py",
    "remote/test_remote_parts.py",
    "remote/test_valkey.py",
    "replay/test_simulation.py",
    "security/test_access.py",
    "security/test_hostile_files.py",
    "test_packaging.py",
    "tools/test_few_descriptors.py",
    "tools/test_gc.py",
    "tools/test_inspect.py",
    "tools/test_main.py",
    "tools/test_odd_files.py",
    "tools/test_odd_text.py",
    "tools/test_server.py",
    "tools/test_store.py",
    "vllm/test_connector.py",
    "vllm/test_kv_layouts.py",
    "vllm/test_spec.py",
    "vllm/test_spec_chain.py",
    "vllm/test_spec_errors.py",
    "vllm/test_spec_random.py",
    "vllm/test_spec_remote.py",
)
"""Files below tests/ that take more than about two seconds, most of them for processes they start,
for torch, or for long random runs."""


def mark_lengthy(items: Sequence[pytest.Item]) -> None:
    """Set the marker `lengthy` on the tests of these files."""
    for item in items:
        if item.nodeid.split("::")[0].removeprefix("tests/") in LENGTHY:
            item.add_marker(pytest.mark.lengthy)


def is_left_out(path: Path, config: Any) -> bool:
    """Whether the run leaves out every test of this file: then nothing need import it."""
    tests = Path(__file__).parents[1]
    return "not lengthy" in config.option.markexpr and path in {tests / name for name in LENGTHY}


def is_shared(config: Any) -> bool:
    """Return True in a process of a run with groups. In those that run tests, xdist keeps that as
    `loadgroup`, and calls `dist` "no"."""
    return bool(getattr(config.option, "loadgroup", False))


def sort_for_shares(items: list[pytest.Item]) -> None:
    """Engines first, then the lengthy files; each in the order of collection."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if scope_of(item.nodeid) == ENGINES:
        return 0
    return 1 if item.get_closest_marker("lengthy") else 2


@cache
def engine_files() -> frozenset[str]:
    """Return the files with tests of real engines, relative to the root.

    pytest-xdist would name the group of a test behind its name. It cannot with pytest 9.2, and says
    nothing.
    """
    root = Path(__file__).parents[2]
    found = ((path, path.read_text()) for path in root.glob("tests/*/test_*.py"))
    return frozenset(str(path.relative_to(root)) for path, text in found if ENGINE_MARK in text)


def scope_of(nodeid: str) -> str:
    """Return the share of a test: `ENGINES`, or its file. One process runs a share."""
    file = nodeid.split("::")[0]
    return ENGINES if file in engine_files() else file


def scheduler(config: Any, log: Any) -> Any:
    """The scheduler of pytest-xdist for groups, with the shares of `scope_of`."""
    if config.getvalue("dist") != "loadgroup":
        return None
    made: Any = import_module("xdist.scheduler").LoadGroupScheduling(config, log)
    made._split_scope = scope_of
    return made
