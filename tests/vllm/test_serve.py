"""`vllm serve` with the cascade: metrics over HTTP, KV events over ZMQ, one line in the log."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from time import monotonic
from typing import Any

import pytest
from safetensors import safe_open
from support.cache_rig import call, flip
from support.server_rig import Server

from kvcascade.observe.metrics import METRICS, PREFIX, Kind
from kvcascade.tools.commands.carry.carried import parse_record
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_blocks import open_path
from kvcascade.tools.dev.server import served_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCAB = 1024
BLOCK_BYTES = 4 * 32 * 2 * 128 * 4
PROMPTS = 12
TOKENS = 640
SETTLE_LIMIT_S = 180.0
PROMPT_BLOCKS = TOKENS // 32
LOADED = (PREFIX + "loaded_blocks_total", "nvme")
HASH_BYTES = 32
EVENT_HASH_BYTES = 8
"""Events name a block by the end of its hash."""


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1, VOCAB) for _ in range(TOKENS)]


class Router:
    """What a cache-aware router believes, from nothing but the events."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        self.removed = dict.fromkeys(self.held, 0)

    def take(self, server: Server) -> None:
        for event in server.events():
            medium = str(getattr(event, "medium", None)).upper()
            if medium not in self.held:  # the device's own blocks
                continue
            assert str(event.locality).upper() == "LOCAL"
            if type(event).__name__ == "BlockRemoved":
                self.held[medium].difference_update(event.block_hashes)
                self.removed[medium] += len(event.block_hashes)
            else:
                self.held[medium].update(event.block_hashes)


def keys_on_disk(root: Path) -> list[bytes]:
    """What the index holds, told by the running server."""
    with open_path(root) as path:
        (name,) = path.names
        return [block.key for block in path.blocks(name)]


def on_disk(root: Path) -> set[int]:
    """Hashes in the index as events name them."""
    hashes = (key[:HASH_BYTES] for key in keys_on_disk(root))
    return {int.from_bytes(found[-EVENT_HASH_BYTES:], "big") for found in hashes}


def settle(server: Server, is_done: Callable[[dict[tuple[str, str], float]], bool]) -> None:
    """Short requests until the figures say that nothing is under way."""
    metrics: dict[tuple[str, str], float] = {}
    end_s = monotonic() + SETTLE_LIMIT_S
    while monotonic() < end_s:
        server.complete([1] * 4)
        metrics = server.metrics()
        if is_done(metrics):
            return
    ours = "\n".join(
        f"{name[len(PREFIX) :]} {tier}: {value:g}"
        for (name, tier), value in sorted(metrics.items())
        if value and name.startswith(PREFIX) and not name.endswith("_bucket")
    )
    raise AssertionError(f"nothing settles\n{ours}\n{server.log_tail()}")


def everything_is_written(metrics: dict[tuple[str, str], float]) -> bool:
    dirty = metrics.get((PREFIX + "tier_dirty_ratio", "cpu"), 1.0)
    return dirty == 0 and metrics.get((PREFIX + "demotion_jobs", "nvme"), 1.0) == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return served_model(tmp_path / "model", VOCAB, seed=5)


def test_a_server_tells_what_it_holds(tmp_path: Path, model: Path) -> None:
    disk = tmp_path / "disk"
    extra: dict[str, Any] = {
        "write_mode": "through",
        "tiers": [
            {"type": "cpu", "capacity": 64 * BLOCK_BYTES},
            {"type": "nvme", "capacity": 200 * BLOCK_BYTES, "path": str(disk), "min_free": 0},
        ],
    }
    router = Router()
    blocks: dict[str, Any] = {"num_gpu_blocks_override": 80}
    with Server(tmp_path / "server.log", model, extra, launch=Popen, **blocks) as server:
        first = [server.complete(prompt(0))]
        settle(server, everything_is_written)
        carried = _export_one_prompt(disk, tmp_path / "prompt.safetensors")
        first += [server.complete(prompt(number)) for number in range(1, PROMPTS)]
        settle(server, everything_is_written)
        # The last ones first: the others left the disk meanwhile.
        again = [server.complete(prompt(number)) for number in reversed(range(1, PROMPTS))]
        assert again[::-1] == first[1:]
        settle(server, everything_is_written)
        router.take(server)
        settle(server, lambda metrics: (PREFIX + "written_per_read", "nvme") in metrics)
        metrics = server.metrics()
        assert router.held["STORAGE"] == on_disk(disk)
        assert router.removed["CPU"] > 0 and router.removed["STORAGE"] > 0
        held = metrics[PREFIX + "tier_blocks", "cpu"]
        assert len(router.held["CPU"]) == held
        _check_metrics(metrics)
        _check_commands(server, disk, metrics)
        server.process.stop()
        opened = [line for line in server.log().splitlines() if "kvcascade opened" in line]
        assert len(opened) == 1
        assert all(f"{fact}=" in opened[0] for fact in ("policy", "pages", "fingerprint"))
        assert "tokens_per_block=32" in opened[0]

    router = Router()
    with Server(tmp_path / "again.log", model, extra, **blocks) as server:
        settle(server, everything_is_written)
        router.take(server)
        assert router.held["STORAGE"] == on_disk(disk), "what an earlier server left is announced"
        _import_beside(server, disk, carried)
        assert not server.metrics()[LOADED], "nothing came from the disk so far"
        assert server.complete(prompt(0)) == first[0]
        settle(server, lambda metrics: metrics.get(LOADED, 0.0) >= PROMPT_BLOCKS - 1)
        _clear_out_beside(disk, carried)
        _repair_beside(disk)
        last = [server.complete(prompt(number)) for number in range(PROMPTS)]
        assert last == first, "what was taken away is computed, or read where it still is"
        assert call("verify", disk).code == ExitCode.OK


def _export_one_prompt(disk: Path, out: Path) -> Path:
    """What there is, chosen by the last block of the only prompt."""
    keys = keys_on_disk(disk)
    found = [call("inspect", disk, "--block", key.hex(), "--json").document for key in keys]
    positions = {each["prefix_position"]: each["hash"] for each in found}
    assert sorted(positions) == list(range(PROMPT_BLOCKS))
    answer = call("export", disk, out, "--prefix", positions[PROMPT_BLOCKS - 1], "--json")
    assert answer.document["blocks"] == PROMPT_BLOCKS, answer
    return out


def _import_beside(server: Server, disk: Path, carried: Path) -> None:
    """A block that left the disk long ago comes back while the server runs."""
    held = on_disk(disk)
    answer = call("import", disk, carried, "--json")
    assert answer.code == ExitCode.NO_SPACE, "a small tier is the engine's from the start"
    few = answer.document["imported"]  # what the writer had evicted ahead of its need
    answer = call("import", disk, carried, "--make-room", "--json")
    assert answer.code == ExitCode.OK, answer
    assert answer.document["imported"] == PROMPT_BLOCKS - few, answer
    assert len(on_disk(disk) - held) == PROMPT_BLOCKS


def _clear_out_beside(disk: Path, carried: Path) -> None:
    """A whole prompt leaves the disk while the server runs."""
    with safe_open(carried, "numpy") as file:
        records = [parse_record(bytes(row)) for row in file.get_tensor("slots")]
    (first,) = (
        found["hash"]
        for record in records
        if record is not None
        for found in [call("inspect", disk, "--block", record.key.hex(), "--json").document]
        if found["prefix_position"] == 0
    )
    held = on_disk(disk)
    answer = call("gc", disk, "--prefix", first, "--dry-run", "--json")
    assert answer.one["blocks_removed"] == PROMPT_BLOCKS and on_disk(disk) == held
    answer = call("gc", disk, "--prefix", first, "--json")
    assert answer.code == ExitCode.OK and answer.one["blocks_removed"] == PROMPT_BLOCKS, answer
    assert len(held - on_disk(disk)) == PROMPT_BLOCKS


def _repair_beside(disk: Path) -> None:
    """A damaged block, and nothing else, leaves the disk before anybody asks for it."""
    held = keys_on_disk(disk)
    found = call("inspect", disk, "--block", held[len(held) // 2].hex(), "--json").document
    flip(Path(found["path"]), found["offset"] + 100)
    answer = call("verify", disk, "--repair", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["dropped"] == 1, answer
    assert [each["hash"] for each in answer.one["problems"]] == [found["hash"]]
    assert set(held) - set(keys_on_disk(disk)) == {bytes.fromhex(found["hash"])}


def _check_commands(server: Server, disk: Path, metrics: dict[tuple[str, str], float]) -> None:
    """What the command line says beside a running server."""
    answer = call("top", "--url", server.metrics_url, "--json")
    tiers = {tier["tier"]: tier for tier in answer.document["tiers"]}
    for name, tier in tiers.items():
        assert tier["blocks"] == metrics[PREFIX + "tier_blocks", name]
        assert tier["hits"] == metrics[PREFIX + "loaded_blocks_total", name]
    assert tiers["nvme"]["hits"] > 0 and tiers["nvme"]["is_blocked"] is False
    assert tiers["nvme"]["up_bytes"] >= tiers["nvme"]["hits"] * BLOCK_BYTES
    assert tiers["nvme"]["down_latency_s"] > 0 and tiers["cpu"]["dirty_ratio"] == 0
    assert "used" in call("top", "--url", server.metrics_url, "--once").out
    (namespace,) = call("top", disk, "--json").document["tiers"]
    assert namespace["blocks"] == len(on_disk(disk)) == tiers["nvme"]["blocks"]
    assert namespace["down_bytes"] == tiers["nvme"]["down_bytes"]
    live = call("inspect", disk, "--url", server.metrics_url, "--json").one
    assert live["state"] == "live" and live["dirty_share"] == 0


def _check_metrics(metrics: dict[tuple[str, str], float]) -> None:
    assert metrics[PREFIX + "served_tokens_total", "nvme"] > 0
    assert metrics[PREFIX + "promotion_seconds_count", "nvme"] > 0
    assert metrics[PREFIX + "day_written_bytes", "nvme"] > 0
    names = {name for name, _ in metrics}
    gauges = {PREFIX + m.name for m in METRICS if m.kind is Kind.GAUGE}
    optional = {PREFIX + "write_budget_left_bytes", PREFIX + "remote_resting"}
    assert gauges - optional <= names
