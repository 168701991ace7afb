"""`kvcascade config`: its output is a configuration that the parser and `check` accept."""

from __future__ import annotations

import io
import json
import shlex
import sys
from typing import Any

import pytest
from support.cache_rig import call

from kvcascade.config.schema import parse
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands import config
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.config import has_shutdown_timeout


def extra_of(transfer: dict[str, Any]) -> dict[str, Any]:
    assert transfer["kv_connector"] == "OffloadingConnector"
    return dict(transfer["kv_connector_extra_config"])


@pytest.mark.parametrize(
    "options",
    [
        ["--path", "/mnt/nvme/kv"],
        ["--path", "/mnt/a", "--path", "/mnt/b", "--disk", "2TiB"],
        ["--path", "/mnt/nvme/kv", "--cpu", "25%", "--set", "write_mode=through"],
        ["--path", "/mnt/it's", "--set", "dirty_age_s=2.5", "--set", "label=a b"],
    ],
)
def test_all_forms_are_the_same_configuration(options: list[str]) -> None:
    document = json.loads(call("config", *options, "--json").out)
    extra = extra_of(document["kv_transfer_config"])
    parse(extra)
    words = shlex.split(call("config", *options).out.replace("\\\n", ""))
    assert words[0] == "--kv-transfer-config" and extra_of(json.loads(words[1])) == extra
    line = call("config", *options, "--yaml").out.splitlines()[0]
    quoted = line.removeprefix("kv-transfer-config: ")
    assert quoted[0] == quoted[-1] == "'"
    assert extra_of(json.loads(quoted[1:-1].replace("''", "'"))) == extra


def test_values_are_json_and_text_where_the_key_takes_text() -> None:
    words = ["label=2024", "weights_id=null", "dirty_age_s=2024", 'record="/var/log/kv"']
    options = [word for pair in words for word in ("--set", pair)]
    document = json.loads(call("config", "--path", "/mnt/nvme/kv", *options, "--json").out)
    extra = extra_of(document["kv_transfer_config"])
    assert (extra["label"], extra["weights_id"]) == ("2024", "null")
    assert (extra["dirty_age_s"], extra["record"]) == (2024, "/var/log/kv")


@pytest.mark.parametrize(("flush_s", "timeout_s"), [(None, 22), (60, 62), (0, None)])
def test_the_timeout_is_given_to_a_vllm_that_has_it(
    flush_s: int | None, timeout_s: int | None
) -> None:
    more = [] if flush_s is None else ["--set", f"shutdown_flush_s={flush_s}"]
    document = json.loads(call("config", "--path", "/mnt/nvme/kv", *more, "--json").out)
    assert document["shutdown_timeout"] == (timeout_s if has_shutdown_timeout() else None)


@pytest.mark.parametrize(
    ("vllm", "has_it"),
    [("0.17.1", False), ("0.18.0", True), ("0.31.0+cpu", True), ("1.0", True), (None, True)],
)
def test_vllm_has_the_timeout_from_0_18_on(
    vllm: str | None, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "installed_version", lambda *_: vllm)
    assert has_shutdown_timeout() is has_it
    assert ("shutdown-timeout: 22" in call("config", "--path", "/mnt", "--yaml").out) is has_it


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--path"),
        (["--path", "relative"], "absolute"),
        (["--path", "/mnt", "--cpu", "64G"], "GiB or GB"),
        (["--path", "/mnt", "--set", "nonsense"], "KEY=VALUE"),
        (["--path", "/mnt", "--set", "write_mod=back"], "write_mode"),
        (["--path", "/mnt", "--set", "persist=true"], "persist is a key of the cpu tier"),
        (["--path", "/mnt", "--set", "path=/srv"], "path is set by another option"),
        (["--path", "/mnt", "--cpu", "1GiB", "--set", "tiers=[]"], "tiers is set by another"),
    ],
)
def test_wrong_calls(options: list[str], said: str) -> None:
    answer = call("config", *options)
    assert answer.code == 2 and said in answer.err and answer.out == ""


def test_one_form_at_a_time() -> None:
    answer = call("config", "--path", "/mnt", "--yaml", "--json")
    assert answer.code == 2 and "not both" in json.loads(answer.out)["message"]


class Terminal(io.StringIO):
    """A terminal whose user ends the input at once, as by Ctrl-D."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_question_that_is_not_answered_interrupts(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["config", *options]) == ExitCode.INTERRUPTED
    said = capsys.readouterr()
    if options:
        assert json.loads(said.out)["error"] == "interrupted"
    else:
        assert not said.out.strip() and said.err.endswith("\nkvcascade: interrupted\n")
