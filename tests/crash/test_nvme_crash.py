"""`kill -9` in the middle of writing, and the loss of power."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.children import environment
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import Rig, config_for, key

from kvcascade.errors import CorruptionError
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.segments.store import Durability

KILL_CYCLES = 3
POWER_CYCLES = 12
MIXED_CYCLES = 30
SOAK_CYCLES = 500
SLOTS = 128

_WRITER = """
import random, sys
from pathlib import Path
from support.nvme_rig import Rig, config_for, key
rig = Rig(config_for([Path(sys.argv[1])], slots=128, per_segment=16))
rng = random.Random(int(sys.argv[2]))
while True:
    if rng.random() < 0.02:
        print("reset", flush=True)
        rig.reset()
    hashes = [key(i) for i in rng.sample(range(1000), 12)]
    new = [h for h in hashes if rig.policy.get(h) is None]
    rig.store(new)
    print(" ".join(str(int.from_bytes(h[:4], "big")) for h in new), flush=True)
"""


def test_kill_nine_loses_nothing_acknowledged(tmp_path: Path) -> None:
    config = config_for([tmp_path], slots=SLOTS, per_segment=16)
    for cycle in range(KILL_CYCLES):
        rng = random.Random(cycle)
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(cycle)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(rng.randint(20, 200))]
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        whole = [line.strip() for line in lines if line.endswith("\n")]
        assert len(whole) >= 20
        rig = Rig(config)
        assert not rig.tier.report.was_clean
        rig.check_sums()
        if "reset" not in whole:  # what is stored after one is not for the next to start
            stored = [key(int(number)) for line in whole for number in line.split()]
            assert all(rig.check(block_hash) for block_hash in stored[-SLOTS // 2 :])
        present = sum(rig.check(key(i)) for i in range(1000))
        assert present == len(rig.policy), "what is listed is there and right"
        assert rig.tier.store.counters.corrupt == 0
        rig.close(clean=cycle % 2 == 0)


@pytest.mark.parametrize("durability", list(Durability))
def test_loss_of_power(tmp_path: Path, durability: Durability) -> None:
    lose_power(tmp_path, durability, POWER_CYCLES)


@pytest.mark.soak
@pytest.mark.parametrize("durability", list(Durability))
def test_loss_of_power_for_long(tmp_path: Path, durability: Durability) -> None:
    lose_power(tmp_path, durability, SOAK_CYCLES)


def lose_power(tmp_path: Path, durability: Durability, cycles: int) -> None:
    """Losses of power; `POWER` loses nothing that was acknowledged, neither ever lies."""
    fs = MemoryFileSystem()
    config = replace(config_for([tmp_path], slots=SLOTS, per_segment=16), durability=durability)
    lost = 0
    for cycle in range(cycles):
        rng = random.Random(cycle)
        rig = Rig(config, fs=fs)
        stored: list[BlockHash] = []
        for _ in range(rng.randint(1, 12)):
            hashes = [key(i) for i in rng.sample(range(1000), 10)]
            new = [h for h in hashes if rig.policy.get(h) is None]
            assert set(rig.store(new)) <= {BlockOutcome.OK}
            stored += new
        rig.close(clean=False)
        fs.lose_power(rng)
        rig = Rig(config, fs=fs)
        rig.check_sums()
        here = [rig.check(block_hash) for block_hash in stored[-SLOTS // 2 :]]
        lost += here.count(False)
        for i in range(1000):
            rig.check(key(i))
        rig.check_sums()
        rig.close(clean=bool(cycle % 2))
    print(
        f"{cycles} losses of power, durability {durability.value}: {lost} acknowledged blocks lost"
    )
    assert (lost == 0) == (durability is Durability.POWER), "the simulation must bite"


def test_an_index_and_segments_of_different_moments(tmp_path: Path) -> None:
    lose_index(tmp_path, MIXED_CYCLES)


@pytest.mark.soak
def test_an_index_and_segments_of_different_moments_for_long(tmp_path: Path) -> None:
    lose_index(tmp_path, SOAK_CYCLES)


def lose_index(tmp_path: Path, cycles: int) -> None:
    """Power is lost where nothing was synced: the index that survives is older than the payload, or
    some of its pages are. What opens serves right bytes; what does not is refused, in one sentence.
    """
    fs = MemoryFileSystem()
    config = config_for([tmp_path], slots=SLOTS, per_segment=16)
    outcomes = {"served": 0, "refused": 0}
    for cycle in range(cycles):
        rng = random.Random(cycle)
        rig = Rig(config, fs=fs)
        data = rig.tier.namespace.index_folder / "data.mdb"
        moments = []
        for _ in range(rng.randint(2, 6)):
            hashes = [key(i) for i in rng.sample(range(400), 20)]
            rig.store([h for h in hashes if rig.policy.get(h) is None])
            moments.append(data.read_bytes())
        rig.close(clean=False)
        fs.lose_power(rng)
        data.write_bytes(mixed(moments, rng) if cycle % 2 else rng.choice(moments))
        try:
            rig = Rig(config, fs=fs)
        except CorruptionError as refusal:
            assert "--rebuild-index" in str(refusal)
            outcomes["refused"] += 1
            data.write_bytes(moments[-1])
            rig = Rig(config, fs=fs)
        outcomes["served"] += sum(rig.check(key(i)) for i in range(400))
        rig.check_sums()
        rig.close(clean=bool(cycle % 3))
    print(f"{cycles} losses of power: {outcomes}")
    assert all(outcomes.values()), "the simulation must bite"


def mixed(moments: list[bytes], rng: random.Random) -> bytes:
    """A file whose pages were written at different times; some were never written."""
    newest = bytearray(moments[-1])
    for start in range(8192, len(newest), 4096):
        if rng.random() < 0.2:
            page = rng.choice(moments)[start : start + 4096]
            newest[start : start + 4096] = page.ljust(4096, b"\0")
    return bytes(newest)
