"""The real engine on the CPU platform: tokens with the cascade equal tokens without it.

The model is a small Llama with random weights in float32: a damaged block shows as another token.
Engines take many seconds to start, so one engine goes through several events of its life.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import psutil
import pytest
from support.engine_rig import AT_ANY_SPEED, Answers, Engine, engine_options
from support.kv_bytes import damage
from support.waiting import wait_until

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tools.commands.path_files import load_note
from kvcascade.tools.dev.model import make_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 128 * 4
"""Layers, tokens, K and V, KV heads times head size, float32."""
DEVICE_BLOCKS = 80
CONVERSATIONS = 10
TURN_TOKENS = (400, 700, 1000)
SHARED_TOKENS = 200
DECODE_TOKENS = 120
DAMAGES_MAX = 8
LIMIT_S = 180.0
"""Time in which engines and nodes must do what a test waits for; far more than they need."""


@dataclass(frozen=True)
class Workload:
    """Prompts of several turns; those of one turn begin like those of the turn before."""

    seed: int = 1

    @cached_property
    def turns(self) -> list[list[list[int]]]:
        """Per turn, one prompt per conversation."""
        rng = random.Random(self.seed)
        shared = [rng.randrange(1000) for _ in range(SHARED_TOKENS)]
        texts = [
            shared + [rng.randrange(1000) for _ in range(TURN_TOKENS[-1] - SHARED_TOKENS)]
            for _ in range(CONVERSATIONS)
        ]
        return [[text[:length] for text in texts] for length in TURN_TOKENS]

    @cached_property
    def long_answers(self) -> list[list[int]]:
        """Prompts that are answered at length, together."""
        rng = random.Random(self.seed + 1)
        return [[rng.randrange(1000) for _ in range(600)] for _ in range(8)]


WORKLOAD = Workload()


@dataclass(frozen=True)
class Bench:
    """What all engines share."""

    model: Path
    folder: Path
    shared: Path
    """A folder in shared memory that nobody else uses."""
    expected: list[list[list[int]]]
    """Tokens of the reference, per turn and conversation."""
    expected_long: list[list[int]]

    def engine(self, device_blocks: int = DEVICE_BLOCKS, **extra: Any) -> Engine:
        """An engine with the cascade."""
        log = self.folder / "engine.log"
        return Engine(log, engine_options(self.model, device_blocks, {**AT_ANY_SPEED, **extra}))

    def tiers(self, path: Path, cpu: int = 72, nvme: int = 320) -> list[dict[str, Any]]:
        """Capacities in blocks."""
        return [
            {
                "type": "cpu",
                "capacity": cpu * BLOCK_BYTES + 4096,
                "arena_dir": str(self.shared),
            },
            {
                "type": "nvme",
                "capacity": nvme * (BLOCK_BYTES + 4096) * 16 // 15,
                "path": str(path),
                "min_free": 0,
            },
        ]


def in_batches(engine: Engine, prompts: Sequence[Sequence[int]], size: int = 2) -> Answers:
    """Send prompts a few at a time."""
    return [
        answer
        for start in range(0, len(prompts), size)
        for answer in engine.generate(prompts[start : start + size])
    ]


def tokens(answers: Answers) -> list[list[int]]:
    """What was generated."""
    return [answer["tokens"] for answer in answers]


def aligned(prompt: Sequence[int]) -> int:
    """The most tokens of a prompt that can be cached: whole blocks, and one token is computed."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The model, and what an engine without offloading answers."""
    folder = tmp_path_factory.mktemp("engine")
    model = make_llama(folder / "llama")
    log = folder / "reference.log"
    with Engine(log, engine_options(model, 600, None)) as engine:
        expected = [tokens(engine.generate(turn)) for turn in WORKLOAD.turns]
        long = tokens(engine.generate(WORKLOAD.long_answers, DECODE_TOKENS))
    assert len({tuple(answer) for answer in expected[-1]}) == CONVERSATIONS
    with TemporaryDirectory(dir="/dev/shm") as shared:
        yield Bench(model, folder, Path(shared), expected, long)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory(bench: Bench) -> Iterator[None]:
    yield
    assert not list(bench.shared.iterdir())


def warm_up(engine: Engine, bench: Bench) -> None:
    """Every turn of every conversation, through caches that are all too small."""
    for turn, expected in zip(WORKLOAD.turns, bench.expected, strict=True):
        assert tokens(in_batches(engine, turn)) == expected


def test_life_of_a_cache(bench: Bench, tmp_path: Path) -> None:
    """Eviction everywhere, damage, restart, preemption, kill -9, reset, and restarts after both."""
    tiers = bench.tiers(tmp_path, nvme=100)
    with bench.engine(tiers=tiers) as engine:
        under_eviction(engine, bench)
        after_damage(engine, bench, tmp_path)
        engine.stop()
    back = {"write_mode": "back", "dirty_age_s": 0.1, "offload_prompt_only": False}
    tiers = bench.tiers(tmp_path, nvme=480)  # nothing is evicted from there any more
    with bench.engine(device_blocks=150, tiers=tiers, **back) as engine:
        after_restart(engine, bench)
        under_preemption(engine, bench)
        assert tokens(in_batches(engine, WORKLOAD.turns[-1])) == bench.expected[-1]
        engine.settle()
        engine.kill()
    with bench.engine(tiers=tiers) as engine:
        after_restart(engine, bench)
        warm_up(engine, bench)
        after_reset(engine, bench)
        engine.stop()
    with bench.engine(tiers=tiers) as engine:
        after_restart_of_one_that_was_reset(engine, bench)


def under_eviction(engine: Engine, bench: Bench) -> None:
    """Warm up; the last turn again comes from the lower tiers."""
    warm_up(engine, bench)
    again = in_batches(engine, WORKLOAD.turns[-1][::-1])
    assert tokens(again) == bench.expected[-1][::-1]
    assert sum(answer["cached"] for answer in again) > 0
    engine.reset(connector=False)  # what was asked for last lies in the first tier
    (answer,) = engine.generate([WORKLOAD.turns[-1][0]])
    assert answer["tokens"] == bench.expected[-1][0]
    seen = engine.metrics()
    assert seen["vllm:kvcascade_evicted_blocks[cpu]"] > 0
    assert seen["vllm:kvcascade_evicted_blocks[nvme]"] > 0
    assert seen["vllm:kvcascade_loaded_blocks[cpu]"] > 0
    assert seen["vllm:kvcascade_loaded_blocks[nvme]"] > 0


def after_damage(engine: Engine, bench: Bench, path: Path) -> None:
    """Files change under the engine's feet: misses, counted, and right tokens.

    What is read from the disk is what was asked for last, as far as it was written in time.
    """
    for number in range(DAMAGES_MAX):
        assert damage(path) > 0
        engine.reset(connector=False)
        order = slice(None, None, (-1) ** number)
        for _ in range(2):
            answers = in_batches(engine, WORKLOAD.turns[-1][order])
            assert tokens(answers) == bench.expected[-1][order]
        if engine.metrics()["vllm:kvcascade_promote_corrupt_blocks[nvme]"] > 0:
            return
    raise AssertionError("no damaged block was read")


def after_reset(engine: Engine, bench: Bench) -> None:
    """Nothing from before a reset is ever a hit, in no tier; then the cache fills anew."""
    loaded = engine.metrics()
    engine.reset(connector=True)
    for prompt, expected in list(zip(WORKLOAD.turns[0], bench.expected[0], strict=True))[:4]:
        (answer,) = engine.generate([prompt])
        assert answer["tokens"] == expected
        assert answer["cached"] <= SHARED_TOKENS, "only what came after the reset"
    now = engine.metrics()
    for name in ("vllm:kvcascade_loaded_blocks[cpu]", "vllm:kvcascade_loaded_blocks[nvme]"):
        assert now[name] == loaded[name], "no offloaded block was hit"
    assert tokens(in_batches(engine, WORKLOAD.turns[-1])) == bench.expected[-1]


def after_restart(engine: Engine, bench: Bench) -> None:
    """The first request finds its whole prompt."""
    first = WORKLOAD.turns[-1][-1]
    (answer,) = engine.generate([first])
    assert answer["tokens"] == bench.expected[-1][-1]
    assert answer["cached"] == aligned(first)
    assert tokens(in_batches(engine, WORKLOAD.turns[-1])) == bench.expected[-1]


def after_restart_of_one_that_was_reset(engine: Engine, bench: Bench) -> None:
    """What it stored may be of weights that were updated in place: nothing of it is a hit."""
    (answer,) = engine.generate([WORKLOAD.turns[-1][-1]])
    assert answer["tokens"] == bench.expected[-1][-1] and answer["cached"] == 0


def under_preemption(engine: Engine, bench: Bench) -> None:
    """More tokens than the device holds, decoded together, their blocks offloaded too."""
    for _ in range(2):
        answers = engine.generate(WORKLOAD.long_answers, DECODE_TOKENS)
        assert tokens(answers) == bench.expected_long
    assert engine.metrics()["vllm:num_preemptions"] > 0


def after_a_reset_by_another(engine: Engine, bench: Bench) -> None:
    """Nothing from before it is a hit, not in this engine's own memory either."""

    def is_told() -> bool:
        """Seen at the end of a step, once the writer has carried it out."""
        return engine.metrics()["vllm:kvcascade_resets_by_others"] > 0

    wait_until(is_told, LIMIT_S)
    engine.reset(connector=False)
    (answer,) = engine.generate([WORKLOAD.turns[-1][-1]])
    assert answer["tokens"] == bench.expected[-1][-1]
    assert answer["cached"] == 0
    assert engine.metrics()["vllm:kvcascade_resets_by_others"] == 1


def while_writers_are_killed(pair: Sequence[Engine], bench: Bench, path: Path) -> None:
    """Both engines read and write when the node that writes the path dies: no request fails."""
    for _ in range(2):
        node, is_dead = writer_of(path), Event()
        enough = node.io_counters().read_chars + 8 * BLOCK_BYTES
        with ThreadPoolExecutor() as threads:
            running = [threads.submit(ask_until, is_dead, each) for each in pair]
            try:
                wait_until(partial(has_read, node, enough), LIMIT_S)
                node.kill()
            finally:
                is_dead.set()
        for each in running:
            assert all(answers == bench.expected[-1] for answers in each.result())
        for engine in pair:
            engine.settle()
        wait_until(partial(has_next_writer, path, node), LIMIT_S)


def ask_until(is_over: Event, engine: Engine) -> list[list[list[int]]]:
    """Ask for the last turn again and again; the tokens of each time."""
    found: list[list[list[int]]] = []
    while not is_over.is_set():
        engine.reset(connector=False)
        found.append(tokens(in_batches(engine, WORKLOAD.turns[-1])))
    return found


def writer_of(path: Path) -> psutil.Process:
    """The process that writes a path."""
    note = load_note(RealFileSystem(), path)
    assert note is not None
    return psutil.Process(note.pid)


def has_next_writer(path: Path, former: psutil.Process) -> bool:
    """Whether another process than that one writes a path."""
    note = load_note(RealFileSystem(), path)
    return note is not None and note.pid != former.pid and psutil.pid_exists(note.pid)


def has_read(process: psutil.Process, size: int) -> bool:
    """Whether a process has read so many bytes."""
    return bool(process.io_counters().read_chars >= size)


def test_stores_refused_while_everything_is_busy(bench: Bench, tmp_path: Path) -> None:
    """A first tier of a dozen blocks under requests of thirty."""
    with bench.engine(tiers=bench.tiers(tmp_path, cpu=12)) as engine:
        for _ in range(2):
            for turn, expected in zip(WORKLOAD.turns, bench.expected, strict=True):
                assert tokens(engine.generate(turn)) == expected
        seen = engine.metrics()
        assert seen["vllm:kvcascade_store_refused_busy"] > 0
        engine.stop()


def test_two_engines_share_one_tier(bench: Bench, tmp_path: Path) -> None:
    """Each engine hits blocks that the other demoted, and none that it reset.

    Their writers are killed under load. One engine is killed; the other goes on and finds its
    blocks.
    """
    tiers = bench.tiers(tmp_path, nvme=1600)  # nothing need leave it
    back: dict[str, Any] = {"write_mode": "back", "dirty_age_s": 0.1}
    with bench.engine(tiers=tiers, **back) as one, bench.engine(tiers=tiers, **back) as other:
        warm_up(one, bench)
        one.settle()
        after_restart(other, bench)
        assert other.metrics()["vllm:kvcascade_loaded_blocks[nvme]"] > 0
        one.reset(connector=True)
        after_a_reset_by_another(other, bench)
        warm_up(one, bench)
        one.settle()
        after_restart(other, bench)
        with_more = [[*prompt, 5, 6, 7] * 2 for prompt in WORKLOAD.turns[0][:3]]
        answers = tokens(in_batches(other, with_more))
        assert other.metrics()["vllm:kvcascade_stored_blocks"] > 0
        assert tokens(in_batches(one, with_more)) == answers
        while_writers_are_killed((one, other), bench, tmp_path)
        other.kill()
        one.reset(connector=False)
        assert tokens(in_batches(one, with_more)) == answers
        warm_up(one, bench)
        seen = one.metrics()
        assert seen["vllm:kvcascade_loaded_blocks[nvme]"] > 0
        assert seen.get("vllm:kvcascade_promote_corrupt_blocks[nvme]", 0) == 0
        one.stop()
