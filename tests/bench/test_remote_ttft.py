"""The time to the first token beside a remote tier, with servers that only remember."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcascade.tools.dev.bench import remote_ttft
from kvcascade.tools.dev.bench.engine.engine_runs import ANSWER_TOKENS, IDLE_AFTER_S, Servers
from kvcascade.tools.dev.bench.remote_ttft import (
    NONE,
    OUTAGES,
    RECOVERY_PAUSE_S,
    REMOTE,
    SLOW_LINK,
    Engines,
    Pair,
    held_prompts,
    measure,
    shown,
)
from kvcascade.tools.dev.server import Completion

EACH = 2
HELD = held_prompts(EACH)


@dataclass
class World:
    """A remote tier, its link, and what happens, in order."""

    events: list[str] = field(default_factory=list)
    is_stopped: bool = False
    rests: int = 2
    """Number of prompts after an outage that the tier does not look at."""

    def limit(self, rate: str | None) -> None:
        self.events.append(f"link {rate}")

    def signal(self, number: int) -> None:
        self.is_stopped = number == signal.SIGSTOP
        self.events.append(signal.Signals(number).name)


@dataclass
class Remembering:
    """A server; `held` are the prompts in its remote tier."""

    name: str
    world: World
    held: Sequence[Sequence[int]]
    tokens: tuple[int, ...] = (1, 2)

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> Completion:
        assert answer_tokens == ANSWER_TOKENS
        world = self.world
        if not world.events or world.events[-1] != self.name:
            world.events.append(self.name)
        has_it = prompt in self.held and not world.is_stopped
        if has_it and "SIGCONT" in world.events and world.rests:
            world.rests -= 1
            has_it = False
        return Completion(
            len(prompt), len(prompt) - 1 if has_it else 0, 0.1 if has_it else 0.4, self.tokens
        )


def pair(world: World, slept: list[float], tokens: tuple[int, ...] = (1, 2)) -> Pair:
    servers = {
        REMOTE: Remembering(REMOTE, world, HELD).complete,
        NONE: Remembering(NONE, world, [], tokens).complete,
    }
    return Pair(servers, slept.append)


def test_the_rows_and_what_happens_between_them() -> None:
    world, slept = World(), list[float]()
    rows = list(measure(pair(world, slept), world.limit, world.signal, HELD, EACH))
    hits, new, slow, mended, first, later, recovery, *others = rows
    assert len(others) == 3 * (OUTAGES - 1)
    assert [row["ratio"] for row in (hits, slow, mended)] == [0.25] * 3
    assert [row["ratio"] for row in (new, first, later)] == [1.0] * 3
    prompts = [len(row["ttft_ms"][REMOTE]) for row in rows if "ttft_ms" in row]
    assert prompts == [2, 2, 4, 2, *[1, 2] * OUTAGES]
    assert hits["cached_tokens"] == hits["prompt_tokens"] - EACH and not new["cached_tokens"]
    assert recovery["recovery_s"] is not None and slept.count(RECOVERY_PAUSE_S) == 2 + OUTAGES
    assert slept.count(IDLE_AFTER_S) == 2 * sum(prompts)
    happened = [event for event in world.events if event not in (REMOTE, NONE)]
    outages = ["SIGSTOP", "SIGCONT"] * OUTAGES
    assert happened == [f"link {SLOW_LINK}", "link None", *outages]


def test_answers_that_differ_are_counted() -> None:
    world = World()
    assert pair(world, []).row("equal", HELD[:3])["wrong_answers"] == 0
    assert pair(world, [], (1, 3)).row("unlike", HELD[:3])["wrong_answers"] == 3


def test_the_server_goes_on_even_if_a_row_fails() -> None:
    world = World()

    class Failing(Pair):
        def row(self, case: str, asked: Sequence[Sequence[int]]) -> dict[str, object]:
            if world.is_stopped:
                raise OSError("it does not answer")
            return {}

    with pytest.raises(OSError):
        list(measure(Failing({}), world.limit, world.signal, HELD, EACH))
    assert not world.is_stopped


def test_a_tier_that_does_not_recover_is_said() -> None:
    world = World(events=["SIGCONT"], rests=len(HELD))
    row = pair(world, []).recovery("goes on", HELD)
    assert row["recovery_s"] is None and shown(row) == "| goes on | None | | | |"


@pytest.mark.parametrize("name", [REMOTE, NONE])
def test_servers_get_the_configuration_of_a_connector(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    @contextmanager
    def running(self: Servers, contender: str, options: Any, warm_up: Any) -> Iterator[None]:
        started.append(options)
        yield

    monkeypatch.setattr(Servers, "running", running)
    remote = {"type": "remote", "url": "redis://127.0.0.1:6379"}
    with ExitStack() as stack:
        Engines(tmp_path, remote, layers=1, kv_heads=1).started(name, stack)
    transfer = started[0]["kv_transfer_config"]
    extra = transfer.pop("kv_connector_extra_config")
    assert transfer == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert (extra["tiers"][-1] == remote) == (name == REMOTE)


def test_without_a_server_it_ends_with_a_sentence() -> None:
    with pytest.raises(SystemExit, match="redis-server"):
        remote_ttft.main(["--binary", ""])
