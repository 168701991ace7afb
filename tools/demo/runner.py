"""The demo's four phases: which engine answers which requests, and how each engine ends.

(a) an engine without offloading gives the reference; (b) the cascade meets a workload that fits
neither on the GPU nor in the CPU tier, and is shut down cleanly; (c) a new process finds the blocks
again, adds a turn to every conversation, and is killed in the middle of a request; (d) one more
process finds what the killed one had written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import disk
from .report import Reporter
from .results import (
    READ_BYTES,
    DemoError,
    Metrics,
    Phase,
    Reply,
    Sources,
    sources_of,
    times,
    wrong_tokens,
)
from .workload import Shape, Turn, Workload, waves

BLOCK_TOKENS = 32
"""The engine on CPU takes multiples of 32."""
WIDTH = 2
"""Requests that are sent together."""
DIRTY_AGE_S = 0.5
IDLE_BEFORE_KILL_S = 3 * DIRTY_AGE_S
"""Mode `back` promises to have written everything by then."""
KILL_AFTER_S = 0.1
"""Into the requests that the kill interrupts."""
LONG_ANSWER = 4
"""Times the usual length, so that they are not over by then."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of everything, small enough for two slow cores."""

    model: Path
    kv: Path
    """Folder of the NVMe tier."""
    shape: Shape
    gpu_blocks: int = 92
    cpu_capacity: str = "20MiB"
    nvme_capacity: str = "96MiB"
    segment_size: str = "16MiB"
    engine_options: Mapping[str, Any] | None = None
    """More arguments for the engine, such as its share of the GPU."""

    def engine(self, write_mode: str | None) -> dict[str, Any]:
        """Arguments of the engine; without a write mode it has no offloading."""
        options: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 32 * -(-self.shape.prompt_tokens_max // 32),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": self.gpu_blocks,
            "disable_log_stats": False,
            **(self.engine_options or {}),
        }
        if write_mode is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self._cascade(write_mode),
            }
        return options

    def _cascade(self, write_mode: str) -> dict[str, Any]:
        return {
            "spec_name": "CascadeOffloadingSpec",
            "spec_module_path": "kvcascade.spec",
            "write_mode": write_mode,
            "dirty_age_s": DIRTY_AGE_S,
            "tiers": [
                {"type": "cpu", "capacity": self.cpu_capacity},
                {
                    "type": "nvme",
                    "capacity": self.nvme_capacity,
                    "path": str(self.kv),
                    "segment_size": self.segment_size,
                },
            ],
        }


class Engine(Protocol):
    """What a phase needs of an engine process."""

    def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine."""
        ...

    def generate(
        self, turns: Sequence[Turn], prompts: Sequence[Sequence[int]], answer_tokens: int
    ) -> list[Reply]:
        """Send requests together and wait for all answers."""
        ...

    def send(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Send requests and do not wait."""
        ...

    def metrics(self) -> Metrics:
        """The engine's counters."""
        ...

    def shared_memory(self) -> frozenset[str]:
        """Its files in shared memory."""
        ...

    def stop(self) -> None:
        """A clean shutdown."""
        ...

    def kill(self) -> int:
        """`kill -9` of everything."""
        ...


Launch = Callable[[str], AbstractContextManager[Engine]]
"""Makes an engine process; the name is that of its log."""


class Demo:
    """Runs the phases in order and collects what they measured."""

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        reporter: Reporter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.phases: list[Phase] = []
        self.engine_version = ""
        self._workload = Workload(settings.shape)
        self._launch = launch
        self._reporter = reporter
        self._pause = pause
        self._reference: dict[Turn, Reply] = {}

    def run(self) -> list[Phase]:
        """All four phases; raises `DemoError` if one cannot be run."""
        order, turns = self._workload.order, self.settings.shape.turns
        most = [turn for number in range(1, turns) for turn in order(number)]
        last = order(turns)
        self._phase("a", "no offloading", [*most, *last], None)
        self._phase("b", "cascade", most, "demote")
        again = order(turns - 1, "again")
        self._phase("c", "restarted", [*again, *last], "back", is_killed=True)
        self._phase("d", "after kill -9", order(turns, "again"), "back")
        return self.phases

    def _phase(
        self,
        key: str,
        title: str,
        turns: Sequence[Turn],
        write_mode: str | None,
        is_killed: bool = False,
    ) -> None:
        say = self._reporter.say
        written = disk.written_bytes(self.settings.kv)
        mode = f', write mode "{write_mode}"' if write_mode else ""
        say(f"({key}) {title}: starting an engine{mode}")
        with self._launch(f"engine-{key}.log") as engine:
            started = engine.start(self.settings.engine(write_mode))
            self.engine_version = started["version"]
            say(f"    ready after {started['start_s']:.1f} s; {len(turns)} requests")
            replies = self._answer(engine, turns, is_reference=write_mode is None)
            metrics, shared = engine.metrics(), engine.shared_memory()
            if is_killed:
                self._kill(engine, turns)
            else:
                say("    shutting down")
                engine.stop()
        phase = Phase(
            key=key,
            title=title,
            replies=replies,
            sources=_sources(key, replies, metrics),
            wrong_tokens=sum(wrong_tokens(r.tokens, self._tokens(r.turn)) for r in replies),
            reference_ttft=times(self._reference[reply.turn].ttft_s for reply in replies),
            start_s=started["start_s"],
            written_bytes=disk.written_bytes(self.settings.kv) - written,
            read_bytes=int(metrics.get(READ_BYTES, tier="nvme")),
            needs_nvme=write_mode is not None,
            leftovers=disk.left_behind(shared),
        )
        self.phases.append(phase)
        say(f"    {_summary(phase)}")

    def _answer(self, engine: Engine, turns: Sequence[Turn], is_reference: bool) -> list[Reply]:
        """Send all requests; every phase builds its prompts on the answers of the reference."""
        replies: list[Reply] = []
        with self._reporter.requests(len(turns)) as count:
            for wave in waves(turns, WIDTH):
                answered = engine.generate(wave, self._prompts(wave), self._answer_tokens)
                if is_reference:
                    self._reference.update((reply.turn, reply) for reply in answered)
                replies += answered
                count(len(answered))
        return replies

    def _kill(self, engine: Engine, turns: Sequence[Turn]) -> None:
        self._pause(IDLE_BEFORE_KILL_S)
        engine.send(self._prompts(turns[:WIDTH]), LONG_ANSWER * self._answer_tokens)
        self._pause(KILL_AFTER_S)
        self._reporter.say(f"    kill -9 of all {engine.kill()} processes, with requests running")

    @property
    def _answer_tokens(self) -> int:
        return self.settings.shape.answer_tokens

    def _prompts(self, turns: Iterable[Turn]) -> list[list[int]]:
        answers = {turn: reply.tokens for turn, reply in self._reference.items()}
        return [self._workload.prompt(turn, answers) for turn in turns]

    def _tokens(self, turn: Turn) -> tuple[int, ...]:
        return self._reference[turn].tokens


def _sources(key: str, replies: Sequence[Reply], metrics: Metrics) -> Sources:
    try:
        return sources_of(replies, metrics, BLOCK_TOKENS)
    except DemoError as error:
        raise DemoError(f"Phase ({key}): {error}") from None


def _summary(phase: Phase) -> str:
    """One line: whether it went well, and what became of the first request."""
    first = phase.replies[0]
    whole_blocks = first.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return (
        f"{phase.wrong_tokens} wrong tokens; of the first prompt, {first.cached_tokens:,} tokens "
        f"of {whole_blocks:,} in whole blocks were there already"
    )
