"""Time to the first token beside a remote tier whose server stops, or whose link is slow.

    python -m kvcascade.tools.dev.bench.remote_ttft --out FOLDER

Two of vLLM's servers with a small model run side by side: "remote" has a CPU tier and a remote
tier, "none" has the CPU tier alone. Requests come one at a time, to both in turn. A third server
has filled the remote tier before with other prompts. The server of the remote tier is in a network
namespace, so that its link can be limited. That needs root, `ip`, `tc`, and redis-server or
valkey-server on the PATH (or --binary).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from ..model import make_llama
from ..remote_server import listening, valkey_binary, valkey_command
from ..server import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    GPU_OPTIONS,
    Completion,
    ServerProcess,
    free_port,
    is_on_cpu,
    write_tokenizer,
)
from .engine.engine_runs import IDLE_AFTER_S

NETWORK = "10.215.0"
VOCABULARY, BLOCK_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 1024, 32, 1000, 2
WHOLE_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
DEADLINE_S = 2.0
SLOW_LINK = "100mbit"
RECOVERY_LIMIT_S, RECOVERY_PAUSE_S = 20.0, 0.5
WRITTEN = "vllm:kvcascade_demoted_blocks{tier=remote}"
WRITE_LIMIT_S = 60.0
Prompt = list[int]


class Link:
    """A network namespace for the server."""

    def __init__(self) -> None:
        self.name = f"kvb{os.getpid()}"
        self.address = f"{NETWORK}.2"

    @contextmanager
    def __call__(self) -> Iterator[Link]:
        """Make the namespace; it is gone at the end."""
        here, there = f"{self.name}a", f"{self.name}b"
        _run("ip", "netns", "add", self.name)
        try:
            ends = ("type", "veth", "peer", "name", there, "netns", self.name)
            _run("ip", "link", "add", here, *ends)
            _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run(*self.within, "ip", "addr", "add", f"{self.address}/24", "dev", there)
            _run(*self.within, "ip", "link", "set", there, "up")
            yield self
        finally:
            _run("ip", "netns", "del", self.name)

    @property
    def within(self) -> tuple[str, ...]:
        """Return the begin of a command that runs there."""
        return "ip", "netns", "exec", self.name

    def limit(self, rate: str | None) -> None:
        """Limit what leaves the server; None: no limit."""
        device = ("dev", f"{self.name}b", "root")
        shape = ("tbf", "rate", str(rate), "burst", "64kb", "latency", "500ms")
        _run(
            *self.within,
            "tc",
            "qdisc",
            *(("replace", *device, *shape) if rate else ("del", *device)),
        )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class Engines:
    """Servers over one model."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._model = make_llama(folder / "model", vocab=VOCABULARY)
        write_tokenizer(self._model, VOCABULARY)

    @contextmanager
    def running(self, name: str, has_remote: bool) -> Iterator[ServerProcess]:
        """Run a server that answers, and has answered a prompt."""
        remote = {"type": "remote", "url": self._url, "insecure": True, "writes": "through"}
        remote["deadline_s"] = DEADLINE_S
        tiers = [{"type": "cpu", "capacity": "512MiB"}, *([remote] if has_remote else [])]
        extra = {"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"}
        options: dict[str, Any] = {
            "model": str(self._model),
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 100,
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {**extra, "tiers": tiers},
            },
            **({} if is_on_cpu() else GPU_OPTIONS),
        }
        environment = {**ENVIRONMENT, **(CPU_ENVIRONMENT if is_on_cpu() else {})}
        with ServerProcess(self._folder / f"{name}.log", options, environment) as server:
            server.ready()
            for prompt in prompts(f"warm up {name}", 3):
                server.complete(prompt, ANSWER_TOKENS)
            yield server
            server.stop()


def prompts(name: str, count: int) -> list[Prompt]:
    """Return prompts that depend only on the name."""
    source = random.Random(name)
    return [[source.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def fill(engines: Engines, held: Sequence[Prompt]) -> None:
    """Have a server compute prompts, and wait until their blocks are in the remote tier."""
    blocks = WHOLE_TOKENS // BLOCK_TOKENS
    with engines.running("first", has_remote=True) as server:
        for number, prompt in enumerate(held, start=1):
            server.complete(prompt, ANSWER_TOKENS)
            ends_s = time.monotonic() + WRITE_LIMIT_S
            while server.metrics().get(WRITTEN, 0) < number * blocks:
                if time.monotonic() > ends_s:
                    raise SystemExit("the remote tier does not take the blocks")


class Pair:
    """Both servers."""

    def __init__(self, remote: ServerProcess, none: ServerProcess) -> None:
        self._servers = {"remote": remote, "none": none}

    def ask(self, asked: Sequence[Prompt]) -> dict[str, list[Completion]]:
        """Send each prompt to both in turn, the other one being idle."""
        found: dict[str, list[Completion]] = {name: [] for name in self._servers}
        for number, prompt in enumerate(asked):
            for name in (*self._servers,) if number % 2 else (*reversed(self._servers),):
                time.sleep(IDLE_AFTER_S)
                found[name].append(self._servers[name].complete(prompt, ANSWER_TOKENS))
        return found

    def row(self, case: str, asked: Sequence[Prompt]) -> dict[str, Any]:
        """Send prompts; return times to the first token, cached tokens and wrong tokens."""
        found = self.ask(asked)
        ms = {name: [1e3 * each.ttft_s for each in answers] for name, answers in found.items()}
        pairs = list(zip(found["remote"], found["none"], strict=True))
        return {
            "case": case,
            "ttft_ms": ms,
            "median_ms": {name: median(values) for name, values in ms.items()},
            "ratio": median(ms["remote"]) / median(ms["none"]),
            "cached_tokens": sum(each.cached_tokens for each in found["remote"]),
            "prompt_tokens": sum(each.prompt_tokens for each in found["remote"]),
            "wrong_tokens": sum(one.tokens != other.tokens for one, other in pairs),
        }

    def recovery_s(self, asked: Sequence[Prompt]) -> float | None:
        """Return the seconds until a prompt comes from the remote tier; None: not in time."""
        began_s = time.monotonic()
        for prompt in asked:
            if self._servers["remote"].complete(prompt, ANSWER_TOKENS).cached_tokens:
                return time.monotonic() - began_s
            if time.monotonic() - began_s > RECOVERY_LIMIT_S:
                return None
            time.sleep(RECOVERY_PAUSE_S)
        return None


def measure(
    pair: Pair, link: Link, server: subprocess.Popen[bytes], held: Sequence[Prompt], each: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows."""
    yield pair.row("in the remote tier", held[:each])
    yield pair.row("new prompts", prompts("new", each))
    link.limit(SLOW_LINK)
    yield pair.row(f"in the remote tier, link of {SLOW_LINK}", held[each : 3 * each])
    link.limit(None)
    yield pair.row("in the remote tier, link mended", held[3 * each : 4 * each])
    _signal(server, signal.SIGSTOP)
    try:
        yield pair.row("server stopped, first prompt", prompts("first", 1))
        yield pair.row("server stopped, next prompts", prompts("stopped", 2 * each))
    finally:
        _signal(server, signal.SIGCONT)
    yield {
        "case": "server goes on: until a hit, s",
        "recovery_s": pair.recovery_s(held[4 * each :]),
    }


def _signal(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """`ip netns exec` has become the server."""
    os.kill(server.pid, number)


def shown(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "recovery_s" in row:
        return f"| {row['case']} | {row['recovery_s']} | | | |"
    figures = row["median_ms"]
    return (
        f"| {row['case']} | {figures['remote']:.0f} | {figures['none']:.0f} | {row['ratio']:.2f} "
        f"| {row['cached_tokens']} of {row['prompt_tokens']} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write `remote-ttft.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the JSON file")
    parser.add_argument("--binary", default=valkey_binary(), help="path of the server")
    parser.add_argument("--each", type=int, default=6, help="prompts of a row")
    options = parser.parse_args(argv)
    if not options.binary:
        raise SystemExit("no valkey-server or redis-server is on the PATH; give --binary")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        link = stack.enter_context(Link()())
        port = free_port()
        command = valkey_command(options.binary, port, link.address)
        server = stack.enter_context(
            listening([*link.within, *command, "--protected-mode", "no"], port, link.address)
        )
        engines = Engines(folder, f"redis://{link.address}:{port}")
        held = prompts("held", 10 * options.each)
        fill(engines, held)
        remote, none = (
            stack.enter_context(engines.running(name, name == "remote"))
            for name in ("remote", "none")
        )
        print("| case | remote, ms | none, ms | ratio | cached tokens |\n|---|---|---|---|---|")
        for row in measure(Pair(remote, none), link, server, held, options.each):
            rows.append(row)
            print(shown(row), flush=True)
    described = {"cpus": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    (options.out / "remote-ttft.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
