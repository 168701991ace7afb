"""Which copier a worker gets, and what it is told of the engine."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from kvcascade.assembly.build import Geometry, open_worker
from kvcascade.config.schema import parse
from kvcascade.handlers.device import device_cuda
from kvcascade.tiers.policies import known_names

PAGE_BYTES = 4096


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
    tensor: Any = SimpleNamespace(
        shape=(4, PAGE_BYTES), stride=lambda dim: (PAGE_BYTES, 1)[dim], is_cuda=True
    )
    with TemporaryDirectory(dir="/dev/shm") as shared:
        cpu = {"type": "cpu", "capacity": "1MiB", "arena_dir": shared}
        settings = parse({"tiers": [cpu]}, known_names())
        side = open_worker(
            settings,
            Geometry(PAGE_BYTES, 1, 1),
            "engine",
            rank=0,
            tensors=[tensor],
            groups=[[(0, PAGE_BYTES)]],
            steps_while_storing=steps_while_storing,
        )
        side.close()
    assert asked == [{"may_hold_back_stores": steps_while_storing}]
