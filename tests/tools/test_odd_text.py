"""Labels, paths and numbers that are anybody's, and terminals with few letters: shown as they are,
as "?" or as null, and never an error."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from support.cache_rig import ROOT, call
from support.children import environment
from support.keys import key
from support.path_cache import fill_path, namespaces_in

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands.command_line import ExitCode, emit

LABEL = "[/prod] $a_{$ :smile: [b]"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A cache with such a label, in such a place."""
    root = tmp_path / "w[/x]"
    root.parent.mkdir()
    fill_path(root, namespace=NamespaceKey(LABEL, {"model": LABEL}))
    return root


def flat(text: str) -> str:
    """Without the breaks of lines."""
    return "".join(text.split())


def test_nothing_in_a_label_or_path_is_markup(odd: Path) -> None:
    shown = call("inspect", odd)
    assert shown.code == ExitCode.OK and shown.out.count(LABEL) == 2 and "w[/x]" in flat(shown.out)
    for words in (("inspect", odd, "--block", key(0).hex()), ("top", odd, "--once")):
        answer = call(*words)
        assert answer.code == ExitCode.OK and "w[/x]" in flat(answer.out)
    other = "[/x] :x:"
    fill_path(odd.parent / "other", namespace=NamespaceKey("other", {"model": other}))
    (name,) = (each.name for each in namespaces_in(odd.parent / "other"))
    answer = call("inspect", odd, "--also", odd.parent / "other", "--why", "prod", name)
    assert LABEL in answer.out and other in answer.out


def test_a_configuration_may_name_such_a_path(odd: Path, tmp_path: Path) -> None:
    tiers = [{"type": "cpu", "capacity": "1MiB"},
             {"type": "nvme", "capacity": "64MiB", "path": str(odd), "min_free": 0}]  # fmt: skip
    config = tmp_path / "kv.json"
    config.write_text(json.dumps({"tiers": tiers}))
    answer = call("check", config)
    assert answer.code == ExitCode.OK and "fits this machine" in answer.out


def test_a_terminal_obeys_no_label(tmp_path: Path) -> None:
    fill_path(tmp_path, namespace=NamespaceKey("a\ud800\x1b[31mb", {"model": "\x1b]0;c\a"}))
    shown = call("inspect", tmp_path).out
    assert "a??[31mb" in shown and "?]0;c?" in shown and "\x1b" not in shown
    assert call("inspect", tmp_path, "--plot", tmp_path / "cache.png").code == ExitCode.OK


def test_a_label_is_no_formula(odd: Path, tmp_path: Path) -> None:
    png = tmp_path / "cache.png"
    assert call("inspect", odd, "--plot", png).code == ExitCode.OK
    assert png.read_bytes().startswith(b"\x89PNG")


def replay(folder: Path) -> list[str]:
    """Words that replay a trace with such a name and draw it."""
    trace = folder / "[b] $a_{$.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n' * 2)
    return ["replay", str(trace), "--kv-bytes-per-token", "2", "--tier", "$t_{$[/t]=1MiB"]


def test_a_trace_may_have_such_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "curve.png"
    words = replay(tmp_path)
    assert main(words) == ExitCode.OK and "[b] $a_{$: 2 requests" in capsys.readouterr().out
    assert main([*words, "--policies", "lru", "--plot", str(png)]) == ExitCode.OK
    assert "$t_{$[/t]" in capsys.readouterr().out and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_a_terminal_has_not(tmp_path: Path, encoding: str) -> None:
    """A lone surrogate has no encoding at all: a path of odd bytes has them."""
    label = "é – \ud800"
    fill_path(tmp_path, namespace=NamespaceKey(label, {"model": label}))
    for words in (["inspect", tmp_path], ["inspect", tmp_path, "--json"], ["inspect", "--help"]):
        command = [sys.executable, "-m", "kvcascade.tools", *words]
        child = environment() | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, env=child, capture_output=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (ExitCode.OK, b"")
        assert done.stdout.decode(encoding)
        if "--json" in words:
            assert json.loads(done.stdout)["namespaces"][0]["label"] == "é – ?"


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    emit("odd", {"a": [math.inf, -math.inf, {"b": math.nan}], "c": 0.1, "path": Path("x")})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["a"] == [None, None, {"b": None}]
    assert (found["c"], found["path"]) == (0.1, "x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect"], "PATH"),
        (["frobnicate"], "frobnicate"),
        (["inspect", ".", "--frobnicate"], "--frobnicate"),
        (["check", "kv.json", "--block-size", "0"], "--block-size"),
        (["shm", "frobnicate"], "frobnicate"),
        (["version", "extra"], "extra"),
        (["bench", "--frobnicate"], "--frobnicate"),
        (["replay", "trace", "--tier", "cpu=1MiB", "--limit", "0"], "--limit"),
        (["replay", "trace", "--tier", "cpu=1MiB", "--speed-up", "inf"], "--speed-up"),
    ],
)
def test_a_wrong_call_for_json_is_answered_with_json(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == ExitCode.USAGE
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["schema"], found["error"]) == ("kvcascade.error", "usage")
    assert said in found["message"] and captured.err == ""


def test_other_calls_for_json_end_as_they_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path), "--json"]) == ExitCode.CANNOT_OPEN
    assert json.loads(capsys.readouterr().out)["error"] == "cannot_open"
    assert main(["inspect", "--help", "--json"]) == ExitCode.OK
    assert "--json" in capsys.readouterr().out
