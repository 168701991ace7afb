"""Record the metrics of a real engine, as the history that dashboards and alerts are tested with.

    python -m kvcascade.tools.dev.record_metrics tests/data/metrics-run.txt.gz

A server with a small model serves prompts that fit neither its device cache nor its CPU and NVMe
tiers, and is scraped meanwhile. Its remote tier is on Valkey or Redis if there is one, and in a
folder otherwise. The file is in the OpenMetrics format with the time of every scrape, so
`promtool tsdb create-blocks-from openmetrics` turns it into a database.
"""

from __future__ import annotations

import gzip
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from .remote_server import remote_tier
from .server import (
    BLOCK_TOKENS,
    ServerProcess,
    cascade_extra,
    environment_of,
    is_on_cpu,
    offloading,
    served_model,
    server_options,
)

VOCABULARY = 1024
BLOCK_BYTES = 4 * 4 * 2 * BLOCK_TOKENS * 32 * 4
"""Layers, KV heads, key and value, tokens, size of a head, and bytes of a float32."""
PROMPTS = 12
PROMPT_TOKENS = 640
ANSWER_TOKENS = BLOCK_TOKENS - 1
"""Too few for another block, and enough to bound the rate: most prompts are hits of some tier."""
CLIENTS = 2
SCRAPES = 24
SCRAPE_INTERVAL_S = 5.0
KEPT = ("vllm:",)
"""Prefixes of the metrics that are kept; those of Python and of the HTTP server are not."""

Scrape = tuple[float, str]
"""Seconds since the epoch, and the text of `/metrics`."""


def configuration(model: Path, disk: Path, remote: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the server: caches far smaller than the prompts.

    `remote`: options of the remote tier.
    """
    tiers = [
        {"type": "cpu", "capacity": 64 * BLOCK_BYTES},
        {
            "type": "nvme",
            "capacity": 200 * BLOCK_BYTES,
            "path": str(disk),
            "min_free": 0,
            "write_budget": "1GiB",
        },
        {"type": "remote", **remote},
    ]
    transfer = offloading(cascade_extra(tiers, write_mode="through"))
    return server_options(model, 2048, 80, transfer, on_cpu=is_on_cpu())


def scrapes_of(server: ServerProcess) -> list[Scrape]:
    """Serve prompts in random order, and scrape until there are `SCRAPES`."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    found: list[Scrape] = []
    due_s = time.monotonic()
    while len(found) < SCRAPES:
        if time.monotonic() >= due_s:
            due_s += SCRAPE_INTERVAL_S
            found.append((time.time(), server.fetch("/metrics").decode()))
            print(f"scrape {len(found)} of {SCRAPES}", flush=True)
        server.complete_all([rng.choice(prompts) for _ in range(CLIENTS)], ANSWER_TOKENS, CLIENTS)
    return found


def history(scrapes: Sequence[Scrape]) -> str:
    """Return the scrapes as one text in the OpenMetrics format, family by family."""
    families: dict[str, Metric] = {}
    for at_s, text in scrapes:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(KEPT):
                continue
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    kept.add_sample(sample.name, sample.labels, sample.value, at_s)
    lines: list[str] = []
    for family in families.values():
        lines.append(f"# TYPE {family.name} {family.type}")
        lines += [_line(*sample[:4]) for sample in sorted(family.samples, key=_series)]
    return "\n".join([*lines, "# EOF", ""])


def _series(sample: Any) -> tuple[Any, ...]:
    return sample.name, sorted(sample.labels.items()), sample.timestamp


def _line(name: str, labels: Mapping[str, str], value: float, at_s: Any) -> str:
    # Labels that Prometheus adds itself; the file is read without it.
    all_labels = {**labels, "job": "vllm", "instance": "localhost:8000"}
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in all_labels.items())
    return f"{name}{{{inner}}} {value!r} {at_s:.3f}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def record(folder: Path) -> list[Scrape]:
    """Run the server in an empty folder, and return its scrapes."""
    model = served_model(folder / "model", VOCABULARY, seed=5)
    root = str(Path(__file__).resolve().parents[2])
    environment = environment_of(on_cpu=is_on_cpu())
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with remote_tier(folder / "remote") as remote:
        options = configuration(model, folder / "disk", remote)
        return _served(folder / "server.log", options, environment)


def _served(log: Path, options: Mapping[str, Any], environment: Mapping[str, str]) -> list[Scrape]:
    with ServerProcess(log, options, environment) as server:
        print(f"ready after {server.ready():.0f} s", flush=True)
        return scrapes_of(server)


def main(arguments: Sequence[str]) -> int:
    """Write the file that is named; return the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        scrapes = record(Path(folder))
    text = history(scrapes)
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{target}: {len(scrapes)} scrapes, {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
