"""Every program in docs/examples runs, and prints what it is there to show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvcascade

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LIMIT_S = 120.0


def run(name: str, *arguments: object) -> str:
    """Output of a program."""
    source = Path(kvcascade.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, name, *map(str, arguments)],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_named_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.py"))


def test_blocks_are_stored_and_lie_in_a_segment(tmp_path: Path) -> None:
    # The options of a path stay: the example needs no free twentieth of this machine's disk.
    kvcascade.open(
        tmp_path, namespace="prepared", block_bytes=4096, capacity="64MiB", min_free=0
    ).close()
    lines = run("store_blocks.py", tmp_path).splitlines()
    assert lines == ["stored: 4", f"there: {[True] * 4 + [False]}", "equal: True"]
    (segment, *_) = sorted(tmp_path.glob("examples-*/segments/*.safetensors"))
    first, second = run("read_segment.py", segment).splitlines()
    assert first.startswith("segment 0 of ") and second.endswith("bytes, 4 in use")


def test_a_policy_finds_blocks() -> None:
    name, found = run("run_policy.py", "lru").split(maxsplit=1)
    assert name == "lru:" and 0.1 < float(found.split()[0]) < 0.5


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    requests = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
        for at in range(2)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert run("replay_trace.py", trace).startswith("2 requests, 0.500 of all tokens found")


def test_rules_of_ones_own() -> None:
    assert run("own_policy.py") == "evicted next: third\nwritten at its uses: [3, 4]\n"
