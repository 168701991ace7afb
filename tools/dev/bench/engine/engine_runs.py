"""Real engines in processes of their own: what they are asked, and what is measured of them.

Requests come one at a time, so that the time to the first token is the request's own. A *pass* asks
about every long prefix twice, in an order that puts all the others between two uses of one: more
than fits on the device, and more than fits in the CPU tier. Prompts that never come again are asked
of engines that run side by side, a few at a time: what offloading costs them is a few percent, and
a machine that other machines share drifts by more than that between one engine and the next.
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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ....commands.bench.bench_results import NONE, OURS, VLLM, BenchError, quantile
from ...demo import disk
from ...server import CPU_ENVIRONMENT, ENVIRONMENT, GPU_OPTIONS, ServerError, ServerProcess
from ..measurement import Say
from ..scale import BLOCK_TOKENS, SUFFIX_BLOCKS, EngineScale

ANSWER_TOKENS = 4
FIRST_TOKEN = 3
CPU_TIERING = "kvcascade.tools.dev.vllm_cpu_tiering"
"""vLLM's own tiering with a device copy that takes CPU tensors."""
VOCABULARY = 1024
DEVICE_SPARE_BLOCKS = 24
"""Beside one prompt: the rest of the one before it."""
IDLE_AFTER_S = 1.2
"""An engine polls, on the cores of the others, until it has heard nothing for a second
(`vllm.distributed.device_communicators.shm_broadcast.SpinCondition`)."""
NVME_BYTES_MIN = 128 << 20
REST_S = 8.0
"""Between the last answer and SIGTERM: with vLLM's default flags an engine gets no time to write
what is in memory only."""
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Has glibc keep memory that it was given (mallopt(3))."""

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What one list of requests took."""

    ttft_s: Sequence[float]
    total_s: float
    cached_tokens: int
    tokens: Sequence[Sequence[int]] = ()
    """What was answered, by prompt."""

    def figures(self, name: str) -> dict[str, float]:
        """Rows of the table."""
        return {
            f"{name}: TTFT p50": quantile(self.ttft_s, 0.5) * 1e3,
            f"{name}: TTFT p95": quantile(self.ttft_s, 0.95) * 1e3,
            f"{name}: total": self.total_s,
        }


Ask = Callable[[Sequence[Prompt]], EngineAnswers]
"""Has one engine answer prompts, one after another."""


def tokens(name: str, blocks: int) -> Prompt:
    """Tokens that always are the same for a name."""
    source = random.Random(name)
    return [source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]


def fresh_prompts(scale: EngineScale, name: str, count: int) -> list[Prompt]:
    """Prompts that share nothing."""
    return [tokens(f"{name} {i}", scale.prefix_blocks) + [FIRST_TOKEN] for i in range(count)]


def one_pass(scale: EngineScale) -> list[Prompt]:
    """Every prefix twice, with two ends."""
    return [
        tokens(f"prefix {i}", scale.prefix_blocks)
        + tokens(f"end {i} {use}", SUFFIX_BLOCKS)
        + [FIRST_TOKEN]
        for use in range(2)
        for i in range(scale.prefixes)
    ]


class FreshRounds:
    """An engine that is asked about a few prompts that never come again, and about others in each
    round; another one gets the same. Another engine takes over now and then: two of a kind differed
    by up to 7 % as long as they lived, by the memory that they had got."""

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
        """One round; its first prompt finds everything cold, and is not counted."""
        if self._round and self._round % self._scale.fresh_rounds_an_engine == 0:
            self._running.close()
            self._ask = self._running.enter_context(self._start())
        self._round += 1
        first, *others = fresh_prompts(self._scale, f"fresh {self._round}", 1 + self._scale.fresh)
        self._sleep(IDLE_AFTER_S)
        self._ask([first])
        return self._ask(others).figures("no reuse")


class Servers:
    """Servers of every contender, one folder on the disk for each."""

    def __init__(self, folder: Path, on_cpu: bool, say: Say) -> None:
        self._folder = folder
        self._on_cpu = on_cpu
        self._say = say
        self._started = 0

    @contextmanager
    def running(
        self, contender: str, options: dict[str, Any], warm_up: Sequence[Prompt] = ()
    ) -> Iterator[ServerProcess]:
        """A server that answers; it is stopped by SIGTERM, unless it was stopped or killed."""
        self._started += 1
        self._say(f"{contender}: starting server {self._started}")
        log = self._folder / f"server-{self._started}.log"
        environment = {**ENVIRONMENT, **(_cpu_environment() if self._on_cpu else {})}
        try:
            with ServerProcess(log, options, environment) as server:
                server.ready()
                server.complete_all(warm_up, ANSWER_TOKENS, 1)
                self._say(f"{contender}: server {self._started} answers")
                yield server
                if server.is_running:
                    server.stop()
        except ServerError as error:
            raise BenchError(str(error)) from error

    @contextmanager
    def disk(self, contender: str) -> Iterator[Path]:
        """An empty folder for what it writes."""
        folder = self._folder / f"kv-{contender}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def options(
        self, model: Path, tokens_max: int, device_blocks: int, extra: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Arguments of a server; `extra`: see `offloading`."""
        found: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": tokens_max,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": device_blocks,
        }
        if not self._on_cpu:
            found |= GPU_OPTIONS
        if extra is not None:
            found["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        return found

    def offloading(
        self, contender: str, folder: Path, cpu_bytes: int, nvme: dict[str, Any]
    ) -> dict[str, Any] | None:
        """`kv_connector_extra_config` of a contender; `nvme`: more of our tier on disk."""
        if contender == NONE:
            return None
        if contender == VLLM:
            own = {"spec_name": "TieringOffloadingSpec"}
            if self._on_cpu:
                own = {"spec_name": "CpuTieringSpec", "spec_module_path": CPU_TIERING}
            return {
                **own,
                "cpu_bytes_to_use": cpu_bytes,
                "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
            }
        assert contender == OURS
        tier = {"type": "nvme", "path": str(folder), "min_free": 0, **nvme}
        return {
            "spec_name": "CascadeOffloadingSpec",
            "spec_module_path": "kvcascade.spec",
            "tiers": [{"type": "cpu", "capacity": cpu_bytes}, tier],
        }


class EngineRuns:
    """Servers of every contender over one model."""

    def __init__(
        self,
        servers: Servers,
        model: Path,
        scale: EngineScale,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._servers = servers
        self._model = model
        self._scale = scale
        self._sleep = sleep
        self._warmed = 0
        self._first_pass: Sequence[Sequence[int]] = ()
        """Tokens of the first pass of all: every other pass asks the same."""

    def prefixes(self, contender: str) -> dict[str, float]:
        """Two passes, a restart, one more pass; bytes written, tokens compared."""
        passes: list[EngineAnswers] = []
        with self._servers.disk(contender) as disk_folder:
            options = self._options(contender, disk_folder, self._scale.cpu_share)
            figures: dict[str, float] = {}
            with self._engine(contender, options) as engine:
                for name in ("first pass", "second pass"):
                    passes.append(self._ask(engine, one_pass(self._scale)))
                    figures |= passes[-1].figures(name)
                self._sleep(REST_S)
            with self._engine(contender, options) as engine:
                last = self._ask(engine, one_pass(self._scale))
            figures |= last.figures("after a restart")
            figures["after a restart: cached tokens"] = last.cached_tokens
            figures["tokens unlike those of the engine asked first"] = self._unlike([*passes, last])
            figures["written to disk"] = written_bytes(contender, disk_folder) / 2**20
        return figures

    @contextmanager
    def side_by_side(self, contenders: Sequence[str]) -> Iterator[dict[str, FreshRounds]]:
        """Engines of them all, to be asked in turns."""
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
        """Half of all blocks are asked for a second time, the others never; `second_touch`."""
        count = self._scale.prefixes
        again = fresh_prompts(self._scale, "again", count)
        once = fresh_prompts(self._scale, "once", count)
        mixed = [prompt for pair in zip(again, once, strict=True) for prompt in pair]
        with self._servers.disk(contender) as disk_folder:
            options = self._options(contender, disk_folder, 3.0, admission="second_touch")
            with self._engine(contender, options) as engine:
                for prompts in (mixed, again):
                    self._ask(engine, prompts)
                self._sleep(REST_S)
            with self._engine(contender, options) as engine:
                cached = self._ask(engine, again).cached_tokens
            written = written_bytes(contender, disk_folder)
        return {"written to disk": written / 2**20, "after a restart: cached tokens": cached}

    def _unlike(self, passes: Sequence[EngineAnswers]) -> float:
        """Tokens that differ from the first engine's first pass, in all of these passes."""
        self._first_pass = self._first_pass or passes[0].tokens
        return float(
            sum(
                a != b
                for answers in passes
                for expected, found in zip(self._first_pass, answers.tokens, strict=True)
                for a, b in zip_longest(expected, found)
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
        """Memory, kernels: what comes only once comes with the prompts that warm it up."""
        self._warmed += 1
        warm_up = fresh_prompts(self._scale, f"warm up {self._warmed}", 2)
        return self._servers.running(contender, options, warm_up)

    def _options(
        self, contender: str, folder: Path, cpu_share: float, admission: str = "all"
    ) -> dict[str, Any]:
        """Arguments of an engine."""
        scale = self._scale
        stored_bytes = scale.pass_blocks * scale.block_bytes
        nvme = {"capacity": max(NVME_BYTES_MIN, 8 * stored_bytes), "admission": admission}
        cpu_bytes = int(cpu_share * scale.pass_blocks) * scale.block_bytes
        options = self._servers.options(
            self._model,
            scale.prompt_tokens_max,
            scale.prompt_tokens_max // BLOCK_TOKENS + DEVICE_SPARE_BLOCKS,
            self._servers.offloading(contender, folder, cpu_bytes, nvme),
        )
        return options | {"max_num_batched_tokens": scale.prompt_tokens_max}


def _cpu_environment() -> dict[str, str]:
    """The same for every contender. Cores: by itself vLLM reserves one for its scheduler and, with
    a connector, another one, if there are enough; on two cores, only the engine without one loses
    half of its threads (`OMPProcessManager`). Memory: glibc keeps what tensors of a step leave, or
    gives it back and takes it again page by page, as the layout of its heap happens to be."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {**CPU_ENVIRONMENT, **KEPT_MEMORY, "VLLM_CPU_OMP_THREADS_BIND": cores}


def written_bytes(contender: str, folder: Path) -> int:
    """Payload that reached the disk; no engine may be using it.

    Ours is counted by the index; vLLM's tier removes nothing, so its files are what it wrote.
    """
    if contender == OURS:
        return disk.written_bytes(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
