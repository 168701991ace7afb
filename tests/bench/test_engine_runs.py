"""What engines are asked and how they are set up; the engines themselves are not started here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest
from support.bench_scale import SMOKE

from kvcascade.config.schema import parse
from kvcascade.tiers.policies import known_names
from kvcascade.tools.commands.bench.bench_results import GIB, LMCACHE, NONE, OURS, VLLM
from kvcascade.tools.dev.bench.engine import gpu_engine
from kvcascade.tools.dev.bench.engine.engine import MEASUREMENT
from kvcascade.tools.dev.bench.engine.engine_runs import (
    Ask,
    EngineAnswers,
    EngineRuns,
    FreshRounds,
    Prompt,
    Servers,
    fresh_prompts,
    one_pass,
    written_bytes,
)
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.peers import lmcache_peer
from kvcascade.tools.dev.bench.scale import EngineScale
from kvcascade.tools.dev.server import BLOCK_TOKENS, COMMAND

SCALE = EngineScale(prefixes=3, prefix_blocks=4)


def runs(tmp_path: Path, on_cpu: bool = True) -> EngineRuns:
    servers = Servers(tmp_path, on_cpu, lambda line: None)
    return EngineRuns(servers, tmp_path / "model", SCALE)


def test_a_pass_uses_every_prefix_twice_with_the_others_between() -> None:
    prompts = one_pass(SCALE)
    heads = [tuple(prompt[: 4 * BLOCK_TOKENS]) for prompt in prompts]
    assert heads[:3] == heads[3:] and len(set(heads)) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert prompts == one_pass(SCALE), "the same in every process"
    assert all(len(prompt) < SCALE.prompt_tokens_max for prompt in prompts)
    blocks = {tuple(p[: end * BLOCK_TOKENS]) for p in prompts for end in range(1, 7)}
    assert len(blocks) == SCALE.pass_blocks


def test_fresh_prompts_share_nothing() -> None:
    prompts = fresh_prompts(SCALE, "fresh", 3) + fresh_prompts(SCALE, "again", 3)
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in prompts}) == 6


def test_rounds_ask_every_engine_the_same_and_never_anything_twice() -> None:
    asked: dict[str, list[Prompt]] = {"a": [], "b": []}

    def rounds(name: str) -> FreshRounds:
        def ask(prompts: Sequence[Prompt]) -> EngineAnswers:
            asked[name] += prompts
            seconds = [9.0 if len(prompts) == 1 else 0.1 for _ in prompts]
            return EngineAnswers(seconds, sum(seconds), 0)

        return FreshRounds(lambda: nullcontext(ask), SCALE, lambda seconds: None)

    engines = [rounds(name) for name in asked]
    figures = [each() for _ in range(2) for each in engines]
    assert asked["a"] == asked["b"]
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in asked["a"]}) == 2 * (1 + SCALE.fresh)
    assert {each["no reuse: TTFT p95"] for each in figures} == {100}, "not that of the first"


def test_an_engine_is_asked_a_few_rounds_and_stopped_before_the_next_one_starts() -> None:
    events: list[str] = []

    @contextmanager
    def engine() -> Iterator[Ask]:
        events.append("start")
        yield lambda prompts: EngineAnswers([1.0], 1.0, 0)
        events.append("stop")

    with closing(FreshRounds(engine, SCALE, lambda seconds: None)) as rounds:
        for _ in range(2 * SCALE.fresh_rounds_an_engine):
            rounds()
            events.append("round")
    each = ["start", *["round"] * SCALE.fresh_rounds_an_engine, "stop"]
    assert events == each + each


def test_tokens_are_held_against_those_of_the_engine_asked_first(tmp_path: Path) -> None:
    asked = runs(tmp_path)
    first = EngineAnswers([1.0], 1.0, 0, [(1, 2, 3), (4, 5, 6)])
    again = EngineAnswers([1.0], 1.0, 9, [(1, 2, 3), (4, 5, 7)])
    short = EngineAnswers([1.0], 1.0, 9, [(1, 2), (4, 5, 6)])
    assert asked._unlike([first, first]) == 0
    assert asked._unlike([again, short]) == 2


def test_the_engine_on_a_gpu_is_left_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append)
    monkeypatch.setattr(gpu_engine, "find_spec", lambda name: None if name == "vllm" else name)
    assert not list(gpu_engine.cases(setup))
    (note,) = notes
    assert "vllm not found" in note and "lmdb" not in note


@pytest.mark.parametrize("on_cpu", [True, False])
def test_engines_differ_in_their_offloading_only(tmp_path: Path, on_cpu: bool) -> None:
    options = {
        name: runs(tmp_path, on_cpu)._options(name, tmp_path / "kv", 0.5)
        for name in (NONE, VLLM, LMCACHE, OURS)
    }
    transfers = {name: each.pop("kv_transfer_config", None) for name, each in options.items()}
    assert all(each == options[NONE] for each in options.values())
    assert transfers[NONE] is None
    assert ("gpu_memory_utilization" in options[NONE]) is not on_cpu
    theirs = transfers[VLLM]["kv_connector_extra_config"]
    ours = parse(dict(transfers[OURS]["kv_connector_extra_config"]), known_names())
    assert ours.cpu.capacity.of(0) == theirs["cpu_bytes_to_use"], "as much memory for both"
    server = transfers[LMCACHE]["kv_connector_extra_config"]["lmcache.mp.autostart.server_args"]
    assert f"--l1-size-gb {theirs['cpu_bytes_to_use'] / GIB}" in server
    assert ("engine_driven" in server) is on_cpu
    assert theirs["spec_name"] == ("CpuTieringSpec" if on_cpu else "TieringOffloadingSpec")


def test_lmcache_runs_in_the_python_that_was_named(tmp_path: Path) -> None:
    servers = Servers(tmp_path, True, lambda line: None, Path("/elsewhere/python"))
    assert servers._command(LMCACHE) == ("/elsewhere/python", *COMMAND[1:])
    assert servers._command(OURS) == COMMAND


def test_the_memory_that_a_killed_server_of_lmcache_leaves_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_peer, "DEFAULT_ARENA_DIR", str(tmp_path))
    servers = Servers(tmp_path, True, lambda line: None)
    with servers.disk(LMCACHE) as folder:
        config = servers.transfer(LMCACHE, folder, GIB, {})
        assert config is not None
        server = config["kv_connector_extra_config"]["lmcache.mp.autostart.server_args"]
        name = server.split()[server.split().index("--shm-name") + 1]
        left = tmp_path / f"lmcache_l1_pool_{name}"
        left.write_bytes(b"memory")
    assert not left.exists()


def test_figures_have_rows() -> None:
    names = {quantity.name for quantity in MEASUREMENT.quantities}
    figures = EngineAnswers([0.3, 0.1, 0.2], 1.0, 7).figures("second pass")
    assert figures.keys() <= names
    assert figures["second pass: TTFT p50"] == 200 and figures["second pass: TTFT p95"] == 300


def test_bytes_of_the_other_tier_are_those_of_its_files(tmp_path: Path) -> None:
    for name in ("a/x", "b/y/z"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(100))
    assert written_bytes(VLLM, tmp_path) == 200
    assert written_bytes(OURS, tmp_path / "a") == 0, "no namespace, nothing written"
