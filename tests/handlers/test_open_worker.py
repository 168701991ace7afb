"""Which copier a worker gets, and what it is told of the engine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from kvcascade.assembly.build import Geometry, WorkerSide, open_worker
from kvcascade.config.schema import parse
from kvcascade.errors import ConfigError
from kvcascade.handlers.device import device_cuda
from kvcascade.tiers.policies import known_names

PAGE_BYTES = 4096


def open_side(tensor: Any, arena_dir: str, *, steps_while_storing: bool = True) -> WorkerSide:
    """A worker with one layer, whose tensor it is."""
    cpu = {"type": "cpu", "capacity": "1MiB", "arena_dir": arena_dir}
    return open_worker(
        parse({"tiers": [cpu]}, known_names()),
        Geometry(PAGE_BYTES, 1, 1),
        "engine",
        rank=0,
        tensors=[tensor],
        groups=[[(0, PAGE_BYTES)]],
        steps_while_storing=steps_while_storing,
    )


def tensor_on(kind: str) -> Any:
    return SimpleNamespace(
        shape=(4, PAGE_BYTES),
        stride=lambda dim: (PAGE_BYTES, 1)[dim],
        is_cuda=kind == "cuda",
        device=SimpleNamespace(type=kind),
    )


def test_a_device_that_no_copier_reads_is_one_sentence() -> None:
    with TemporaryDirectory(dir="/dev/shm") as shared:
        with pytest.raises(ConfigError, match="device of type 'xpu'"):
            open_side(tensor_on("xpu"), shared)
        assert not list(Path(shared).iterdir()), "no arena is left"


@pytest.mark.parametrize("steps_while_storing", [True, False])
def test_stores_are_held_back_only_where_the_engine_goes_on_with_its_steps(
    steps_while_storing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Copier:
        def __init__(self, *given: object, **options: Any) -> None:
            asked.append(options)

        def shutdown(self) -> None:
            """Nothing is under way."""

    monkeypatch.setattr(device_cuda, "CudaDeviceCopier", Copier)
    with TemporaryDirectory(dir="/dev/shm") as shared:
        open_side(tensor_on("cuda"), shared, steps_while_storing=steps_while_storing).close()
    assert asked == [{"may_hold_back": steps_while_storing}]
