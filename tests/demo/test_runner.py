"""The order of the phases, against engines that only pretend."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcascade.tools.commands.bench.bench_report import Reporter
from kvcascade.tools.dev.demo.demo_results import (
    DEVICE_HITS,
    LOADED_BLOCKS,
    READ_BYTES,
    DemoError,
    problems,
)
from kvcascade.tools.dev.demo.runner import Demo, Settings
from kvcascade.tools.dev.demo.workload import ChatShape
from kvcascade.tools.dev.server import BLOCK_TOKENS, Completion, ServerProcess

SHAPE = ChatShape(conversations=4, prefix_tokens=64, answer_tokens=2)


class PretendServer(ServerProcess):
    """Answers with the sum of the prompt; with offloading, one block of each comes from NVMe, or
    from the remote tier where the NVMe tier is new."""

    def __init__(self, options: Mapping[str, Any], calls: list[str], broken: str) -> None:
        self.calls = calls
        self.broken = broken
        self.name = "no offloading"
        if "kv_transfer_config" in options:
            extra = options["kv_transfer_config"]["kv_connector_extra_config"]
            self.name = "tiering" if extra["spec_name"] == "CpuTieringSpec" else "cascade"
        self.has_cascade = self.name == "cascade"
        self.tier = "remote" if "other-host" in str(options) else "nvme"
        self.requests = 0

    def ready(self) -> float:
        self.calls.append(self.name)
        return 1.0

    def version(self) -> str:
        return "0"

    def complete_all(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int, clients: int
    ) -> list[Completion]:
        self.requests += len(prompts)
        cached = BLOCK_TOKENS if self._has_blocks else 0
        return [
            Completion(len(prompt), cached, 0.1, self._tokens(prompt, answer_tokens))
            for prompt in prompts
        ]

    def send(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        self.calls.append("send")

    def metrics(self) -> dict[str, float]:
        loaded = float(self.requests if self._has_blocks else 0)
        wrong = 1.0 if self.broken == "counts" else 0.0
        return {
            DEVICE_HITS: wrong,
            f"{LOADED_BLOCKS}{{tier={self.tier}}}": loaded,
            f"{READ_BYTES}{{tier={self.tier}}}": loaded * 4096,
        }

    def process_numbers(self) -> list[int]:
        return []

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.calls.append("stop")

    def kill(self) -> int:
        self.calls.append("kill")
        return 3

    @property
    def _has_blocks(self) -> bool:
        return self.has_cascade and self.broken != "tiers"

    def _tokens(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        is_wrong = self.broken == "tokens" and self.has_cascade
        return (sum(prompt) % 997 + is_wrong,) * count


def run(tmp_path: Path, broken: str = "", with_tiering: bool = True) -> tuple[Demo, list[str], str]:
    """Run the demo; returns it, what was asked of the engines, and what was printed."""
    calls: list[str] = []
    printed = io.StringIO()

    @contextmanager
    def launch(name: str, options: Mapping[str, Any]) -> Iterator[PretendServer]:
        calls.append(name)
        yield PretendServer(options, calls, broken)

    @contextmanager
    def remote() -> Iterator[Mapping[str, Any]]:
        calls.append("remote")
        yield {"url": "redis://127.0.0.1:1"}
        calls.append("remote ends")

    settings = Settings(tmp_path / "model", tmp_path / "kv", SHAPE, with_tiering=with_tiering)
    reporter = Reporter(Console(file=printed, width=100))
    demo = Demo(settings, launch, remote, reporter, pause=lambda seconds: calls.append("pause"))
    demo.run()
    return demo, calls, printed.getvalue()


def test_phases(tmp_path: Path) -> None:
    demo, calls, printed = run(tmp_path, with_tiering=False)
    assert all(phase.tiering is None for phase in demo.phases)
    assert calls == [
        *("server-a.log", "no offloading", "stop"),
        "remote",
        *("server-b.log", "cascade", "pause", "stop"),
        *("server-c.log", "cascade", "pause", "send", "pause", "kill"),
        *("server-d.log", "cascade", "pause", "stop"),
        *("server-e.log", "cascade", "pause", "stop"),
        "remote ends",
    ]
    assert [len(phase.replies) for phase in demo.phases] == [16, 12, 8, 4, 4]
    assert [phase.sources.remote > 0 for phase in demo.phases] == [False] * 4 + [True]
    assert problems(demo.phases) == []
    assert "kill -9 of all 3 processes" in printed


def test_vllms_tiering_gets_the_same_requests_and_ends(tmp_path: Path) -> None:
    demo, calls, _ = run(tmp_path)
    assert calls[3:9] == [
        *("remote", "server-b-vllm.log", "tiering", "pause", "stop", "server-b.log")
    ]
    begin = calls.index("server-c-vllm.log")
    assert calls[begin + 1 : begin + 6] == ["tiering", "pause", "send", "pause", "kill"]
    assert [phase.key for phase in demo.phases if phase.tiering] == ["b", "c", "d"]
    for phase in demo.phases[1:4]:
        assert phase.tiering is not None and phase.tiering.wrong_tokens == 0
        assert phase.tiering.sources.recomputed == phase.prompt_tokens
        assert phase.reference.sources.recomputed == phase.prompt_tokens
    assert problems(demo.phases) == []


def test_every_request_was_answered_by_the_reference_first(tmp_path: Path) -> None:
    reference, *others = run(tmp_path)[0].phases
    known = {reply.turn: reply.tokens for reply in reference.replies}
    for phase in others:
        assert all(known[reply.turn] == reply.tokens for reply in phase.replies)
        assert len({reply.turn for reply in phase.replies}) == len(phase.replies)


def test_wrong_tokens_are_counted(tmp_path: Path) -> None:
    demo, _, _ = run(tmp_path, "tokens")
    assert [phase.wrong_tokens for phase in demo.phases] == [0, 24, 16, 8, 8]
    assert len(problems(demo.phases)) == 4


def test_nothing_from_a_tier_is_a_failure(tmp_path: Path) -> None:
    demo, _, _ = run(tmp_path, "tiers")
    assert [problem[:3] for problem in problems(demo.phases)] == ["(b)", "(c)", "(d)", "(e)"]


def test_counts_that_do_not_add_up_end_the_demo(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"Phase \(a\): the counts do not add up"):
        run(tmp_path, "counts")
