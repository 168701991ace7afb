"""Behaviour after a restart: recomputed tokens, and the duration of a storm of requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from ....commands.bench.bench_results import MIB, OURS, VLLM, Goal, Quantity, quantile
from ...server import BLOCK_TOKENS, Completion, ServerProcess, is_on_cpu
from ..measurement import Case, Figures, Measurement, MeasurementSetup
from ..scale import RestartScale
from .engine_runs import FIRST_TOKEN, REST_S, VOCABULARY, Prompt, Servers, make_model

ANSWER_TOKENS = 8
TAIL_TOKENS = 12
"""Tokens after the document in each request; they fill no block, and are always computed."""
COMPUTED, TOTAL = "tokens computed", "time for all requests"
CROWD = 16
"""Number of clients from which the total time of all requests has a goal."""
STOPPED = (Quantity(COMPUTED, "tokens", (Goal(2500.0),)),)

Stop = Callable[[ServerProcess], object]
STOP, KILL = methodcaller("stop"), methodcaller("kill")
"""Ways to end a server: SIGTERM, and `kill -9`."""


def quantities(clients: int) -> tuple[Quantity, ...]:
    """Return the rows of a storm."""
    return (
        Quantity(COMPUTED, "tokens", (Goal(1.0, VLLM),)),
        Quantity(TOTAL, "s", (Goal(0.6, VLLM),) if clients >= CROWD else ()),
        Quantity("TTFT p50", "ms"),
        Quantity("TTFT p95", "ms"),
    )


class Restarts:
    """Restart of a server: the first one stores documents, the next one is asked about them."""

    def __init__(self, servers: Servers, model: Path, scale: RestartScale) -> None:
        self._servers = servers
        self._model = model
        self._scale = scale
        self._documents = documents(scale)

    def once_each(self, contender: str, cpu_bytes: int, stop: Stop) -> Figures:
        """Request every document once, one after another."""
        prompts = [with_tail(document, f"again {i}") for i, document in enumerate(self._documents)]
        answers, _ = self._ask_again(contender, cpu_bytes, stop, prompts, 1)
        return {COMPUTED: computed_tokens(answers)}

    def storm(self, contender: str, cpu_bytes: int, clients: int) -> Figures:
        """Send several requests for each document, with `clients` at a time, after `kill -9`."""
        scale = self._scale
        prompts = [
            with_tail(self._documents[i % scale.documents], f"request {i}")
            for i in range(scale.requests)
        ]
        random.Random("order").shuffle(prompts)
        answers, total_s = self._ask_again(contender, cpu_bytes, KILL, prompts, clients)
        ttft_s = [answer.ttft_s for answer in answers]
        return {
            COMPUTED: computed_tokens(answers),
            TOTAL: total_s,
            "TTFT p50": quantile(ttft_s, 0.5) * 1e3,
            "TTFT p95": quantile(ttft_s, 0.95) * 1e3,
        }

    def _ask_again(
        self, contender: str, cpu_bytes: int, stop: Stop, prompts: Sequence[Prompt], clients: int
    ) -> tuple[list[Completion], float]:
        scale = self._scale
        with self._servers.disk(contender) as folder:
            options = options_of(self._servers, self._model, scale, contender, folder, cpu_bytes)
            with self._servers.running(contender, options) as server:
                first = [with_tail(text, f"first {i}") for i, text in enumerate(self._documents)]
                server.complete_all(first, ANSWER_TOKENS, 1)
                time.sleep(REST_S)
                stop(server)
            with self._servers.running(contender, options) as server:
                began_s = time.monotonic()
                answers = server.complete_all(prompts, ANSWER_TOKENS, clients)
                return answers, time.monotonic() - began_s


def options_of(
    servers: Servers,
    model: Path,
    scale: RestartScale,
    contender: str,
    folder: Path,
    cpu_bytes: int,
) -> dict[str, Any]:
    """Return the options of a server whose disk in `folder` holds all documents."""
    stored_bytes = scale.documents * scale.document_bytes
    nvme = {"capacity": 4 * max(cpu_bytes, stored_bytes)}
    return servers.options(
        model,
        scale.prompt_tokens_max,
        scale.device_documents * (scale.document_blocks + 2),
        servers.transfer(contender, folder, cpu_bytes, nvme),
    )


def documents(scale: RestartScale) -> list[Prompt]:
    """Return the documents of a scale, each of whole blocks."""
    source = random.Random("documents")
    length = scale.document_blocks * BLOCK_TOKENS
    return [random_tokens(source, length) for _ in range(scale.documents)]


def random_tokens(source: random.Random, count: int) -> Prompt:
    """Return ordinary tokens."""
    return [source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def with_tail(document: Prompt, name: str) -> Prompt:
    """Return a request about a document; its tail depends only on the name."""
    return document + random_tokens(random.Random(name), TAIL_TOKENS)


def computed_tokens(answers: Sequence[Completion]) -> float:
    """Return the prompt tokens that no cache had."""
    return float(sum(answer.prompt_tokens - answer.cached_tokens for answer in answers))


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield two ways to end a server, then storms with increasing numbers of clients."""
    scale = setup.scale.restart
    servers = Servers(setup.folder, is_on_cpu(), setup.say)
    restarts = Restarts(servers, make_model(setup.folder, scale), scale)
    for label, stop in (("SIGTERM after 8 s of rest", STOP), ("SIGKILL after 8 s of rest", KILL)):
        yield Case(
            f"{label}: {scale.documents} documents, one client",
            {
                name: partial(restarts.once_each, name, scale.large_cpu_bytes, stop)
                for name in (OURS, VLLM)
            },
            STOPPED,
            repeats=1,
        )
    for clients in scale.clients:
        yield Case(
            f"{clients} clients, CPU tier of {scale.small_cpu_bytes // MIB} MiB",
            {
                name: partial(restarts.storm, name, scale.small_cpu_bytes, clients)
                for name in (OURS, VLLM)
            },
            quantities(clients),
            repeats=1,
        )


MEASUREMENT = Measurement(
    "restart",
    "After a restart: tokens computed again, and a storm of requests",
    "vLLM's OpenAI server with its default flags and ours with its default configuration; vLLM's "
    "TieringOffloadingSpec with its fs tier, which writes through. One server stores all "
    "documents, rests, and ends; another one is asked about each, or about each several times by "
    "many clients. Its device holds four of them. A request asks for a document and "
    f"{TAIL_TOKENS} tokens that are always computed.",
    (),
    cases,
)
