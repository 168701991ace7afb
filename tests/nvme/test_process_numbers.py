"""LMDB goes by the numbers of processes: two that have one, and one that gets its own back."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.children import Start
from support.mover_rig import MoverRig
from support.nvme_rig import Rig, config_for, key

from kvcascade.errors import InUseError, TierIOError
from kvcascade.handlers.node.mover import STARTS_PER_MINUTE
from kvcascade.handlers.node.mover_child import Connection
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.index.index_environment import open_environment
from kvcascade.tiers.nvme.writer.owners import MAX_PROCESSES

MAX_PID = 1 << 22

LOCK_NUMBERS = """
import fcntl, sys
table = open(sys.argv[1], "r+b")
bounds = list(map(int, sys.argv[2:]))
for first, end in zip(bounds[::2], bounds[1::2]):
    fcntl.lockf(table, fcntl.LOCK_EX | fcntl.LOCK_NB, end - first, first)
print("locked", flush=True)
sys.stdin.read()
"""
"""Lock what processes of these numbers (first, end, and so on) lock that have the index open."""

HOLD_TRANSACTION = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=4, map_size=1 << 27)
held = env.begin()
print("reading", flush=True)
sys.stdin.read()
"""
KEEP_OPEN = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=4, map_size=1 << 27, readonly=True)
print("open", flush=True)
for _ in sys.stdin:
    print(env.readers().replace("\\n", ";"), flush=True)
"""


def table_of(rig: Rig) -> Path:
    return rig.tier.index.path / "lock.mdb"


def filled(folder: Path) -> Rig:
    rig = Rig(config_for([folder], slots=32))
    rig.store_bit_by_bit([key(i) for i in range(8)])
    return rig


def test_another_container_has_a_process_of_this_number(tmp_path: Path, child: Start) -> None:
    rig = filled(tmp_path)
    table = table_of(rig)
    rig.close()
    other = child(LOCK_NUMBERS, table, os.getpid(), os.getpid() + 1)
    with pytest.raises(InUseError, match=r"same number .* another PID namespace .*hostPID: true"):
        Rig(rig.config)
    other.kill()
    other.wait()
    again = Rig(rig.config)
    assert again.check(key(0))
    again.close()


class CountingRig(MoverRig):
    """Says when a mover is started for the second time."""

    launches = 0
    on_second: Callable[[], object] = staticmethod(lambda: None)

    def _launch(self) -> Connection:
        self.launches += 1
        if self.launches == 2:
            self.on_second()
        return super()._launch()


def others_numbers(folder: Path, child: Start) -> subprocess.Popen[str]:
    """Take all numbers that a mover of this process may get."""
    rig = filled(folder)
    table = table_of(rig)
    rig.close()
    return child(LOCK_NUMBERS, table, 1, os.getpid(), os.getpid() + 1, MAX_PID)


def test_a_mover_is_started_again_with_another_number(tmp_path: Path, child: Start) -> None:
    others = others_numbers(tmp_path, child)

    class Rig(CountingRig):
        def on_second(self) -> None:
            others.kill()
            others.wait()

    rig = Rig(tmp_path, has_process=True)
    assert rig.launches == 2
    keys = [key(100)]
    rig.land(keys, rig.store(1, keys))
    assert rig.load(2, keys) == [True]
    rig.close()


def test_a_mover_that_finds_no_number_says_so(
    tmp_path: Path, child: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    others_numbers(tmp_path, child)
    with pytest.raises(TierIOError, match="its own message says why"):
        CountingRig(tmp_path, has_process=True)
    said = capfd.readouterr().err
    assert said.count("another PID namespace") == STARTS_PER_MINUTE


def readers(watcher: subprocess.Popen[str]) -> list[list[str]]:
    """(number, thread, transaction) of every line in LMDB's table."""
    assert watcher.stdin is not None and watcher.stdout is not None
    watcher.stdin.write("\n")
    watcher.stdin.flush()
    return [line.split() for line in watcher.stdout.readline().split(";")[1:] if line.strip()]


def leave_behind(table: Path, child: Start) -> None:
    """As if this process had been killed in a transaction, and had come back with its number."""
    dead = child(HOLD_TRANSACTION, table.parent)
    dead.kill()
    dead.wait()
    content = bytearray(table.read_bytes())
    places = [
        place
        for place in range(8, len(content), 64)
        if struct.unpack_from("<i", content, place) == (dead.pid,)
    ]
    assert places
    with table.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(struct.pack("<i", os.getpid()))


def test_what_a_dead_engine_of_this_number_held_is_let_go(tmp_path: Path, child: Start) -> None:
    rig = filled(tmp_path)
    table = table_of(rig)
    rig.close()
    watcher = child(KEEP_OPEN, table.parent)  # a long `verify`: LMDB keeps the table
    leave_behind(table, child)
    assert any(pid == str(os.getpid()) and held != "-" for pid, _, held in readers(watcher))
    rig = Rig(rig.config)
    rig.maintain()
    assert not any(pid == str(os.getpid()) and held != "-" for pid, _, held in readers(watcher))
    for first in range(100, 400, 4):
        assert rig.store([key(first + i) for i in range(4)]) == [BlockOutcome.OK] * 4
        rig.maintain()
    rig.close()


def test_an_ordinary_start_needs_no_process_for_that(
    tmp_path: Path, child: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = filled(tmp_path)
    watcher = child(KEEP_OPEN, rig.tier.index.path)
    rig.close()
    monkeypatch.setattr(subprocess, "run", None)
    again = Rig(rig.config)
    assert again.check(key(0))
    again.close()
    assert not readers(watcher)


def test_where_that_process_cannot_be_started(
    tmp_path: Path, child: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts all the same."""
    rig = filled(tmp_path)
    table = table_of(rig)
    rig.close()
    child(KEEP_OPEN, table.parent)
    leave_behind(table, child)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    again = Rig(rig.config)
    assert again.check(key(0))
    again.close()


def test_every_engine_that_may_share_a_tier_finds_room_in_the_table_of_readers(
    tmp_path: Path,
) -> None:
    environment = open_environment(tmp_path, 1 << 20, is_durable=False)
    lines_of_an_engine_and_its_mover = 3
    assert environment.info()["max_readers"] >= MAX_PROCESSES * lines_of_an_engine_and_its_mover
    environment.close()
