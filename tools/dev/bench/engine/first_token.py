"""Time to the first token of the same requests: cold, warm, after a restart and after `kill -9`.

The picture of the README is drawn from this measurement (`tools.dev.bench.first_token_plot`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ....commands.bench.bench_results import NONE, OURS, VLLM, Goal, Quantity, quantile
from ...server import is_on_cpu
from ..measurement import Case, Figures, Measurement, MeasurementSetup
from ..scale import BLOCK_TOKENS, RestartScale
from .restart import (
    ANSWER_TOKENS,
    TAIL_TOKENS,
    Prompt,
    computed_tokens,
    documents,
    kill_server,
    make_model,
    random_tokens,
    stop_server,
    with_tail,
)

if TYPE_CHECKING:
    from ...server import Completion, ServerProcess
    from .engine_runs import Servers

NAME = "first_token"
MOMENTS = ("cold", "warm", "after a restart", "after kill -9")
"""When the requests are sent, in order."""
TTFT, COMPUTED = "TTFT p50", "tokens computed"
UNLIKE = Quantity("tokens unlike those of the engine asked first", "", (Goal(0),))
LAYERS, DOCUMENTS, DEVICE_DOCUMENTS = 8, 6, 2
"""Largest numbers of layers of the model and of documents; number of documents that the device
holds."""
WARM_UPS = 1
"""Number of other prompts that each new server answers first, for the one-time costs."""


def quantities() -> tuple[Quantity, ...]:
    """Return the rows."""
    found: list[Quantity] = []
    for moment in MOMENTS:
        goals = () if moment == "cold" else (Goal(1.0, VLLM),)
        found.append(Quantity(f"{moment}: {TTFT}", "ms", goals))
        found.append(Quantity(f"{moment}: {COMPUTED}", "tokens"))
    return (*found, UNLIKE)


class Lifetimes:
    """Three servers in turn over one cache; all of them get the same requests."""

    def __init__(
        self,
        servers: Servers,
        model: Path,
        scale: RestartScale,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._servers = servers
        self._model = model
        self._scale = scale
        self._sleep = sleep
        self._prompts = [with_tail(text, f"tail {i}") for i, text in enumerate(documents(scale))]
        self._expected: Sequence[Sequence[int]] = ()
        """Answers of the first server of all."""

    def run(self, contender: str) -> Figures:
        """Send the requests at all `MOMENTS`; return times, computed and differing tokens."""
        from .engine_runs import REST_S

        passes: list[list[Completion]] = []
        scale = self._scale
        with self._servers.disk(contender) as folder:
            nvme = {"capacity": 4 * max(scale.large_cpu_bytes, self._stored_bytes)}
            options = self._servers.options(
                self._model,
                scale.prompt_tokens_max,
                scale.device_documents * (scale.document_blocks + 2),
                self._servers.offloading(contender, folder, scale.large_cpu_bytes, nvme),
            )
            for number, (rounds, end) in enumerate(
                ((2, stop_server), (1, kill_server), (1, kill_server))
            ):
                warm_up = _warm_up(scale, number)
                with self._servers.running(contender, options, warm_up) as server:
                    passes += [self._ask(server) for _ in range(rounds)]
                    self._sleep(REST_S)
                    end(server)
        return self._figures(passes)

    @property
    def _stored_bytes(self) -> int:
        return self._scale.documents * self._scale.document_bytes

    def _ask(self, server: ServerProcess) -> list[Completion]:
        return server.complete_all(self._prompts, ANSWER_TOKENS, 1)

    def _figures(self, passes: Sequence[Sequence[Completion]]) -> Figures:
        self._expected = self._expected or [answer.tokens for answer in passes[0]]
        figures: dict[str, float] = {}
        for moment, answers in zip(MOMENTS, passes, strict=True):
            ttft_s = quantile((answer.ttft_s for answer in answers), 0.5)
            figures[f"{moment}: {TTFT}"] = ttft_s * 1e3
            figures[f"{moment}: {COMPUTED}"] = computed_tokens(answers)
        pairs = [
            pair
            for answers in passes
            for expected, answer in zip(self._expected, answers, strict=True)
            for pair in zip_longest(expected, answer.tokens)
        ]
        figures[UNLIKE.name] = float(sum(a != b for a, b in pairs))
        return figures


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
    from .engine_runs import Servers

    scale = scale_of(setup.scale.restart)
    servers = Servers(setup.folder, is_on_cpu(), setup.say)
    lifetimes = Lifetimes(servers, make_model(setup.folder, scale), scale)
    yield Case(
        f"{scale.documents} documents of {scale.document_blocks * BLOCK_TOKENS:,} tokens",
        {name: partial(lifetimes.run, name) for name in (NONE, VLLM, OURS)},
        repeats=setup.scale.engine_repeats,
    )


MEASUREMENT = Measurement(
    NAME,
    "Time to the first token: cold, warm, after a restart, after kill -9",
    "vLLM's OpenAI server with its default flags: without offloading, with vLLM's "
    "TieringOffloadingSpec and its fs tier, and with kvcascade in its default configuration. The "
    "same requests come four times, one at a time; the device holds "
    f"{DEVICE_DOCUMENTS} of the {DOCUMENTS} documents, the CPU tier all of them. After a restart: "
    "SIGTERM after 8 s of rest, and a new server. After kill -9: all processes of that server are "
    "killed after 8 s of rest. A new server answers another prompt first. Each request has "
    f"{TAIL_TOKENS} tokens after the document that fill no block.",
    quantities(),
    cases,
)
