"""A real engine as a test sees it: started, asked, stopped cleanly, or killed altogether."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from support.engine_nursery import ForkedRunner, can_fork, nursery
from support.engine_runner import NETWORK
from support.waiting import wait_until

from kvcascade.tools.dev.server import GPU_OPTIONS, is_on_cpu, offloading

ROOT = Path(__file__).resolve().parent.parent.parent
GONE_TIMEOUT_S = 60.0
SETTLE_LOOK_S, SETTLE_LIMIT_S = 0.1, 180.0
"""Far more than a next writer waits for writes of a former one, and a breaker rests afterwards."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads leave the cores to the other test process
    "PYTHONHASHSEED": "0",  # engines up to 0.28 find their blocks again only with a fixed seed
}
AT_ANY_SPEED: dict[str, Any] = {"load_or_recompute": False, "promotion_deadline_s": 120.0}
"""Options of the cascade with which the speed of the machine does not decide what is read."""
IN_A_NETWORK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""Its ranks talk to each other through the loopback device."""
Answers = list[dict[str, Any]]


class EngineFailed(Exception):
    """The engine answered with an error, or is gone; the end of its log is in the message."""


def engine_options(model: Path, device_blocks: int, extra: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; `extra` is the cascade's configuration, None: no offloading."""
    options: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",  # only float32 gives the same tokens whatever is batched together
        "max_model_len": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": 32,
        "num_gpu_blocks_override": device_blocks,
        "disable_log_stats": False,
        **({} if is_on_cpu() else GPU_OPTIONS),
    }
    if extra is not None:
        spec = {"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"}
        options["kv_transfer_config"] = offloading({**spec, **extra})
    return options


def has_device_each(workers: int) -> bool:
    """Whether every worker of an engine would have a device of its own."""
    import torch

    return is_on_cpu() or torch.cuda.device_count() >= workers


def environment() -> dict[str, str]:
    """Variables of an engine's processes: ours, and where our modules and the tests' are."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def _runner(
    folder: Path, log: IO[bytes], more: Mapping[str, str]
) -> subprocess.Popen[bytes] | ForkedRunner:
    """`engine_runner.py` in a process of its own; forked where that is possible."""
    variables = {**environment(), **more}
    if can_fork() and nursery().fits(variables):
        return nursery().fork(variables, folder, log)
    return subprocess.Popen(
        [sys.executable, "-m", "support.engine_runner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=variables,
        cwd=folder,
        start_new_session=True,
    )


class Engine:
    """A running engine; leaving the context kills whatever is left of it."""

    def __init__(self, log: Path, options: dict[str, Any], network: str = "") -> None:
        """`network`: name of the network namespace in which its processes are."""
        self._log = log
        more = {NETWORK: network, **IN_A_NETWORK} if network else {}
        with log.open("ab") as stream:
            self._process = _runner(log.parent, stream, more)
        try:
            self._ask(do="start", options=options)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        salt: str | None = None,
        adapter: Path | None = None,
    ) -> Answers:
        """Send requests together; `salt`: the tenant's cache salt; `adapter`: a LoRA's folder."""
        command = {"do": "generate", "prompts": prompts, "max_tokens": max_tokens, "salt": salt}
        if adapter is not None:
            command["adapter"] = str(adapter)
        answers: Answers = self._ask(**command)
        return answers

    def ask(self, requests: Sequence[Mapping[str, Any]], **how: Any) -> Answers:
        """Send requests of rarer kinds; see `rare_requests.py`, and `Runner.ask` for the rest."""
        answers: Answers = self._ask(do="ask", requests=requests, **how)
        return answers

    def reset(self, connector: bool) -> None:
        """`reset_prefix_cache`."""
        self._ask(do="reset", connector=connector)

    def metrics(self) -> dict[str, float]:
        """Everything that the engine counts."""
        found: dict[str, float] = self._ask(do="metrics")
        return found

    def settle(self) -> None:
        """Wait until a tier below has every block. One that a worker still writes is not dirty yet.

        Blocks must become due by their age: `write_mode` "back" with a short `dirty_age_s`.
        """
        dirty = "vllm:kvcascade_tier_dirty_ratio[cpu]"
        arriving = "vllm:kv_offload_cpu_cache_write_usage_perc"

        def is_settled() -> bool:
            found = self.metrics()
            return found[dirty] == found[arriving] == 0

        try:
            wait_until(is_settled, SETTLE_LIMIT_S, SETTLE_LOOK_S)
        except AssertionError as error:
            error.add_note(f"the engine counts {self.metrics()}")
            raise

    def stop(self) -> None:
        """A clean shutdown; all processes are gone afterwards."""
        family = self._family()
        self._ask(do="stop")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(GONE_TIMEOUT_S)
        assert not psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1], "a process is left"

    def kill(self) -> None:
        """`kill -9` of every process at once; returns when they are gone."""
        family = self._family()
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue

    @property
    def process(self) -> psutil.Process:
        """The first of its processes."""
        return psutil.Process(self._process.pid)

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"it is gone\n{self.log_tail()}") from None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"it ended\n{self.log_tail()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.log_tail()}")
        return answer

    def log_tail(self, characters: int = 20_000) -> str:
        """The end of the log."""
        return self._log.read_text(errors="replace")[-characters:]
