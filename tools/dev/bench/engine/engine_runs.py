"""Real engines in processes of their own: their requests, and their measurements.

Requests come one at a time, so the time to the first token is the request's own. A *pass* requests
every long prefix twice, with all other prefixes between two uses of one. These are more than the
device holds, and more than the CPU tier holds.

Prompts that are never repeated go to engines that run side by side, a few at a time. Offloading
costs a few percent there, and a shared machine drifts by more than that between one engine and the
next.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....commands.bench.bench_results import LMCACHE, NONE, OURS, VLLM, quantile
from ...demo import disk
from ...server import (
    BLOCK_TOKENS,
    COMMAND,
    ServerProcess,
    cascade_extra,
    differing_tokens,
    environment_of,
    offloading,
    served_model,
    server_options,
    tiering_options,
)
from ..measurement import Say
from ..peers.lmcache_peer import QUIET, remove_memory, transfer_config
from ..scale import SUFFIX_BLOCKS, EngineScale, RestartScale

ANSWER_TOKENS = 4
FIRST_TOKEN = 3
VOCABULARY = 1024
DEVICE_SPARE_BLOCKS = 24
"""Blocks on the device beyond one prompt, for the rest of the previous prompt."""
IDLE_AFTER_S = 1.2
"""Time after which an engine is idle. It polls, on the cores of the others, until it has received
nothing for a second (`vllm.distributed.device_communicators.shm_broadcast.SpinCondition`)."""
NVME_BYTES_MIN = 128 << 20
REST_S = 8.0
"""Pause between the last answer and SIGTERM. With vLLM's default flags an engine gets no time to
write data that is only in memory."""
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment that makes glibc keep freed memory (mallopt(3))."""

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """Measurements of one list of requests."""

    ttft_s: Sequence[float]
    total_s: float
    cached_tokens: int
    tokens: Sequence[Sequence[int]] = ()
    """Tokens of the answers, by prompt."""

    def figures(self, name: str) -> dict[str, float]:
        """Return the rows of the table."""
        return {
            f"{name}: TTFT p50": quantile(self.ttft_s, 0.5) * 1e3,
            f"{name}: TTFT p95": quantile(self.ttft_s, 0.95) * 1e3,
            f"{name}: total": self.total_s,
        }


Ask = Callable[[Sequence[Prompt]], EngineAnswers]
"""Function that has one engine answer prompts, one after another."""


def tokens(name: str, blocks: int) -> Prompt:
    """Return tokens that depend only on the name."""
    source = random.Random(name)
    return [source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]


def fresh_prompts(scale: EngineScale, name: str, count: int) -> list[Prompt]:
    """Return prompts without common prefixes."""
    return [tokens(f"{name} {i}", scale.prefix_blocks) + [FIRST_TOKEN] for i in range(count)]


def one_pass(scale: EngineScale) -> list[Prompt]:
    """Return every prefix twice, with two endings."""
    return [
        tokens(f"prefix {i}", scale.prefix_blocks)
        + tokens(f"end {i} {use}", SUFFIX_BLOCKS)
        + [FIRST_TOKEN]
        for use in range(2)
        for i in range(scale.prefixes)
    ]


def make_model(folder: Path, scale: EngineScale | RestartScale) -> Path:
    """Write the model of a scale, with its tokenizer; return its folder."""
    return served_model(
        folder / "model",
        VOCABULARY,
        layers=scale.layers,
        hidden=scale.hidden,
        max_positions=scale.prompt_tokens_max,
    )


class FreshRounds:
    """An engine that receives prompts without repetition, with new ones in each round.

    The other contenders get the same prompts. The engine is replaced after some rounds: two engines
    of the same kind differed by up to 7 % over their lifetime, because of the memory they were
    given.
    """

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[Ask]],
        scale: EngineScale,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._start, self._scale, self._sleep = start, scale, sleep
        self._round = 0
        self._running = ExitStack()
        self._ask = self._running.enter_context(start())

    def close(self) -> None:
        """Stop the engine."""
        self._running.close()

    def __call__(self) -> dict[str, float]:
        """Run one round; its first prompt meets cold caches, and is not counted."""
        if self._round and self._round % self._scale.fresh_rounds_an_engine == 0:
            self._running.close()
            self._ask = self._running.enter_context(self._start())
        self._round += 1
        first, *others = fresh_prompts(self._scale, f"fresh {self._round}", 1 + self._scale.fresh)
        self._sleep(IDLE_AFTER_S)
        self._ask([first])
        return self._ask(others).figures("no reuse")


class Servers:
    """Servers of every contender, with one folder on the disk for each."""

    def __init__(
        self, folder: Path, on_cpu: bool, say: Say, lmcache_python: Path | None = None
    ) -> None:
        self._folder = folder
        self._on_cpu = on_cpu
        self._say = say
        self._lmcache_python = lmcache_python
        self._started = 0

    @contextmanager
    def running(
        self, contender: str, options: dict[str, Any], warm_up: Sequence[Prompt] = ()
    ) -> Iterator[ServerProcess]:
        """Run a server that answers; stop it by SIGTERM, unless it has been stopped or killed."""
        self._started += 1
        self._say(f"{contender}: starting server {self._started}")
        log = self._folder / f"server-{self._started}.log"
        environment = {**environment_of(on_cpu=self._on_cpu), **QUIET}
        environment |= _cpu_environment() if self._on_cpu else {}
        with ServerProcess(log, options, environment, self._command(contender)) as server:
            server.ready()
            server.complete_all(warm_up, ANSWER_TOKENS, 1)
            self._say(f"{contender}: server {self._started} answers")
            yield server
            if server.is_running:
                server.stop()

    @contextmanager
    def disk(self, contender: str) -> Iterator[Path]:
        """Yield an empty folder for the contender's files."""
        folder = self._folder / f"kv-{contender}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if contender == LMCACHE:
                remove_memory(folder)

    def options(
        self, model: Path, tokens_max: int, device_blocks: int, transfer: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the arguments of a server; `transfer` is the result of `transfer`."""
        return server_options(model, tokens_max, device_blocks, transfer, on_cpu=self._on_cpu)

    def transfer(
        self, contender: str, folder: Path, cpu_bytes: int, nvme: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the `kv_transfer_config` of a contender; `nvme` has further options of our NVMe
        tier."""
        if contender == NONE:
            return None
        if contender == LMCACHE:
            return transfer_config(folder, cpu_bytes, self._on_cpu)
        if contender == VLLM:
            return offloading(tiering_options(self._on_cpu, cpu_bytes, folder))
        assert contender == OURS
        tier = {"type": "nvme", "path": str(folder), "min_free": 0, **nvme}
        return offloading(cascade_extra([{"type": "cpu", "capacity": cpu_bytes}, tier]))

    def _command(self, contender: str) -> Sequence[str]:
        if contender != LMCACHE:
            return COMMAND
        assert self._lmcache_python is not None
        return (str(self._lmcache_python), *COMMAND[1:])


class EngineRuns:
    """Servers of every contender over one model."""

    def __init__(self, servers: Servers, model: Path, scale: EngineScale) -> None:
        self._servers = servers
        self._model = model
        self._scale = scale
        self._warmed = 0
        self._first_pass: Sequence[Sequence[int]] = ()
        """Tokens of the very first pass; every other pass sends the same requests."""

    def prefixes(self, contender: str) -> dict[str, float]:
        """Run two passes, a restart, and a third pass; return times, bytes written and differing
        tokens."""
        passes: list[EngineAnswers] = []
        with self._servers.disk(contender) as disk_folder:
            options = self._options(contender, disk_folder, self._scale.cpu_share)
            figures: dict[str, float] = {}
            with self._engine(contender, options) as engine:
                for name in ("first pass", "second pass"):
                    passes.append(self._ask(engine, one_pass(self._scale)))
                    figures |= passes[-1].figures(name)
                time.sleep(REST_S)
            with self._engine(contender, options) as engine:
                last = self._ask(engine, one_pass(self._scale))
            figures |= last.figures("after a restart")
            figures["after a restart: cached tokens"] = last.cached_tokens
            figures["tokens unlike those of the engine asked first"] = self._unlike([*passes, last])
            figures["written to disk"] = written_bytes(contender, disk_folder) / 2**20
        return figures

    @contextmanager
    def side_by_side(self, contenders: Sequence[str]) -> Iterator[dict[str, FreshRounds]]:
        """Start engines of all contenders, for requests in turn."""
        with ExitStack() as running:
            rounds: dict[str, FreshRounds] = {}
            for name in contenders:
                folder = running.enter_context(self._servers.disk(name))
                start = partial(
                    self._asked, name, self._options(name, folder, self._scale.cpu_share)
                )
                rounds[name] = running.enter_context(closing(FreshRounds(start, self._scale)))
            yield rounds

    def half_once(self, contender: str) -> dict[str, float]:
        """Request half of all blocks a second time, the others only once, with admission
        `second_touch`."""
        count = self._scale.prefixes
        again = fresh_prompts(self._scale, "again", count)
        once = fresh_prompts(self._scale, "once", count)
        mixed = [prompt for pair in zip(again, once, strict=True) for prompt in pair]
        with self._servers.disk(contender) as disk_folder:
            options = self._options(contender, disk_folder, 3.0, admission="second_touch")
            with self._engine(contender, options) as engine:
                for prompts in (mixed, again):
                    self._ask(engine, prompts)
                time.sleep(REST_S)
            with self._engine(contender, options) as engine:
                cached = self._ask(engine, again).cached_tokens
            written = written_bytes(contender, disk_folder)
        return {"written to disk": written / 2**20, "after a restart: cached tokens": cached}

    def _unlike(self, passes: Sequence[EngineAnswers]) -> float:
        """Return the number of tokens, over all these passes, that differ from the first engine's
        first pass."""
        self._first_pass = self._first_pass or passes[0].tokens
        return float(
            sum(
                differing_tokens(found, expected)
                for answers in passes
                for expected, found in zip(self._first_pass, answers.tokens, strict=True)
            )
        )

    def _ask(self, server: ServerProcess, prompts: Sequence[Prompt]) -> EngineAnswers:
        began = time.monotonic()
        replies = server.complete_all(prompts, ANSWER_TOKENS, 1)
        total_s = time.monotonic() - began
        cached = sum(reply.cached_tokens for reply in replies)
        answered = [reply.tokens for reply in replies]
        return EngineAnswers([reply.ttft_s for reply in replies], total_s, cached, answered)

    @contextmanager
    def _asked(self, contender: str, options: dict[str, Any]) -> Iterator[Ask]:
        with self._engine(contender, options) as engine:
            yield partial(self._ask, engine)

    def _engine(
        self, contender: str, options: dict[str, Any]
    ) -> AbstractContextManager[ServerProcess]:
        """Start an engine; warm-up prompts take the one-time costs of memory and kernels."""
        self._warmed += 1
        warm_up = fresh_prompts(self._scale, f"warm up {self._warmed}", 2)
        return self._servers.running(contender, options, warm_up)

    def _options(
        self, contender: str, folder: Path, cpu_share: float, admission: str = "all"
    ) -> dict[str, Any]:
        """Return the arguments of an engine."""
        scale = self._scale
        stored_bytes = scale.pass_blocks * scale.block_bytes
        nvme = {"capacity": max(NVME_BYTES_MIN, 8 * stored_bytes), "admission": admission}
        cpu_bytes = int(cpu_share * scale.pass_blocks) * scale.block_bytes
        options = self._servers.options(
            self._model,
            scale.prompt_tokens_max,
            scale.prompt_tokens_max // BLOCK_TOKENS + DEVICE_SPARE_BLOCKS,
            self._servers.transfer(contender, folder, cpu_bytes, nvme),
        )
        return options | {"max_num_batched_tokens": scale.prompt_tokens_max}


def _cpu_environment() -> dict[str, str]:
    """Return more of the environment, which is the same for every contender.

    Cores: by default vLLM reserves one for its scheduler and, with a connector, another one, if
    there are enough. On two cores, only the engine without a connector would lose half of its
    threads (`OMPProcessManager`).

    Memory: glibc keeps the memory of a step's tensors, or returns it and takes it again page by
    page. By default this depends on the layout of its heap.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {**KEPT_MEMORY, "VLLM_CPU_OMP_THREADS_BIND": cores}


def written_bytes(contender: str, folder: Path) -> int:
    """Return the payload bytes that reached the disk; no engine may be using it.

    kvcascade's index counts its bytes. vLLM's tier removes nothing, so the size of its files is
    used.
    """
    if contender == OURS:
        return disk.written_bytes(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
