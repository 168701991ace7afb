"""A path with more segments than a process may open files: commands, and the Python API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cache_rig import call_outside
from support.children import environment
from support.keys import keys

import kvcascade
from kvcascade import PutOutcome
from kvcascade.tools.commands.command_line import ExitCode

SEGMENTS, BLOCK, LARGE = 300, 4096, 65536
FEW = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
"""Command before another one, which may then open 128 files."""
FEW_AT_FIRST = ("sh", "-c", 'ulimit -Sn 16; exec "$@"', "sh")
"""Command before another one, which may open 16 files until it raises its limit."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path with segments of one block each."""
    root = tmp_path_factory.mktemp("many")
    payloads = [bytes([number % 256]) * BLOCK for number in range(SEGMENTS)]
    with kvcascade.open(
        root,
        namespace="many",
        block_bytes=BLOCK,
        capacity="64MiB",
        segment_size="4KiB",
        min_free=0,
    ) as cache:
        assert cache.put(keys(SEGMENTS), payloads) == [PutOutcome.STORED] * SEGMENTS
        assert len(os.listdir(root / cache.name / "segments")) >= SEGMENTS
    return root


def test_verify_finds_no_damage(root: Path) -> None:
    answer = call_outside("verify", root, "--repair", "--json", before=FEW)
    assert answer.code == ExitCode.OK, answer.out + answer.err
    assert (answer.one["ok"], answer.one["dropped"]) == (SEGMENTS, 0)


def test_export_writes_every_block(root: Path, tmp_path: Path) -> None:
    answer = call_outside("export", root, tmp_path / "all.safetensors", "--json", before=FEW)
    assert answer.code == ExitCode.OK, answer.out + answer.err
    assert (answer.document["blocks"], answer.document["skipped"]) == (SEGMENTS, 0)


_READER = """
import os, sys
import kvcascade
from support.keys import keys
with kvcascade.open(sys.argv[1], namespace="many") as cache:
    found = cache.get(keys(int(sys.argv[2])))
    own = [os.open(os.devnull, os.O_RDONLY) for _ in range(48)]
print(sum(bytes(b) == bytes([n % 256]) * len(b) for n, b in enumerate(found) if b is not None))
"""


def test_an_open_cache_leaves_descriptors_to_its_process(root: Path) -> None:
    command = [*FEW, sys.executable, "-c", _READER, str(root), str(SEGMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout.strip()) == (0, str(SEGMENTS)), done.stderr


@pytest.mark.parametrize("command", ["verify", "inspect", "top"])
def test_a_command_raises_its_limit_for_many_namespaces(tmp_path: Path, command: str) -> None:
    """As the writer it keeps files of each namespace open."""
    for number in range(8):
        with kvcascade.open(
            tmp_path,
            namespace=f"n{number}",
            block_bytes=LARGE,
            capacity="256MiB",
            segment_size="1MiB",
            min_free=0,
        ) as cache:
            assert cache.put(keys(1), [bytes(LARGE)]) == [PutOutcome.STORED]
    more = ("--once",) if command == "top" else ()
    answer = call_outside(command, tmp_path, *more, before=FEW_AT_FIRST)
    assert answer.code == ExitCode.OK, answer.out + answer.err
    assert "Too many open files" not in answer.out + answer.err
