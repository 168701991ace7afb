"""Two servers share a path and a remote folder. Clients ask them, and everything fails around them.

Answers are compared with those of an engine without a cascade. KVCASCADE_FAULTS sets the number of
faults, and KVCASCADE_SEED repeats a run as far as its schedule allows.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event, Lock
from typing import Any

import psutil
import pytest
from support.cache_rig import call_outside, flip
from support.engine_rig import Engine, engine_options
from support.server_rig import VOCABULARY, Server, words
from support.waiting import wait_until

from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.dev.server import ServerError, served_model

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(0)]

FAULTS = int(os.environ.get("KVCASCADE_FAULTS", "60"))
SEED = int(os.environ.get("KVCASCADE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
BLOCK_TOKENS, BLOCK_BYTES = 32, 4 * 32 * 2 * 128 * 4
CONVERSATIONS, TURNS, ANSWER_TOKENS = 24, 8, 6
FAVOURITES = 6
"""Conversations that half of the requests are about."""
CLIENTS, SERVERS = 4, 2
DEVICE_BLOCKS, CPU_BLOCKS = 60, 60
ANSWERS_BETWEEN = 15
"""Right answers of each server after a fault. A server that hangs gives none."""
ANSWER_LIMIT_S = 120.0
CANCELLED_SHARE = 0.15
FLIPS = 12
"""Bytes that are damaged at a time."""
NODES = ("path_main", "remote_main")
Key = tuple[int, int]


def prompt(key: Key) -> list[int]:
    """A conversation up to one of its turns; several begin with the same words."""
    conversation, turns = key
    found = words(f"begin {conversation % 4}", 4 * BLOCK_TOKENS)
    for turn in range(turns + 1):
        found += words(f"{conversation} {turn}", 60 + 17 * (turn % 3))
    return found


def expected_answers(folder: Path, model: Path) -> dict[Key, tuple[int, ...]]:
    keys = [(c, t) for c in range(CONVERSATIONS) for t in range(TURNS)]
    with Engine(folder / "reference.log", engine_options(model, 400, None)) as engine:
        answers = engine.generate([prompt(key) for key in keys], ANSWER_TOKENS)
    return {key: tuple(found["tokens"]) for key, found in zip(keys, answers, strict=True)}


@dataclass
class Place:
    """A server that is started again and again."""

    start: Callable[[], Server]
    server: Server
    life: int = 0
    """Raised before it is taken down: requests of an earlier life may fail."""
    right: int = 0

    def nodes(self) -> list[psutil.Process]:
        found = []
        for number in self.server.process.process_numbers():
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(number)
                if any(name in " ".join(process.cmdline()) for name in NODES):
                    found.append(process)
        return found

    def end(self) -> None:
        self.server.__exit__()

    def replace(self, end: Callable[[], object]) -> None:
        self.life += 1
        try:
            end()
        finally:
            self.end()
        self.server = self.start()
        self.server.__enter__()
        self.life += 1

    @property
    def is_up(self) -> bool:
        return self.life % 2 == 0


@dataclass
class Storm:
    """Clients, and what they were told."""

    places: Sequence[Place]
    expected: dict[Key, tuple[int, ...]]
    stop: Event = field(default_factory=Event)
    wrong: list[str] = field(default_factory=list)
    cached: int = 0
    _lock: Lock = field(default_factory=Lock)

    def ask(self, number: int) -> None:
        """Be a client, until all are told to stop."""
        rng = random.Random(f"{SEED} {number}")
        turns = dict.fromkeys(range(CONVERSATIONS), 0)
        while not self.stop.wait(0.01):
            place = rng.choice(self.places)
            life, process = place.life, place.server.process
            if not place.is_up:
                continue
            one = rng.randrange(rng.choice((FAVOURITES, CONVERSATIONS)))
            turns[one] = (turns[one] + (rng.random() < 0.4)) % TURNS
            key = one, turns[one]
            if rng.random() < CANCELLED_SHARE:
                _cancel(process.port, prompt(key), rng.randrange(3))
                continue
            try:
                answer = process.complete(prompt(key), ANSWER_TOKENS)
            except ServerError as error:
                if life == place.life:
                    self.wrong.append(f"{key}: {error}")
                continue
            with self._lock:
                place.right += answer.tokens == self.expected[key]
                self.cached += answer.cached_tokens
                if answer.tokens != self.expected[key]:
                    self.wrong.append(f"{key}: {answer}, not {self.expected[key]}")

    def go_on(self) -> None:
        """Wait until each server has given some right answers more."""
        before = [place.right for place in self.places]

        def is_so() -> bool:
            pairs = zip(self.places, before, strict=True)
            return bool(self.wrong) or all(p.right >= b + ANSWERS_BETWEEN for p, b in pairs)

        wait_until(is_so, ANSWER_LIMIT_S)
        assert not self.wrong, self.wrong[:3]


def _cancel(port: int, tokens: list[int], lines: int) -> None:
    """Leave a request after some lines of its answer."""
    body = {"model": "model", "prompt": tokens, "max_tokens": 100, "stream": True}
    headers = {"Content-Type": "application/json"}
    with suppress(OSError, http.client.HTTPException):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
            if lines:
                answer = connection.getresponse()
                for _ in range(lines):
                    answer.readline()


@dataclass
class Faults:
    """Faults of a run. Each leaves the servers running."""

    storm: Storm
    disk: Path
    share: Path

    def kill_nodes(self, place: Place) -> None:
        for node in place.nodes():
            with suppress(psutil.NoSuchProcess):
                node.kill()

    def stop_nodes_for_a_while(self, place: Place) -> None:
        nodes = place.nodes()
        for node in nodes:
            node.suspend()
        try:
            self.storm.go_on()
        finally:
            for node in nodes:
                with suppress(psutil.NoSuchProcess):
                    node.resume()

    def stop(self, place: Place) -> None:
        place.replace(lambda: place.server.process.stop(signal.SIGTERM))

    def kill(self, place: Place) -> None:
        place.replace(place.server.process.kill)

    def reset(self, place: Place) -> None:
        port = place.server.process.port
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/reset_prefix_cache?reset_external=true")
            assert connection.getresponse().status == http.client.OK

    def verify(self, place: Place) -> None:
        assert call_outside("verify", self.disk).code in (ExitCode.OK, ExitCode.PROBLEMS)

    def evict(self, place: Place) -> None:
        assert call_outside("gc", self.disk, "--max-size", "32MiB").code == ExitCode.OK

    def unmount_for_a_while(self, place: Place) -> None:
        away = self.share.with_name("away")
        self.share.rename(away)
        try:
            self.storm.go_on()
        finally:
            shutil.rmtree(self.share, ignore_errors=True)
            away.rename(self.share)

    def damage(self, place: Place) -> None:
        rng = random.Random(f"{SEED} {place.right}")
        found = [path for path in self.share.rglob("*") if path.is_file()]
        found += self.disk.glob("*/segments/*")
        for path in rng.sample(found, min(FLIPS, len(found))):
            with suppress(FileNotFoundError):  # another process has removed it
                if size := path.stat().st_size:
                    flip(path, rng.randrange(size))


KINDS: tuple[Callable[[Faults, Place], None], ...] = (
    *(Faults.kill_nodes, Faults.stop_nodes_for_a_while, Faults.stop, Faults.kill, Faults.reset),
    *(Faults.verify, Faults.evict, Faults.unmount_for_a_while, Faults.damage),
)


def _extra(disk: Path, share: Path) -> dict[str, Any]:
    return {
        "load_or_recompute": False,
        "tiers": [
            {"type": "cpu", "capacity": CPU_BLOCKS * BLOCK_BYTES},
            {"type": "nvme", "capacity": "64MiB", "path": str(disk), "min_free": 0},
            {"type": "remote", "url": f"file://{share}", "writes": "through"},
        ],
    }


def test_every_answer_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"\nKVCASCADE_SEED={SEED}")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for the request that resets
    model = served_model(tmp_path / "model", VOCABULARY, seed=9)
    expected = expected_answers(tmp_path, model)
    disk, share = tmp_path / "disk", tmp_path / "share"
    share.mkdir()
    options = {"num_gpu_blocks_override": DEVICE_BLOCKS, "max_model_len": 1500}

    def starter(number: int) -> Callable[[], Server]:
        log = tmp_path / f"server {number}.log"
        more: dict[str, Any] = {**options, "shutdown_timeout": 20}
        return lambda: Server(log, model, _extra(disk, share), **more)

    done: Counter[str] = Counter()
    rng = random.Random(SEED)
    with ExitStack() as stack:
        places = [Place(start, start()) for start in map(starter, range(SERVERS))]
        for place in places:
            stack.callback(place.end)
            place.server.__enter__()
        storm = Storm(places, expected)
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        stack.callback(storm.stop.set)
        asking = [clients.submit(storm.ask, number) for number in range(CLIENTS)]
        storm.go_on()
        faults = Faults(storm, disk, share)
        rounds = [rng.sample(KINDS, len(KINDS)) for _ in range(FAULTS // len(KINDS) + 1)]
        for kind in list(chain(*rounds))[:FAULTS]:
            done[kind.__name__] += 1
            kind(faults, rng.choice(places))
            storm.go_on()
        storm.stop.set()
        for client in asking:
            client.result()
    answers = sum(place.right for place in places)
    print(f"{answers} right answers, {storm.cached} tokens from a cache; {done}")
    assert storm.cached
