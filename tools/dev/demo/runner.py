"""The demo's five phases: their servers, their requests, and the end of each server.

(a) A server without offloading gives the reference. (b) A server with the cascade gets a workload
that fits neither on the GPU nor in the CPU tier. It is stopped like an orchestrator stops it: by
SIGTERM, with vLLM's default flags. (c) A new server finds the blocks again, adds a turn to every
conversation, and is killed during a request. (d) One more server finds the blocks that the killed
one had written. All these also write to a remote tier. (e) A server of another host, whose CPU and
NVMe tiers are empty, finds the blocks there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..server import Completion
from . import disk
from .demo_report import DemoReporter
from .demo_results import (
    READ_BYTES,
    WRITTEN_BYTES,
    DemoError,
    Metrics,
    Need,
    Phase,
    Reply,
    Sources,
    sources_of,
    times,
    wrong_tokens,
)
from .workload import ChatShape, Turn, Workload, waves

BLOCK_TOKENS = 32
"""Tokens per block; the engine on CPU requires multiples of 32."""
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
    gpu_blocks: int = 92
    cpu_capacity: str = "20MiB"
    nvme_capacity: str = "96MiB"
    segment_size: str = "16MiB"
    engine_options: Mapping[str, Any] | None = None
    """Further arguments for the engine, such as its share of the GPU."""

    def server(
        self, nvme: Path | None = None, remote: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a server: with the cascade if it has a folder for an NVMe tier,
        and with a remote tier if it has options for one."""
        options: dict[str, Any] = {
            "model": str(self.model),
            "dtype": "float32",
            "max_model_len": 32 * -(-self.shape.prompt_tokens_max // 32),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": self.gpu_blocks,
            **(self.engine_options or {}),
        }
        if nvme is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self._cascade(nvme, remote),
            }
        return options

    def _cascade(self, nvme: Path, remote: Mapping[str, Any] | None) -> dict[str, Any]:
        last = () if remote is None else ({"type": "remote", "writes": "through", **remote},)
        return {
            "spec_name": "CascadeOffloadingSpec",
            "spec_module_path": "kvcascade.spec",
            "dirty_age_s": DIRTY_AGE_S,
            "tiers": [
                {"type": "cpu", "capacity": self.cpu_capacity},
                {
                    "type": "nvme",
                    "capacity": self.nvme_capacity,
                    "path": str(nvme),
                    "segment_size": self.segment_size,
                },
                *last,
            ],
        }


class Server(Protocol):
    """Interface of a server, as a phase needs it."""

    def ready(self) -> float:
        """Wait until the server answers; return the seconds since its start."""
        ...

    def version(self) -> str:
        """Return the version of vLLM."""
        ...

    def complete_all(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int, clients: int
    ) -> list[Completion]:
        """Request completions of all prompts, with `clients` at a time."""
        ...

    def send(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Send requests without waiting for answers."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the growth of the server's counters."""
        ...

    def process_numbers(self) -> list[int]:
        """Return the process ids of the server."""
        ...

    def stop(self) -> None:
        """Stop the server by SIGTERM."""
        ...

    def kill(self) -> int:
        """Kill all processes of the server by `kill -9`; return how many there were."""
        ...


Launch = Callable[[str, Mapping[str, Any]], AbstractContextManager[Server]]
"""Function that starts a server, given the name of its log and its arguments."""
StartRemote = Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""Function that starts a server for blocks; it yields the options of a remote tier there."""


class Demo:
    """Runs the phases in order, and collects their results."""

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        start_remote: StartRemote,
        reporter: DemoReporter,
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
            self._phase("b", "cascade", most, host, remote)
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
        say = self._reporter.say
        written = 0 if nvme is None else disk.written_bytes(nvme)
        say(f"({key}) {title}: starting a server")
        with self._launch(f"server-{key}.log", self.settings.server(nvme, remote)) as server:
            start_s = server.ready()
            self.engine_version = server.version()
            say(f"    ready after {start_s:.1f} s; {len(turns)} requests")
            replies = self._answer(server, turns, is_reference=not needs)
            metrics = Metrics(server.metrics())
            shared = disk.shared_memory_of(server.process_numbers())
            if needs:
                self._pause(IDLE_BEFORE_STOP_S)
            if is_killed:
                self._kill(server, turns)
            else:
                say("    SIGTERM")
                server.stop()
        phase = Phase(
            key=key,
            title=title,
            replies=replies,
            sources=_sources(key, replies, metrics),
            wrong_tokens=sum(wrong_tokens(r.tokens, self._tokens(r.turn)) for r in replies),
            reference_ttft=times(self._reference[reply.turn].ttft_s for reply in replies),
            start_s=start_s,
            written_bytes=0 if nvme is None else disk.written_bytes(nvme) - written,
            read_bytes=int(metrics.get(READ_BYTES, tier="nvme")),
            remote_written_bytes=int(metrics.get(WRITTEN_BYTES, tier="remote")),
            remote_read_bytes=int(metrics.get(READ_BYTES, tier="remote")),
            needs=needs,
            leftovers=disk.left_behind(shared),
        )
        self.phases.append(phase)
        say(f"    {_summary(phase)}")

    def _answer(self, server: Server, turns: Sequence[Turn], is_reference: bool) -> list[Reply]:
        """Send all requests; the prompts of every phase contain the answers of the reference."""
        replies: list[Reply] = []
        with self._reporter.requests(len(turns)) as count:
            for wave in waves(turns, WIDTH):
                prompts = self._prompts(wave)
                completions = server.complete_all(prompts, self._answer_tokens, WIDTH)
                answered = [Reply.to(turn, c) for turn, c in zip(wave, completions, strict=True)]
                if is_reference:
                    self._reference.update((reply.turn, reply) for reply in answered)
                replies += answered
                count(len(answered))
        return replies

    def _kill(self, server: Server, turns: Sequence[Turn]) -> None:
        server.send(self._prompts(turns[:WIDTH]), LONG_ANSWER * self._answer_tokens)
        self._pause(KILL_AFTER_S)
        self._reporter.say(f"    kill -9 of all {server.kill()} processes, with requests running")

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
    """Return a line that says whether the phase succeeded, and how the first request was served."""
    first = phase.replies[0]
    whole_blocks = first.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return (
        f"{phase.wrong_tokens} wrong tokens; of the first prompt, {first.cached_tokens:,} tokens "
        f"of {whole_blocks:,} in whole blocks were there already"
    )
