"""`kvcascade export` and `import` with files that somebody made on purpose, and places that are no
files: one sentence, no more memory than the file has bytes for, and nothing half done is left."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import ROOT, Answer, call
from support.children import environment
from support.path_cache import fill_path

from kvcascade.tools.commands.command_line import ExitCode

BLOCK = 4096
RECORD = 128


def put(path: Path, document: dict[str, Any], *, ascii_only: bool = True) -> Path:
    """A file with this header and one empty block."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    room = -(-(len(text) + 8) // BLOCK) * BLOCK
    payload = bytes(BLOCK + RECORD)
    path.write_bytes(struct.pack("<Q", room - 8) + text.ljust(room - 8) + payload)
    return path


def header(
    fields: object, *, label: str = "odd", slots: int = 8, about: object = None
) -> dict[str, Any]:
    """As `export` writes it."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return {
        "__metadata__": {
            "format": "kvcascade-export",
            "format_version": "1",
            "fingerprint": hashlib.sha256(canonical.encode()).hexdigest(),
            "label": label,
            "fields": json.dumps(fields, sort_keys=True),
            "about": json.dumps(about or {}, sort_keys=True),
            "slots_per_segment": str(slots),
            "created": "2026-01-01T00:00:00+00:00",
        },
        "blocks": {"dtype": "U8", "shape": [1, BLOCK], "data_offsets": [0, BLOCK]},
        "slots": {"dtype": "U8", "shape": [1, RECORD], "data_offsets": [BLOCK, BLOCK + RECORD]},
    }


def nested(levels: int) -> object:
    """An object in an object in an object."""
    found: object = 1
    for _ in range(levels):
        found = {"a": found}
    return found


def infinite(document: dict[str, Any]) -> dict[str, Any]:
    document["blocks"]["shape"] = [float("inf"), BLOCK]
    return document


def not_ours(document: dict[str, Any]) -> dict[str, Any]:
    """The same JSON otherwise: `export` leaves a space after each colon."""
    metadata = document["__metadata__"]
    metadata["fields"] = metadata["fields"].replace(": ", ":")
    return document


@pytest.mark.parametrize(
    "document",
    [
        infinite(header({"a": 1})),
        not_ours(header(nested(700))),
        header(nested(500), about=nested(700)),
        header(nested(800)),
        header({"a": ["x"] * 200_000}),
        header({"a": 1}, label="x" * 1_500_000),
        header({"a": 1}, slots=1 << 60),
        header({"a": 1}, slots=0),
    ],
)
def test_what_no_export_writes_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    assert_refused(put(tmp_path / "odd", document), tmp_path)


def test_letters_that_export_escapes_are_refused(tmp_path: Path) -> None:
    document = header({"a": 1}, label="é" * 700)
    assert_refused(put(tmp_path / "odd", document, ascii_only=False), tmp_path)


def assert_refused(file: Path, folder: Path) -> None:
    root = folder / "new"
    root.mkdir()
    answer = call("import", root, file, "--create")
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1
    assert not list(root.iterdir())


_PLAIN = ""
_IN_LITTLE_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
"""
_MAIN = """
import sys
from kvcascade.tools.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def apart(before: str, *words: object, stdin: int | None = None) -> Answer:
    """A command in a process of its own, in which some code runs before."""
    done = subprocess.run(
        [sys.executable, "-c", before + _MAIN, *map(str, words)],
        env=environment(), stdin=stdin, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)


def test_slots_that_are_only_claimed_take_no_memory(tmp_path: Path) -> None:
    """The one block is damaged, so no segment is made either."""
    file, root = put(tmp_path / "odd", header({"a": 1}, slots=2**31 - 1)), tmp_path / "new"
    fill_path(root, 0)
    answer = apart(_IN_LITTLE_MEMORY, "import", root, file, "--create", "--json")
    assert answer.code == ExitCode.PROBLEMS, answer.err
    assert answer.document["damaged"] == 1


# ---- places that are no files ----------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of 20 blocks."""
    fill_path(tmp_path / "kv")
    return tmp_path / "kv"


def test_only_a_file_is_replaced(cache: Path, tmp_path: Path) -> None:
    pipe, to_pipe = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    for place in (pipe, to_pipe, tmp_path):
        for command in (("export", cache, place, "--force"), ("import", cache, place)):
            answer = call(*command)
            assert answer.code == ExitCode.USAGE and answer.err.count("\n") == 1
            assert "give the name of a file" in answer.err
    assert stat.S_ISFIFO(pipe.stat().st_mode) and to_pipe.is_symlink()
    assert not list(tmp_path.glob("*.partial"))


def test_links_are_followed(cache: Path, tmp_path: Path) -> None:
    """As `cp` and `tar` follow them: the link stays, and the file lies where it leads."""
    (tmp_path / "disk").mkdir()
    file, link = tmp_path / "disk" / "warm.safetensors", tmp_path / "warm.safetensors"
    link.symlink_to("disk/warm.safetensors")
    assert call("export", cache, link).code == ExitCode.OK
    assert link.is_symlink() and file.is_file()
    assert "--force" in call("export", cache, link).err
    assert call("export", cache, link, "--force").code == ExitCode.OK
    assert link.is_symlink() and not file.is_symlink()
    assert call("import", cache, link, "--json").document["already_there"] == 20
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    answer = call("export", cache, loop, "--force")
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1


def test_standard_input_is_read_if_it_is_a_file(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "warm.safetensors"
    call("export", cache, file)
    with file.open() as opened:
        assert from_stdin(cache, opened.fileno()).document["already_there"] == 20
    reading, writing = os.pipe()
    os.close(writing)
    answer = from_stdin(cache, reading)
    os.close(reading)
    assert answer.code == ExitCode.USAGE and "is a pipe" in answer.document["message"]


def from_stdin(cache: Path, descriptor: int) -> Answer:
    return apart(_PLAIN, "import", cache, "/dev/stdin", "--json", stdin=descriptor)


_KILLED = """
import os, signal
from kvcascade.tiers.nvme.disk.filesystem import RealFile
left = [signal.{number}]  # a second one would meet the default handler
RealFile.sync = lambda file: left and os.kill(os.getpid(), left.pop())
"""
_HUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
_NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_polite_kill_leaves_nothing_half_done(cache: Path, tmp_path: Path, number: str) -> None:
    """SIGHUP comes when a terminal or an ssh session ends."""
    killed = _HUP + _KILLED.format(number=number)
    answer = apart(killed, "export", cache, tmp_path / "warm.safetensors")
    assert (answer.code, answer.err) == (ExitCode.INTERRUPTED, "kvcascade: interrupted\n")
    assert not list(tmp_path.glob("warm*"))


def test_nohup_keeps_a_command_alive(cache: Path, tmp_path: Path) -> None:
    before = _NOHUP + _KILLED.format(number="SIGHUP")
    answer = apart(before, "export", cache, tmp_path / "warm.safetensors")
    assert answer.code == ExitCode.OK and (tmp_path / "warm.safetensors").exists()
