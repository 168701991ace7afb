"""The command line: what it answers, and how it refuses."""

from __future__ import annotations

import pytest

from kvcascade import __version__
from kvcascade.tools.__main__ import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"kvcascade {__version__}, Python 3.")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(name in printed and summary in printed for name, summary in COMMANDS.items())


@pytest.mark.parametrize("wrong", [[], ["frobnicate"], ["version", "extra"]])
def test_wrong_calls(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert "usage: kvcascade" in capsys.readouterr().err
