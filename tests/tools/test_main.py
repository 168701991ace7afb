"""The command line: what it answers, and how it refuses."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.cache_rig import ROOT, call, call_bound, call_outside
from support.path_cache import fill_path
from support.users import NOBODY, unprivileged

from kvcascade import __version__
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands.command_line import ExitCode, answering_apart, emit

OURS = (
    *("config", "doctor", "inspect", "top", "verify", "gc", "export", "import", "check"),
    *("replay", "bench", "demo", "version"),
)
OF_GROUPS = ("shm ls", "shm drop", "remote ls", "remote verify", "remote gc")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"kvcascade {__version__}, Python 3.")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == said


def test_no_command_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: kvcascade" in capsys.readouterr().out


def test_help_lists_every_command() -> None:
    answer = call("--help")
    assert answer.code == 0
    assert all(name in answer.out for name in OURS)


@pytest.mark.parametrize("name", [*OURS, *OF_GROUPS])
def test_help_of_every_command_has_examples(name: str) -> None:
    answer = call(*name.split(), "--help")
    assert answer.code == 0
    assert f"kvcascade {name} " in answer.out and "--json" in answer.out


@pytest.mark.parametrize("name", ["", "shm", "remote", "store", *OURS, *OF_GROUPS])
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No summary is cut, and each example is one line, which can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(*name.split(), "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.endswith("...")]
    text = "\n".join(lines).partition("Examples:")[2]
    examples = re.split(r"\n(?:Arguments|Options):", text)[0].split("\n")
    assert all("kvcascade " in line for line in examples if line.strip())


@pytest.mark.parametrize(
    "wrong",
    [
        ["frobnicate"],
        ["bench", "--no-such-option"],
        ["version", "extra"],
        ["inspect"],
        ["inspect", ".", "--frobnicate"],
    ],
)
def test_wrong_calls(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "usage: kvcascade" in (captured.err + captured.out).lower()


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    answer = call("inspect", tmp_path)
    assert answer.code == ExitCode.CANNOT_OPEN
    assert answer.err.count("\n") == 1 and "no namespace in" in answer.err
    answer = call("inspect", tmp_path / "nowhere", "--json")
    assert answer.code == ExitCode.CANNOT_OPEN
    assert answer.document["schema"] == "kvcascade.error"
    assert answer.document["error"] == "cannot_open"


@pytest.mark.parametrize("place", ["locked", "locked/kv"])
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "PLACE"],
        ["verify", "PLACE"],
        ["top", "PLACE", "--once"],
        ["gc", "PLACE", "--hash", "00"],
        ["export", "PLACE", "out"],
        ["bench", "PLACE"],
    ],
)
def test_a_locked_folder_cannot_be_opened(tmp_path: Path, words: list[str], place: str) -> None:
    fill_path(tmp_path / "locked")
    (tmp_path / "locked").chmod(0)
    answer = call_bound(*(tmp_path / place if word == "PLACE" else word for word in words))
    assert (answer.code, answer.err.count("\n")) == (ExitCode.CANNOT_OPEN, 1), answer.err
    is_told = "run as the user of the engines" in answer.err
    assert is_told or (words[0] == "bench" and "cannot be written by this user" in answer.err)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("words", [["verify"], ["gc", "--hash", "00"], ["store"]])
def test_a_cache_of_another_user_cannot_be_opened(tmp_path: Path, words: list[str]) -> None:
    fill_path(tmp_path)
    os.chown(tmp_path / PATH_FOLDER, NOBODY, NOBODY)
    answer = call(words[0], tmp_path, *words[1:])
    assert (answer.code, answer.err.count("\n")) == (ExitCode.CANNOT_OPEN, 1), answer.err
    assert "run as the user of the engines" in answer.err


def test_a_locked_file_cannot_be_opened() -> None:
    with TemporaryDirectory() as text:
        Path(text).chmod(0o755)
        file = Path(text) / "transfer.json"
        file.touch(mode=0)
        for words in (["check"], ["doctor"], ["remote", "ls"]):
            call(*words, file)  # what is imported late may be where only root can read
            with unprivileged():
                answer = call(*words, file)
            assert (answer.code, answer.err.count("\n")) == (ExitCode.CANNOT_OPEN, 1), words
            assert "run as the user of the engines" in answer.err


HEAVY = ("torch", "vllm", "numpy", "lmdb", "rich", "matplotlib", "prometheus_client")
LIGHT: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("--help",), {}),
    (("bench", "--help"), {}),
    (("replay", "--help"), {}),
    (("remote", "--help"), {}),
    (("remote", "verify", "--help"), {}),
    ((), {"_KVCASCADE_COMPLETE": "source_bash"}),
    ((), {"_KVCASCADE_COMPLETE": "complete_bash", "COMP_WORDS": "kvcascade i", "COMP_CWORD": "1"}),
    ((), {"_KVCASCADE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "kvcascade i"}),
    (
        (),
        {
            "_KVCASCADE_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_ARGS": "kvcascade i",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    ),
)


def loaded_by(words: Sequence[str], heavy: Collection[str], **environment: str) -> str:
    """Return the names of these modules that a command loads, as a list in brackets."""
    code = (
        f"import atexit, sys; sys.argv = ['kvcascade', *{words!r}]\n"
        f"loaded = lambda: print(sorted({set(heavy)!r} & sys.modules.keys()), file=sys.stderr)\n"
        "atexit.register(loaded)\n"
        "from kvcascade.tools.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code]
    more = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=more)
    assert done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("words", "environment"), LIGHT)
def test_help_and_completion_load_nothing_heavy(
    words: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert loaded_by(words, HEAVY, **environment) == "[]"


def test_a_configuration_is_made_and_checked_without_vllm(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    extra = {"spec_name": "CascadeOffloadingSpec", "path": str(tmp_path / "kv")}
    config.write_text(json.dumps({"kv_connector_extra_config": extra}))
    for words in (["config", "--path", "/mnt/kv"], ["check", str(config), "--json"]):
        assert loaded_by(words, {"torch", "vllm"}) == "[]", words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_the_shell(shell: str) -> None:
    assert "_KVCASCADE_COMPLETE" in completed(shell, f"source_{shell}")


def test_what_is_completed() -> None:
    words = {"COMP_WORDS": "kvcascade in", "COMP_CWORD": "1"}
    assert completed("bash", "complete_bash", **words).split() == ["inspect"]
    words = {"COMP_WORDS": "kvcascade import --ma", "COMP_CWORD": "2"}
    assert completed("bash", "complete_bash", **words).split() == ["--make-room"]
    words = {"COMP_WORDS": "kvcascade bench --only f", "COMP_CWORD": "3"}
    assert completed("bash", "complete_bash", **words).split() == ["faults", "first_token"]


def completed(shell: str, what: str, **more: str) -> str:
    """What the shell is told."""
    code = "from kvcascade.tools.__main__ import main; main()"
    environment = {**os.environ, "_KVCASCADE_COMPLETE": what, **more}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    return done.stdout


def test_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "kvcascade.version" and document["kvcascade"] == __version__


COMMANDS = (
    ("verify", "CACHE"),
    ("verify", "CACHE", "--json"),
    ("inspect", "CACHE"),
    ("shm", "ls", "--arena-dir", "CACHE"),
    ("version",),
    ("--help",),
)


def _into(stdout: int, folder: Path, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A command whose standard output is this descriptor."""
    command = [sys.executable, "-m", "kvcascade.tools"]
    command += [str(folder) if word == "CACHE" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_problem_of_the_cache(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    fill_path(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _into(writing, tmp_path, words)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.CLOSED_PIPE, "")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    fill_path(tmp_path)
    with Path("/dev/full").open("w") as full:
        done = _into(full.fileno(), tmp_path, words)
    assert done.returncode == ExitCode.NO_SPACE, done.stderr
    assert done.stderr.count("\n") == 1 and "standard output cannot be written" in done.stderr


def test_json_stands_alone_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever a command's libraries and child processes print goes to standard error."""
    with answering_apart(True):
        print("a library speaks")
        subprocess.run(["echo", "a child speaks"], check=True)
    emit("bench", {"figures": 1})
    said = capfd.readouterr()
    assert json.loads(said.out) == {"schema": "kvcascade.bench", "schema_version": 1, "figures": 1}
    assert "a library speaks" in said.err and "a child speaks" in said.err


WHILE_LOADING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
from kvcascade.tools.__main__ import main
sys.exit(main(["inspect", "/nowhere"]))
"""
"""Runs a command, with an interrupt when the given module is imported."""
WHILE_PARSING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
from kvcascade.tools import __main__, command_app
command_app.app = lambda **_: signal.raise_signal(signal.SIGINT)
sys.exit(__main__.main(["version"]))
"""


@pytest.mark.parametrize(
    ("code", "module"),
    [(WHILE_LOADING, "typer"), (WHILE_LOADING, "kvcascade.tools.command_app"), (WHILE_PARSING, "")],
)
def test_an_interrupt_before_a_command_begins_ends_it_quietly(code: str, module: str) -> None:
    command = [sys.executable, "-c", code, module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")


def test_a_command_needs_no_standard_output(tmp_path: Path) -> None:
    config = tmp_path / "kv.json"
    config.write_text(json.dumps({"tiers": [{"type": "cpu", "capacity": "64MiB"}]}))
    answer = call_outside("check", config, before=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (answer.code, answer.out, answer.err) == (ExitCode.OK, "", "")


def test_completion_for_a_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the test names it
    assert main(["--install-completion", "bash"]) == ExitCode.CANNOT_OPEN
    said = capsys.readouterr().err
    assert "cannot be written" in said and "--show-completion" in said and said.count("\n") == 1


def test_completion_for_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the test names it
    assert main(["--install-completion", "bash"]) == ExitCode.CANNOT_OPEN
    said = capsys.readouterr().err
    assert "home" in said and "set HOME" in said and said.count("\n") == 1


@pytest.mark.parametrize("words", ["config", "check -", "doctor -", "remote ls -"])
def test_a_closed_standard_input_is_one_sentence(words: str) -> None:
    answer = call_outside(*words.split(), before=("sh", "-c", 'exec "$@" <&-', "sh"))
    assert answer.code == ExitCode.USAGE and answer.err.count("\n") == 1, answer.err
    assert "give" in answer.err


OTHER_USER = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
"""Command before another one, which then runs as another user."""
OPEN_TO_ALL = all(each.stat().st_mode & 0o001 for each in (ROOT, *ROOT.parents))
"""False if another user cannot run what is in this checkout, such as below /root."""


@pytest.mark.skipif(
    os.geteuid() != 0 or not OPEN_TO_ALL,
    reason="only root runs commands as another user, who must be able to read the checkout",
)
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_the_path_of_another_user_cannot_be_opened(mode: int) -> None:
    with TemporaryDirectory() as made:
        top, file = Path(made), Path(made) / "warm.safetensors"
        top.chmod(0o755)
        name = fill_path(top / "kv", 4).name
        call("export", top / "kv", file)
        file.chmod(0o644)
        (top / "kv").chmod(mode)
        remove = ("gc", top / "kv", "-n", name, "--remove-namespace")
        for words in (("import", top / "kv", file), ("store", top / "kv"), remove):
            answer = call_outside(*words, before=OTHER_USER)
            assert answer.code == ExitCode.CANNOT_OPEN, (words, answer)
            assert "run as the user of the engines" in answer.err


def test_a_namespace_whose_folder_may_not_be_changed_is_not_in_use(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, 4)
    tmp_path.chmod(0o555)
    try:
        answer = call_bound("gc", tmp_path, "-n", folder.name, "--remove-namespace", "--json")
    finally:
        tmp_path.chmod(0o755)
    assert answer.code == ExitCode.CANNOT_OPEN and "could not be deleted" in answer.one["skipped"]
