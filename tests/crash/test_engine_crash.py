"""`kill -9` of the scheduler, of a worker, of all, at random moments of an engine's life.

After every kill each block that the tier lists is read back and compared, free slots are counted,
and nothing may be left in shared memory or beside the data. `make soak` runs many cycles.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.crash_rig import Engine, Known, Setup, read_all

from kvcascade.tiers.cpu.arena_file import sweep

TEST_CYCLES = 10
CYCLES_FACTOR_MAX = 3
"""Limit of all cycles, as a multiple of those that are asked for."""
SOAK_CYCLES = int(os.environ.get("KVCASCADE_CRASH_CYCLES", "200"))
ROOMY, TIGHT = 512, 64
"""Slots on disk: more than there are blocks, and so few that most of the work is eviction."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Cycles:
    """Kills engines over two tiers, and keeps count."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self._shared = shared
        self._setups = [
            Setup(folder / str(slots), shared, slots, f"crash-{slots}") for slots in (ROOMY, TIGHT)
        ]
        for setup in self._setups:
            setup.path.mkdir()
        self._known = [Known() for _ in self._setups]
        self.checked_blocks = 0
        self.kills = {"scheduler": 0, "worker": 0, "both": 0}

    @property
    def loaded_blocks(self) -> int:
        """Blocks that workers loaded and compared."""
        return sum(known.loaded_blocks for known in self._known)

    def run(self, seed: int) -> None:
        """One engine, killed; then everything it left is looked at."""
        rng = random.Random(seed)
        which = seed % len(self._setups)
        setup, known = self._setups[which], self._known[which]
        engine = Engine(setup, known, seed)
        try:
            self._kill(engine, known, rng)
        finally:
            for process in engine.processes:
                if process.exitcode is None:
                    process.kill()
        self._look_at_leftovers(setup, known, rng)
        engine.assert_nobody_left()

    def _kill(self, engine: Engine, known: Known, rng: random.Random) -> None:
        try:
            engine.listen(rng.choice((0, 1, rng.randint(2, 40), rng.randint(40, 120))))
            engine.listen_for(rng.random() * 0.01)
        except EOFError:
            raise AssertionError("the engine ended by itself") from None
        whom = rng.choice(list(self.kills))
        self.kills[whom] += 1
        victims = {
            "scheduler": [engine.scheduler],
            "worker": [rng.choice(engine.workers)],
            "both": engine.processes,
        }[whom]
        for process in victims:
            process.kill()
        if not known.is_open:  # nobody may wait a minute for a worker that will never come
            engine.scheduler.kill()
        engine.finish()

    def _look_at_leftovers(self, setup: Setup, known: Known, rng: random.Random) -> None:
        assert not known.wrong, "a worker loaded wrong bytes"
        if known.is_open:
            assert not os.listdir(self._shared), "shared memory is left"
        else:  # killed before everybody was in: the next start removes what it left
            sweep(str(self._shared))
            assert not os.listdir(self._shared)
        if not list(setup.path.glob("*/namespace.json")):
            return
        held = read_all(setup, close_clean=rng.random() < 0.5)
        self.checked_blocks += len(held)
        if setup.nvme_slots == ROOMY:
            assert known.stored <= held, "an acknowledged block is lost"
        known.stored = set(held)
        files = [path for path in setup.path.rglob("*") if path.is_file()]
        assert not [path for path in files if path.suffix in (".tmp", ".new")]


def run_cycles(cycles: int, first_seed: int, folder: Path, shared: Path) -> None:
    """Kill at least `cycles` engines, each with a seed of its own.

    If resets emptied the disk before every look, further engines follow, so that blocks are
    compared in each run.
    """
    began_s = time.monotonic()
    done = Cycles(folder, shared)
    for seed in range(first_seed, first_seed + CYCLES_FACTOR_MAX * cycles):
        if seed >= first_seed + cycles and done.checked_blocks and done.loaded_blocks:
            break
        try:
            done.run(seed)
        except BaseException:
            print(f"\ncycle with seed {seed}, of {first_seed} and later")
            raise
    print(
        f"\n{sum(done.kills.values())} kills {done.kills} in {time.monotonic() - began_s:.0f} s: "
        f"{done.checked_blocks} blocks read back from disk, {done.loaded_blocks} loaded by "
        "workers, 0 wrong"
    )
    assert done.checked_blocks and done.loaded_blocks


def test_kill_nine_at_random_moments(tmp_path: Path, shared: Path) -> None:
    run_cycles(TEST_CYCLES, random.SystemRandom().randrange(1 << 30), tmp_path, shared)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_kill_nine_for_long(tmp_path: Path, shared: Path) -> None:
    run_cycles(SOAK_CYCLES, random.SystemRandom().randrange(1 << 30), tmp_path, shared)


def test_a_worker_of_a_dead_engine_still_copies_when_the_next_one_starts(
    tmp_path: Path, shared: Path
) -> None:
    """The scheduler dies while a worker is stopped in the middle of its work; an engine of the same
    name starts, and the old worker goes on: it writes into memory that nobody else has."""
    setup, known = Setup(tmp_path, shared, ROOMY, "one-name"), Known()
    old = Engine(setup, known, seed=1)
    engines = [old]
    try:
        old.listen(30)
        os.kill(old.workers[0].pid or 0, signal.SIGSTOP)
        old.scheduler.kill()
        old.scheduler.join()
        old.listen_to_the_end()
        assert not os.listdir(shared)
        engines.append(Engine(setup, known, seed=2))
        engines[1].listen(30)
        os.kill(old.workers[0].pid or 0, signal.SIGCONT)
        engines[1].listen(60)
        assert not known.wrong
        old.finish()
        engines[1].workers[0].kill()
        engines[1].finish()
    finally:
        for engine in engines:
            for process in engine.processes:
                process.kill()
    assert not known.wrong and not os.listdir(shared)
    assert known.stored <= read_all(setup, close_clean=True)
