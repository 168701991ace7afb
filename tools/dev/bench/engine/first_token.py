"""Time to the first token of the same requests: cold, warm, after a restart and after `kill -9`.

The picture of the README is drawn from this measurement (`tools.dev.bench.first_token_plot`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ....commands.bench.bench_results import LMCACHE, NONE, OURS, VLLM, Goal, Quantity, quantile
from ...server import BLOCK_TOKENS, Completion, ServerProcess, differing_tokens, is_on_cpu
from ..measurement import Case, Figures, Measurement, MeasurementSetup
from ..peers.lmcache_peer import is_measured
from ..scale import RestartScale
from .engine_runs import IDLE_AFTER_S, REST_S, Prompt, Servers, make_model
from .restart import (
    ANSWER_TOKENS,
    KILL,
    STOP,
    TAIL_TOKENS,
    Stop,
    computed_tokens,
    documents,
    options_of,
    random_tokens,
    with_tail,
)

NAME = "first_token"
MOMENTS = ("cold", "warm", "after a restart", "after kill -9")
"""Moments at which the requests are sent, in order."""
TTFT, COMPUTED = "TTFT p50", "tokens computed"
ORDER = (NONE, VLLM, LMCACHE, OURS)
"""Contenders, in the order in which they start; LMCache only where it is installed."""
UNLIKE = Quantity("tokens unlike those of the engine asked first", "", (Goal(0),))
LAYERS, DOCUMENTS, DEVICE_DOCUMENTS = 8, 6, 2
"""Largest numbers of layers of the model and of documents; number of documents that the device
holds."""
WARM_UPS = 1
"""Number of other prompts that each new server answers first, for the one-time costs."""

LIVES: tuple[tuple[int, Stop], ...] = ((2, STOP), (1, KILL), (1, KILL))
"""For each server over a cache, in turn: passes over all requests, and the way it ends."""


def quantities() -> tuple[Quantity, ...]:
    """Return the rows."""
    found: list[Quantity] = []
    for moment in MOMENTS:
        goals = () if moment == "cold" else (Goal(1.0, VLLM),)
        found.append(Quantity(f"{moment}: {TTFT}", "ms", goals))
        found.append(Quantity(f"{moment}: {COMPUTED}", "tokens"))
    return (*found, UNLIKE)


class Lifetimes:
    """Servers of all contenders side by side, three in turn over each cache.

    All of them get the same requests, one at a time, each request all contenders in turn: if the
    machine's speed changes, all are affected alike.
    """

    def __init__(
        self,
        servers: Servers,
        model: Path,
        scale: RestartScale,
        contenders: Sequence[str] = ORDER,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._servers = servers
        self._model = model
        self._scale = scale
        self._contenders = contenders
        self._sleep = sleep
        self._prompts = [with_tail(text, f"tail {i}") for i, text in enumerate(documents(scale))]
        self._expected: Sequence[Sequence[int]] = ()
        """Answers of the first server of all."""
        self._found: dict[str, Figures] = {}
        """Figures of the last run that nobody has taken."""

    def figures(self, contender: str) -> Figures:
        """Return times, computed and differing tokens; one run serves each contender once."""
        if contender not in self._found:
            self._found = self._run()
        return self._found.pop(contender)

    def _run(self) -> dict[str, Figures]:
        """Send the requests at all `MOMENTS`."""
        passes: dict[str, list[list[Completion]]] = {name: [] for name in self._contenders}
        with ExitStack() as disks:
            options = {
                name: options_of(
                    self._servers,
                    self._model,
                    self._scale,
                    name,
                    disks.enter_context(self._servers.disk(name)),
                    self._scale.large_cpu_bytes,
                )
                for name in self._contenders
            }
            for number, (rounds, end) in enumerate(LIVES):
                warm_up = _warm_up(self._scale, number)
                with ExitStack() as running:
                    servers = {
                        name: running.enter_context(
                            self._servers.running(name, options[name], warm_up)
                        )
                        for name in self._contenders
                    }
                    for _ in range(rounds):
                        for name, answers in self._ask(servers).items():
                            passes[name].append(answers)
                    self._sleep(REST_S)
                    for server in servers.values():
                        end(server)
        return {name: self._figures(found) for name, found in passes.items()}

    def _ask(self, servers: Mapping[str, ServerProcess]) -> dict[str, list[Completion]]:
        """Send each request to one server after another, the others being idle."""
        answers: dict[str, list[Completion]] = {name: [] for name in servers}
        names = list(servers)
        for number, prompt in enumerate(self._prompts):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self._sleep(IDLE_AFTER_S)
                answers[name] += servers[name].complete_all([prompt], ANSWER_TOKENS, 1)
        return answers

    def _figures(self, passes: Sequence[Sequence[Completion]]) -> Figures:
        self._expected = self._expected or [answer.tokens for answer in passes[0]]
        figures: dict[str, float] = {}
        for moment, answers in zip(MOMENTS, passes, strict=True):
            ttft_s = quantile((answer.ttft_s for answer in answers), 0.5)
            figures[f"{moment}: {TTFT}"] = ttft_s * 1e3
            figures[f"{moment}: {COMPUTED}"] = computed_tokens(answers)
        unlike = (
            differing_tokens(answer.tokens, expected)
            for answers in passes
            for expected, answer in zip(self._expected, answers, strict=True)
        )
        return figures | {UNLIKE.name: float(sum(unlike))}


def scale_of(scale: RestartScale) -> RestartScale:
    """Return the sizes of `restart` with a smaller model and fewer documents."""
    return replace(
        scale,
        layers=min(LAYERS, scale.layers),
        documents=min(DOCUMENTS, scale.documents),
        device_documents=DEVICE_DOCUMENTS,
    )


def _warm_up(scale: RestartScale, number: int) -> list[Prompt]:
    source = random.Random(f"warm up {number}")
    length = scale.document_blocks * BLOCK_TOKENS
    return [random_tokens(source, length) for _ in range(WARM_UPS)]


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield one case: all contenders with the same documents."""
    scale = scale_of(setup.scale.restart)
    contenders = ORDER if is_measured(setup) else tuple(who for who in ORDER if who != LMCACHE)
    servers = Servers(setup.folder, is_on_cpu(), setup.say, setup.lmcache_python)
    lifetimes = Lifetimes(servers, make_model(setup.folder, scale), scale, contenders)
    yield Case(
        f"{scale.documents} documents of {scale.document_blocks * BLOCK_TOKENS:,} tokens",
        {name: partial(lifetimes.figures, name) for name in contenders},
        repeats=setup.scale.engine_repeats,
    )


MEASUREMENT = Measurement(
    NAME,
    "Time to the first token: cold, warm, after a restart, after kill -9",
    "vLLM's OpenAI server with its default flags: without offloading, with vLLM's "
    "TieringOffloadingSpec and its fs tier, with LMCache's server where it is installed, and with "
    "kvcascade in its default configuration, side by side. The same requests come four times, one "
    "at a time, and each goes to all in turn, while the others are idle; the device holds "
    f"{DEVICE_DOCUMENTS} of the {DOCUMENTS} documents, the CPU tier all of them. After a restart: "
    "SIGTERM after 8 s of rest, and a new server. After kill -9: all processes of that server are "
    "killed after 8 s of rest. A new server answers another prompt first. Each request has "
    f"{TAIL_TOKENS} tokens after the document that fill no block. LMCache writes by its adapter "
    "fs_native with direct I/O, in chunks of one block; its server starts and ends with the "
    "engine, as the CPU tiers of the others do.",
    quantities(),
    cases,
)
