"""The demo's five phases: their servers, their requests, and the end of each server.

(a) A server without offloading gives the reference. (b) A server with the cascade gets a workload
that fits neither on the GPU nor in the CPU tier. It is stopped like an orchestrator stops it: by
SIGTERM, with vLLM's default flags. (c) A new server finds the blocks again, adds a turn to every
conversation, and is killed during a request. (d) One more server finds the blocks that the killed
one had written. All these also write to a remote tier. (e) A server of another host, whose CPU and
NVMe tiers are empty, finds the blocks there.

A server with vLLM's own tiering gets the same requests, and ends the same way, before each of (b),
(c) and (d). Its CPU tier has the same size; its disk tier has no limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...commands.bench.bench_report import Reporter
from ..server import (
    BLOCK_TOKENS,
    ServerProcess,
    cascade_extra,
    differing_tokens,
    offloading,
    server_options,
    tiering_options,
)
from . import disk
from .demo_results import (
    READ_BYTES,
    WRITTEN_BYTES,
    DemoError,
    Metrics,
    Need,
    Other,
    Phase,
    Reply,
    Sources,
    device_sources,
    sources_of,
    tiering_sources,
    times,
)
from .workload import ChatShape, Turn, Workload, waves

KIB, MIB = 1 << 10, 1 << 20
WIDTH = 2
"""Number of requests that are sent together."""
DIRTY_AGE_S = 0.5
IDLE_BEFORE_STOP_S = 4 * DIRTY_AGE_S
"""Idle time before a stop. Blocks are written `DIRTY_AGE_S` after they were stored, so all of them
are on disk by then."""
KILL_AFTER_S = 0.1
"""Time from the start of the interrupted requests to the kill."""
LONG_ANSWER = 4
"""Factor for the length of the interrupted answers, so that they are not finished before the
kill."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the demo, small enough for two slow cores."""

    model: Path
    kv: Path
    """Folder of the NVMe tiers, one for each host."""
    shape: ChatShape
    on_cpu: bool = True
    with_tiering: bool = True
    """True if vLLM's own tiering is run too."""
    gpu_blocks: int = 92
    block_bytes: int = 128 * KIB
    """Bytes of one block of the model that `make_llama` writes by default."""
    cpu_bytes: int = 20 * MIB
    nvme_bytes: int = 96 * MIB
    segment_bytes: int = 16 * MIB

    def server(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments of a server: with offloading if there are options for it."""
        tokens_max = BLOCK_TOKENS * -(-self.shape.prompt_tokens_max // BLOCK_TOKENS)
        transfer = None if extra is None else offloading(extra)
        return server_options(self.model, tokens_max, self.gpu_blocks, transfer, on_cpu=self.on_cpu)

    def tiering(self) -> dict[str, Any]:
        """Return the options of vLLM's own tiering."""
        return tiering_options(self.on_cpu, self.cpu_bytes, self.kv / "vllm")

    def cascade(self, nvme: Path, remote: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of kvcascade with three tiers."""
        tiers = [
            {"type": "cpu", "capacity": self.cpu_bytes},
            {
                "type": "nvme",
                "capacity": self.nvme_bytes,
                "path": str(nvme),
                "min_free": 0,
                "segment_size": self.segment_bytes,
            },
            {"type": "remote", "writes": "through", **remote},
        ]
        return cascade_extra(tiers, dirty_age_s=DIRTY_AGE_S)


Launch = Callable[[str, Mapping[str, Any]], AbstractContextManager[ServerProcess]]
"""Function that starts a server, given the name of its log and its arguments."""
StartRemote = Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""Function that starts a server for blocks; it yields the options of a remote tier there."""


@dataclass(frozen=True, slots=True)
class _Served:
    """Answers and counters of one server."""

    replies: Sequence[Reply]
    metrics: Metrics
    start_s: float
    leftovers: Sequence[str]


class Demo:
    """Runs the phases in order, and collects their results."""

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        start_remote: StartRemote,
        reporter: Reporter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.phases: list[Phase] = []
        self.engine_version = ""
        self._workload = Workload(settings.shape)
        self._launch = launch
        self._start_remote = start_remote
        self._reporter = reporter
        self._pause = pause
        self._reference: dict[Turn, Reply] = {}

    def run(self) -> list[Phase]:
        """Run all five phases; raise `DemoError` if one cannot be run."""
        host, other_host = self.settings.kv / "host", self.settings.kv / "other-host"
        order, turns = self._workload.order, self.settings.shape.turns
        most = [turn for number in range(1, turns) for turn in order(number)]
        last = order(turns)
        self._phase("a", "no offloading", [*most, *last], needs=Need.NOTHING)
        with self._start_remote() as remote:
            self._phase("b", "cold", most, host, remote)
            again = order(turns - 1, "again")
            self._phase("c", "after SIGTERM", [*again, *last], host, remote, is_killed=True)
            again = order(turns, "again")
            self._phase("d", "after kill -9", again, host, remote)
            self._phase("e", "another host", again, other_host, remote, needs=Need.REMOTE)
        return self.phases

    def _phase(
        self,
        key: str,
        title: str,
        turns: Sequence[Turn],
        nvme: Path | None = None,
        remote: Mapping[str, Any] | None = None,
        *,
        needs: Need = Need.NVME,
        is_killed: bool = False,
    ) -> None:
        """Run kvcascade, or no offloading without a folder and a remote tier."""
        extra = None if nvme is None or remote is None else self.settings.cascade(nvme, remote)
        tiering = self._tiering(key, title, turns, is_killed) if needs is Need.NVME else None
        written = 0 if nvme is None else disk.written_bytes(nvme)
        served = self._serve(f"server-{key}", f"({key}) {title}", turns, extra, is_killed)
        metrics = served.metrics
        before = [self._reference[turn] for turn in turns]
        phase = Phase(
            key=key,
            title=title,
            replies=served.replies,
            sources=_sources(key, served.replies, metrics),
            wrong_tokens=self._wrong_tokens(served.replies),
            reference=Other(device_sources(before), times(reply.ttft_s for reply in before)),
            start_s=served.start_s,
            written_bytes=0 if nvme is None else disk.written_bytes(nvme) - written,
            read_bytes=int(metrics.get(READ_BYTES, tier="nvme")),
            remote_written_bytes=int(metrics.get(WRITTEN_BYTES, tier="remote")),
            remote_read_bytes=int(metrics.get(READ_BYTES, tier="remote")),
            needs=needs,
            tiering=tiering,
            leftovers=served.leftovers,
        )
        self.phases.append(phase)
        self._reporter.print(f"    {_summary(phase)}")

    def _tiering(
        self, key: str, title: str, turns: Sequence[Turn], is_killed: bool
    ) -> Other | None:
        """Send the requests of a phase to vLLM's own tiering; its files stay for the next phase."""
        if not self.settings.with_tiering:
            return None
        name = f"({key}) {title}, vLLM's own tiering"
        served = self._serve(f"server-{key}-vllm", name, turns, self.settings.tiering(), is_killed)
        return Other(
            tiering_sources(served.replies, served.metrics),
            times(reply.ttft_s for reply in served.replies),
            self._wrong_tokens(served.replies),
        )

    def _serve(
        self,
        log: str,
        name: str,
        turns: Sequence[Turn],
        extra: Mapping[str, Any] | None,
        is_killed: bool,
    ) -> _Served:
        """Run a server from its start to its end."""
        say, options = self._reporter.print, self.settings.server(extra)
        with self._reporter.measuring(name), self._launch(f"{log}.log", options) as server:
            start_s = server.ready()
            self.engine_version = server.version()
            say(f"    ready after {start_s:.1f} s; {len(turns)} requests")
            replies = self._answer(server, turns, is_reference=extra is None)
            metrics = Metrics(server.metrics())
            shared = disk.shared_memory_of(server.process_numbers())
            if extra is not None:
                self._pause(IDLE_BEFORE_STOP_S)
            if is_killed:
                self._kill(server, turns)
            else:
                say("    SIGTERM")
                server.stop()
        return _Served(replies, metrics, start_s, disk.left_behind(shared))

    def _answer(
        self, server: ServerProcess, turns: Sequence[Turn], is_reference: bool
    ) -> list[Reply]:
        """Send all requests; the prompts of every phase contain the answers of the reference."""
        replies: list[Reply] = []
        for wave in waves(turns, WIDTH):
            prompts = self._prompts(wave)
            completions = server.complete_all(prompts, self._answer_tokens, WIDTH)
            answered = [
                Reply(**asdict(c), turn=turn) for turn, c in zip(wave, completions, strict=True)
            ]
            if is_reference:
                self._reference.update((reply.turn, reply) for reply in answered)
            replies += answered
            self._reporter.progress(f"{len(replies)} of {len(turns)} requests answered")
        return replies

    def _kill(self, server: ServerProcess, turns: Sequence[Turn]) -> None:
        server.send(self._prompts(turns[:WIDTH]), LONG_ANSWER * self._answer_tokens)
        self._pause(KILL_AFTER_S)
        self._reporter.print(f"    kill -9 of all {server.kill()} processes, with requests running")

    @property
    def _answer_tokens(self) -> int:
        return self.settings.shape.answer_tokens

    def _prompts(self, turns: Iterable[Turn]) -> list[list[int]]:
        answers = {turn: reply.tokens for turn, reply in self._reference.items()}
        return [self._workload.prompt(turn, answers) for turn in turns]

    def _wrong_tokens(self, replies: Iterable[Reply]) -> int:
        return sum(differing_tokens(r.tokens, self._reference[r.turn].tokens) for r in replies)


def _sources(key: str, replies: Sequence[Reply], metrics: Metrics) -> Sources:
    try:
        return sources_of(replies, metrics, BLOCK_TOKENS)
    except DemoError as error:
        raise DemoError(f"Phase ({key}): {error}") from None


def _summary(phase: Phase) -> str:
    """Return a line that says whether the phase succeeded, and how the first request was served."""
    first = phase.replies[0]
    whole_blocks = first.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return (
        f"{phase.wrong_tokens} wrong tokens; of the first prompt, {first.cached_tokens:,} tokens "
        f"of {whole_blocks:,} in whole blocks were there already"
    )
