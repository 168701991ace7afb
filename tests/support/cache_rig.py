"""Caches on disk for the command line's tests, and the command line itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.policies import order_class
from kvcascade.tiers.policies.ordered import OrderedPolicy
from kvcascade.tiers.policies.usage import UsageOrder
from kvcascade.tools.__main__ import app

from .nvme_rig import BLOCK, Rig, config_for, key

PER_SEGMENT = 8
HEADER = 4096
NUMBERS = 1000
"""Blocks of lower numbers are looked for."""
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its JSON document."""
        return json.loads(self.out)

    @property
    def one(self) -> Any:
        """The only namespace of its JSON document."""
        (found,) = self.document["namespaces"]
        return found


def call(*arguments: object) -> Answer:
    """Run a command in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def call_outside(*arguments: object) -> Answer:
    """Run a command in a process of its own: needed while this one owns the cache."""
    command = [sys.executable, "-m", "kvcascade.tools", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    return Answer(done.returncode, done.stdout, done.stderr)


class UsageRig(Rig):
    """A tier that notes uses, as an engine's does."""

    def __init__(
        self, config: NvmeTierConfig, wall_clock: Callable[[], float] = lambda: 1_000_000.0
    ) -> None:
        super().__init__(config)
        arrays, capacity = self.tier.arrays, self.tier.backend.capacity
        order = UsageOrder(order_class("lru")(capacity, arrays), arrays, wall_clock)
        order.reconcile(self.tier.live_slots())
        self.policy = OrderedPolicy(self.tier.directory, order)


def fill(root: Path, blocks: int = 20, namespace: NamespaceKey | None = None) -> Path:
    """A closed cache with blocks `key(0)` to `key(blocks - 1)`; returns its directory."""
    root.mkdir(exist_ok=True)
    rig = UsageRig(config_of(root, namespace))
    rig.store([key(i) for i in range(blocks)])
    rig.close()
    return rig.tier.namespace.folders[0]


def fill_two(root: Path, *fields: dict[str, object]) -> tuple[Path, Path]:
    """Two caches in one path, labelled "one" and "two"."""
    made: list[Path] = []
    for label, each in zip(("one", "two"), fields, strict=True):
        folder = fill(root / f"made-{label}", namespace=NamespaceKey(label, each))
        made.append(folder.rename(root / folder.name))
    return made[0], made[1]


def config_of(root: Path, namespace: NamespaceKey | None = None) -> NvmeTierConfig:
    """A tier of 32 blocks in segments of 8."""
    config = config_for([root], slots=32, per_segment=PER_SEGMENT)
    if namespace is None:
        return config
    return replace(config, key=namespace)


def right_blocks(root: Path) -> set[int]:
    """Which blocks an engine finds, each of them right."""
    rig = UsageRig(config_of(root))
    found = {i for i in range(NUMBERS) if rig.check(key(i))}
    rig.check_sums()
    rig.close()
    return found


def segment(folder: Path, number: int = 0) -> Path:
    """A segment file."""
    return folder / "segments" / f"{number:06d}.safetensors"


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def payload_offset(slot: int) -> int:
    """Where a slot of segment 0 begins."""
    return HEADER + slot * BLOCK


def record_offset(slot: int) -> int:
    """Where the record of a slot of segment 0 begins."""
    return HEADER + PER_SEGMENT * BLOCK + slot * 128
