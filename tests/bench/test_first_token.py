"""The measurement behind the README's picture, with servers that only remember, and the picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from support.bench_scale import SMOKE

from kvcascade.tools.commands.bench.bench_results import (
    LMCACHE,
    NONE,
    OURS,
    VLLM,
    Row,
    Table,
    document,
)
from kvcascade.tools.dev.bench.engine import first_token
from kvcascade.tools.dev.bench.engine.engine_runs import IDLE_AFTER_S, Servers
from kvcascade.tools.dev.bench.engine.first_token import (
    MEASUREMENT,
    MOMENTS,
    ORDER,
    UNLIKE,
    WARM_UPS,
    Lifetimes,
    scale_of,
)
from kvcascade.tools.dev.bench.first_token_plot import draw, medians
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.scale import FULL
from kvcascade.tools.dev.server import Completion, ServerProcess

SCALE = scale_of(SMOKE.restart)


@dataclass
class Remembering:
    """A server that knows which prompts it, or another one over the same folder, has answered."""

    name: str
    seen: set[tuple[int, ...]]
    events: list[str]
    tokens: tuple[int, ...] = (1, 2)
    is_running: bool = True

    def complete_all(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int, clients: int
    ) -> list[Completion]:
        assert len(prompts) == clients == 1
        self.events.append(self.name)
        found: list[Completion] = []
        for prompt in map(tuple, prompts):
            is_known = prompt in self.seen
            self.seen.add(prompt)
            cached = len(prompt) - 12 if is_known else 0
            found.append(Completion(len(prompt), cached, 0.1 if is_known else 2.0, self.tokens))
        return found

    def stop(self) -> None:
        self.events.append("stop")
        self.is_running = False

    def kill(self) -> None:
        self.events.append("kill")
        self.is_running = False


@dataclass
class RememberingServers(Servers):
    """Starts servers that remember, unless a contender has no cache."""

    folder: Path
    events: list[str] = field(default_factory=list)
    tokens: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        super().__init__(self.folder, True, lambda line: None)
        self.seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in ORDER}

    @contextmanager
    def running(
        self, contender: str, options: dict[str, Any], warm_up: Sequence[list[int]] = ()
    ) -> Iterator[ServerProcess]:
        seen = set[tuple[int, ...]]() if contender == NONE else self.seen[contender]
        server = Remembering(contender, seen, self.events, self.tokens)
        assert len(warm_up) == WARM_UPS and not {*map(tuple, warm_up)} & seen
        yield cast(ServerProcess, server)


def lifetimes(servers: RememberingServers) -> Lifetimes:
    def rest(seconds: float) -> None:
        if seconds > IDLE_AFTER_S:
            servers.events.append("rest")

    return Lifetimes(servers, servers.folder / "model", SCALE, sleep=rest)


def test_three_servers_over_each_cache_get_the_same_requests(tmp_path: Path) -> None:
    servers = RememberingServers(tmp_path)
    figures = lifetimes(servers).figures(OURS)
    one_pass = SCALE.documents * [*ORDER]
    ends = [["stop"] * len(ORDER), *2 * [["kill"] * len(ORDER)]]
    assert sorted(servers.events[: len(one_pass)]) == sorted(one_pass)
    others = [event for event in servers.events if event not in ORDER]
    assert others == ["rest", *ends[0], "rest", *ends[1], "rest", *ends[2]]
    assert len(servers.events) == len(others) + len(MOMENTS) * len(one_pass)
    assert [figures[f"{moment}: TTFT p50"] for moment in MOMENTS] == [2000, 100, 100, 100]
    computed = [figures[f"{moment}: tokens computed"] for moment in MOMENTS]
    assert computed[1:] == [12 * SCALE.documents] * 3
    assert {*figures} == {quantity.name for quantity in MEASUREMENT.quantities}


def test_one_run_serves_every_contender_once(tmp_path: Path) -> None:
    servers = RememberingServers(tmp_path)
    asked = lifetimes(servers)
    none = asked.figures(NONE)
    events = len(servers.events)
    assert [none[f"{moment}: TTFT p50"] for moment in MOMENTS] == [2000, 100, 2000, 2000]
    asked.figures(OURS)
    assert len(servers.events) == events
    asked.figures(OURS)
    assert len(servers.events) == 2 * events


def test_requests_reach_the_contenders_in_rotating_order(tmp_path: Path) -> None:
    servers = RememberingServers(tmp_path)
    lifetimes(servers).figures(NONE)
    first, second = servers.events[: len(ORDER)], servers.events[len(ORDER) : 2 * len(ORDER)]
    assert first == [*ORDER] and second == [*ORDER[1:], ORDER[0]]


def test_answers_are_compared_with_those_of_the_first_engine(tmp_path: Path) -> None:
    servers = RememberingServers(tmp_path)
    asked = lifetimes(servers)
    assert asked.figures(NONE)[UNLIKE.name] == 0
    servers.tokens = (1, 3)
    for name in (VLLM, OURS):
        asked.figures(name)
    assert asked.figures(OURS)[UNLIKE.name] == len(MOMENTS) * SCALE.documents


def test_documents_are_more_than_the_device_holds() -> None:
    scale = scale_of(FULL.restart)
    assert scale.device_documents < scale.documents
    assert scale.documents * scale.document_bytes < scale.large_cpu_bytes


def saved(medians_ms: dict[str, float]) -> dict[str, Any]:
    """The document of a run in which every moment took the same time."""
    rows = [
        Row("2 documents", quantity, {who: [value] for who, value in medians_ms.items()})
        for quantity in MEASUREMENT.quantities
    ]
    machine = {
        "cores": 2,
        "memory_bytes": 1 << 33,
        "processor": "A",
        "file_system": "ext4",
        "shared_memory_free_bytes": 1 << 32,
        "load_average": [0.5, 0.4, 0.3],
    }
    versions = {"python": "3.11", "vllm": "0.32.0", "kvcascade": "0.1.0"}
    facts = {"machine": machine, "versions": versions, "repeats": 3, "command": "kvcascade bench"}
    return document([Table(MEASUREMENT.name, "t", "", rows)], facts)


def test_the_picture_has_a_bar_for_each_contender_and_moment(tmp_path: Path) -> None:
    run = json.loads(json.dumps(saved({NONE: 1234.0, VLLM: 200.0, OURS: 100.0})))
    case, found = medians(run)
    assert case == "2 documents" and [*found] == [*MOMENTS]
    assert all(each == {NONE: 1234, VLLM: 200, OURS: 100} for each in found.values())
    draw(run, tmp_path / "a.svg")
    draw(run, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw(saved({NONE: 9.0, VLLM: 9.0, OURS: 9.0}), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()
    assert "LMCache" not in (tmp_path / "b.svg").read_text()


def test_the_picture_has_a_bar_for_lmcache_where_it_was_measured(tmp_path: Path) -> None:
    draw(saved({NONE: 1234.0, VLLM: 200.0, LMCACHE: 300.0, OURS: 100.0}), tmp_path / "a.svg")
    assert "LMCache" in (tmp_path / "a.svg").read_text()


def test_lmcache_is_left_out_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "make_model", lambda folder, scale: folder / "model")
    for python, missing in ((None, {LMCACHE}), (Path("python"), set[str]())):
        notes: list[str] = []
        setup = MeasurementSetup(
            tmp_path, SMOKE, lambda line: None, note=notes.append, lmcache_python=python
        )
        (case,) = first_token.cases(setup)
        assert {*ORDER} - {*case.contenders} == missing
        assert len(notes) == len(missing) and all("--lmcache-python" in note for note in notes)


def test_a_run_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="first_token"):
        medians({**saved({OURS: 1.0}), "measurements": []})
