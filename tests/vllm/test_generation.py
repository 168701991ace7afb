"""The adapter is chosen by what the installed vLLM offers; what fits none is one clear sentence.

Every case is a process of its own with a tree of modules in place of vLLM: those modules and names
by which the real releases differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcascade.vllm.generation import Generation, supported

ROOT = Path(__file__).resolve().parent.parent.parent
RESULT = "from dataclasses import dataclass\n@dataclass\nclass TransferResult:\n    job_id: int\n"
TREES: dict[str, dict[str, str]] = {
    "0.9.2": {},
    "0.15.1": {"abstract": "", "mediums": "", "worker/worker": "TransferResult = tuple[int, bool]"},
    "0.16.0": {"abstract": "", "mediums": "", "spec": "", "worker/worker": RESULT},
    "0.19.1": {"abstract": "", "mediums": "", "spec": "", "worker/worker": RESULT},
    "0.20.2": {"abstract": "OffloadKey = bytes", "mediums": "", "worker/worker": RESULT},
    "0.21.0": {"base": "OffloadKey = bytes", "worker/worker": RESULT},
    "0.23.0": {"base": "class OffloadingManager: ...", "worker/worker": RESULT},
    "0.24.0": {
        "base": "class OffloadingManager:\n    has_pending_work = bool",
        "worker/worker": RESULT,
    },
    "0.25.1": {"base": "OffloadKey = OffloadingWorker = bytes"},
    "0.26.0": {"base": "OffloadKey = OffloadingWorker = bytes", "config": ""},
    "0.27.1": {"base": "OffloadKey = OffloadingWorker = bytes", "config": ""},
    "0.33.0": {"base": "OffloadKey = OffloadingWorker = bytes", "config": ""},
}
ADAPTERS = {
    "0.16.0": "v0_16",
    "0.19.1": "v0_16",
    "0.24.0": "v0_24",
    "0.25.1": "v0_25",
    "0.26.0": "v0_26",
    "0.27.1": "v0_26",
    "0.33.0": "v0_26",
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with nothing but the standard library, this tree and a folder to import from."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tree(folder: Path, version: str) -> None:
    """Write the modules of a version."""
    package = folder / "vllm"
    (package / "v1").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "v1" / "__init__.py").write_text("")
    for name, text in TREES[version].items():
        module = package / "v1" / "kv_offload" / f"{name}.py"
        for parent in (module.parent, package / "v1" / "kv_offload"):
            parent.mkdir(parents=True, exist_ok=True)
            (parent / "__init__.py").touch()
        module.write_text(text + "\n")


@pytest.mark.parametrize("version", sorted(ADAPTERS))
def test_supported_versions_have_an_adapter(version: str, tmp_path: Path) -> None:
    tree(tmp_path, version)
    done = run("from kvcascade.vllm.generation import adapter; print(adapter())", tmp_path)
    assert done.stdout.strip() == ADAPTERS[version], done.stderr


@pytest.mark.parametrize("version", sorted(TREES.keys() - ADAPTERS.keys()))
def test_others_are_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    tree(tmp_path, version)
    done = run("import kvcascade.spec", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvcascade.errors.ConfigError: kvcascade does not support")
    assert f"vLLM {version}," in last and f"install vLLM {supported()}." in last


GATES = (
    "seeds_hashes_with_a_constant",
    "offers_states_once",
    "offers_the_last_token",
    "schedules_block_holders_first",
    "sees_blocks_of_other_connectors",
)
ANSWERS = {
    "0.25.1": (0, 0, 0, 0, 0),
    "0.28.1": (0, 0, 1, 0, 0),
    "0.29.0": (1, 1, 1, 0, 0),
    "0.30.0": (1, 1, 0, 0, 0),
    "0.32.1": (1, 1, 0, 1, 0),
    "0.33.0": (1, 1, 0, 1, 1),
    "0.33.2.post1+cpu": (1, 1, 0, 1, 1),
    "1.0.0": (1, 1, 0, 1, 1),
    "v0.33.0": (1, 1, 0, 1, 1),
    # Before the release that is named, so perhaps without what it brought.
    "0.30.0rc1": (1, 1, 1, 0, 0),
    "0.30.0.dev3+g1a2b3c": (1, 1, 1, 0, 0),
    "0.33.0rc1": (1, 1, 0, 1, 0),
    "0.33rc1": (1, 1, 0, 1, 0),
    # After the release that is named, so perhaps with what the next one brought.
    "0.25.1rc1": (0, 0, 1, 0, 0),
    "0.28.1rc2.dev3+g12": (0, 1, 1, 0, 0),
    "0.33.1.dev7": (1, 1, 0, 1, 1),
    "0.33.0.post1.dev3+g12": (1, 1, 0, 1, 1),
    "0.25.0.post1.dev3+g12": (0, 0, 1, 0, 0),
    # Of no known release.
    "dev": (0, 1, 1, 0, 0),
    "": (0, 1, 1, 0, 0),
    "0.1.dev9+gabc": (0, 1, 1, 0, 0),
    "0.15.1": (0, 1, 1, 0, 0),
}
ASK = """
import json, vllm
from kvcascade.vllm import generation
found, numbers = {}, {}
for version in %r:
    vllm.__version__ = version
    found[version] = [int(getattr(generation, gate)()) for gate in %r]
    numbers[version] = generation.vllm_version()
print(json.dumps([found, numbers]))
"""


def test_a_version_that_says_too_little_gets_the_careful_answers(tmp_path: Path) -> None:
    """A build from source has no version of a release, or none at all."""
    tree(tmp_path, "0.33.0")
    done = run(ASK % (list(ANSWERS), GATES), tmp_path)
    found, numbers = json.loads(done.stdout)
    assert {version: tuple(answers) for version, answers in found.items()} == ANSWERS
    assert numbers["dev"] == numbers[""] == numbers["0.1.dev9+gabc"] == [0, 0]
    assert numbers["0.28.1rc2.dev3+g12"] == [0, 28]
    assert len([line for line in done.stderr.splitlines() if "'dev'" in line]) == 1


def test_no_vllm_at_all(tmp_path: Path) -> None:
    done = run("import kvcascade.spec", tmp_path)
    assert "needs vLLM, which is not installed" in done.stderr.splitlines()[-1]


def test_supported_versions_in_words() -> None:
    spans = [(34, 34), (26, 30), (25, 25), (16, 19)]
    table = [Generation("module", first, last, lambda: True) for first, last in spans]
    assert supported(table) == "0.16 to 0.19 or 0.25 to 0.30 or 0.34"
