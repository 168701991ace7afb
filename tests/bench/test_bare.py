"""What runs with few packages: tests/gpu and the GPU benchmark, in processes that find no others.

Such a process finds the standard library, seven packages, and what these declare to need.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SEVEN = ("torch", "numpy", "psutil", "xxhash", "typer", "rich", "pytest")
OURS = ("kvcascade", "tests", "support", "conftest", "gpu")
TIMEOUT_S = 300.0

HOOK = """
import sys
from importlib.machinery import PathFinder
allowed = {*sys.stdlib_module_names, *%r}
class Few(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not name.startswith("_sysconfigdata") and name.partition(".")[0] not in allowed:
            return None
        return PathFinder.find_spec(name, path, target)
own = ("BuiltinImporter", "FrozenImporter")
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") in own] + [Few]
for name in [n for n in sys.modules if n.partition(".")[0] not in allowed and n != "__main__"]:
    del sys.modules[name]
"""


@cache
def allowed() -> tuple[str, ...]:
    """Modules of the seven packages and of what they need, as their metadata says."""
    found: set[str] = set()
    waiting: list[str] = [*SEVEN]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # what this platform does not need
            for line in requires(name) or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    waiting.append(needed.name)
    return tuple(
        module
        for module, names in packages_distributions().items()
        if any(canonicalize_name(name) in found for name in names)
    )


def bare(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code where only those modules are found."""
    hook = HOOK % ((*allowed(), *OURS),)
    return subprocess.run(
        [sys.executable, "-c", hook + code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ".", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("name", ["vllm", "lmdb", "msgspec", "hypothesis", "safetensors"])
def test_other_packages_are_not_found(name: str) -> None:
    done = bare(
        "from importlib.util import find_spec\n"
        "assert find_spec('numpy') and find_spec(sys.argv[1]) is None",
        name,
    )
    assert done.returncode == 0, done.stderr


def test_gpu_tests_are_collected() -> None:
    code = "import pytest\nraise SystemExit(pytest.main(sys.argv[1:]))"
    done = bare(code, "-q", "-p", "no:cacheprovider", "--collect-only", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("::test_") > 30
    order = list(dict.fromkeys(re.findall(r"::(test_\w+)", done.stdout)))
    assert order[-3:] == [
        "test_moves_the_pages",
        "test_every_contender_has_figures",
        "test_all_tiers_without_an_engine",
    ], "the time may be up before the long ones, and must not be before the others"


def test_the_cuda_path_runs_on_a_twin() -> None:
    code = "import pytest\nraise SystemExit(pytest.main(sys.argv[1:]))"
    done = bare(code, "-q", "-p", "no:cacheprovider", "tests/handlers/test_device_cuda_order.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_cases_of_the_gpu_benchmark_run_on_a_twin(tmp_path: Path) -> None:
    """Small shapes on a device that is ordinary memory, beside the batched copy of single pages."""
    code = (
        "from functools import partial\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, 'tests')\n"
        "from support.bench_scale import SMOKE\n"
        "from support.gpu_twin import MemoryDevice\n"
        "from kvcascade.tools.dev.bench import measurement\n"
        "from kvcascade.tools.dev.bench.gpu import gpu, gpu_moves\n"
        "gpu.SHAPES, gpu.COUNTS = (gpu.GpuShape('small', 3, 64),), (1, 16)\n"
        "gpu_moves.BYTES_PER_TIMING = gpu_moves.PACED_JOBS_MAX = 1\n"
        "device = MemoryDevice(gpu.DeviceRoom(1 << 50, 1 << 50, 1 << 50))\n"
        "asked = replace(gpu.MEASUREMENT, cases=partial(gpu.cases, device=device))\n"
        "setup = measurement.MeasurementSetup(Path(sys.argv[1]), SMOKE, lambda line: None)\n"
        "print(len(measurement.run(asked, setup).rows))"
    )
    done = bare(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 + 2 * 8 + 2 * 4 + 2 * 6


def test_gpu_tests_that_would_begin_too_late_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCASCADE_GPU_TESTS_S", "0")
    code = "import pytest\nraise SystemExit(pytest.main(sys.argv[1:]))"
    done = bare(code, "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_pinning.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 skipped" in done.stdout and "have taken 0 s; run this one alone" in done.stdout


def test_benchmark_modules_are_imported() -> None:
    gpu = ("gpu", "gpu_device", "gpu_moves", "page_copies")
    modules = (
        *(f"dev.bench.gpu.{name}" for name in gpu),
        "dev.bench.round_trip",
        "commands.bench.bench_report",
        "commands.bench.machine_facts",
    )
    code = (
        "from importlib import import_module\n"
        "for name in sys.argv[1:]: import_module('kvcascade.tools.' + name)\n"
        "import kvcascade.handlers.device.device_cuda"
    )
    done = bare(code, *modules)
    assert done.returncode == 0, done.stderr


def test_the_command_drives_all_tiers(tmp_path: Path) -> None:
    """The tier below needs two more packages; the note names them, and nothing else fails."""
    code = (
        "from kvcascade.tools import __main__ as tools\nraise SystemExit(tools.main(sys.argv[1:]))"
    )
    done = bare(code, "bench", "--quick", "--only", "round_trip", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert any("pip install lmdb msgspec" in note for note in found["notes"])
    assert [measured["rows"] for measured in found["measurements"]] == [[]]


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    code = (
        "from kvcascade.tools import __main__ as tools\nraise SystemExit(tools.main(sys.argv[1:]))"
    )
    done = bare(code, "bench", "--only", "busy", "--out", str(tmp_path))
    assert done.returncode == 6 and "vllm not found" in done.stderr
