"""Every command and every JSON object in README and docs is run, or at least read, as it stands.

Blocks between ``` fences are looked at line by line. What needs an engine of many gigabytes
(`vllm serve`) is not started: its configuration is checked as the engine's first process would.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
import typer
from support.bench_file import write_bench
from support.cache_rig import call
from support.keys import key
from support.metrics_server import PATH, metrics_server
from support.path_cache import fill_path

from kvcascade.config.schema import parse
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.policies import known_names
from kvcascade.tools.command_app import app
from kvcascade.tools.commands.command_line import ExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
CACHE = "/mnt/nvme/kv"
RECORDING = "/var/log/kv"
BLOCK_HASH = "5f3c"
METRICS = "http://127.0.0.1:8000/metrics"
DISK = "/mnt/nvme"
SHARE = "/mnt/share/kv"
PYTHON_PAGES = ("api.md", "policies.md", "remote.md")
"""Pages whose examples in Python run by themselves."""
NOT_RUN = {"bench", "demo", "store"}
"""Commands with tests of their own that take minutes, or end at a signal: their arguments are
read."""


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def json_objects(page: Path) -> list[str]:
    """Blocks that hold JSON."""
    return [text for language, text in fenced(page) if language == "json"]


def commands(page: Path) -> list[str]:
    """Lines of the blocks that hold commands, continued ones joined, comments cut off."""
    found: list[str] = []
    for language, text in fenced(page):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in _joined(text):
            words = re.split(r"  +#| > ", line)[0].strip().removeprefix("$ ")
            if re.match(r"(kvcascade|make|vllm|PYTHONHASHSEED)\b", words):
                found.append(words)
    return found


def _joined(text: str) -> list[str]:
    """Lines, those whose quotes are open put together."""
    lines: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if lines and lines[-1].count("'") % 2:
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return lines


def names_in_text(page: Path) -> set[str]:
    """Commands that running text speaks of."""
    return set(re.findall(r"`kvcascade ([a-z]+)(?![a-z:])", page.read_text()))


def check_json(document: dict[str, object]) -> None:
    """A configuration as the engine reads it."""
    extra = document.get("kv_connector_extra_config", document)
    assert isinstance(extra, dict)
    if "secondary_tiers" in extra:
        (ours,) = extra["secondary_tiers"]
        options = {k: v for k, v in ours.items() if k not in ("type", "module_path")}
        extra = {"tiers": [{"type": "cpu", "capacity": 1}, {"type": "nvme", **options}]}
    parse(extra, known_names())


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A folder with what the commands of the docs speak of."""
    folder = tmp_path
    for label in ("old", "new"):
        fill_path(folder / "kv", namespace=NamespaceKey(label, {"label": label}))
    tiers = [
        {"type": "cpu", "capacity": "64MiB"},
        {"type": "nvme", "capacity": "64MiB", "path": str(folder / "tier"), "min_free": 0},
    ]
    (folder / "kv.json").write_text(json.dumps({"tiers": tiers}))
    requests = [
        {
            "timestamp": 1000 * i,
            "input_length": 1024,
            "output_length": 8,
            "hash_ids": [1, 2 + i % 3],
        }
        for i in range(20)
    ]
    lines = "\n".join(json.dumps(request) for request in requests)
    (folder / "trace.jsonl").write_text(lines + "\n")
    for name in ("out", "share"):
        (folder / name).mkdir()
    write_bench(folder / "out" / "bench.json")
    return folder


@pytest.fixture(scope="module")
def metrics_url() -> Iterator[str]:
    """Where an engine would serve its metrics."""
    with metrics_server(['vllm:kvcascade_loaded_blocks_total{tier="nvme"} 3.0\n']) as address:
        yield f"http://{address}{PATH}"


@pytest.mark.parametrize(
    ("find", "at_least"), [(commands, 40), (json_objects, 4), (names_in_text, 15)]
)
def test_what_the_pages_hold_is_found(
    find: Callable[[Path], Collection[str]], at_least: int
) -> None:
    """Or the tests below would look at nothing."""
    assert sum(len(find(page)) for page in PAGES) >= at_least


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_json_object_is_a_right_configuration(page: Path) -> None:
    for text in json_objects(page):
        check_json(json.loads(text))


@pytest.mark.parametrize("name", PYTHON_PAGES)
def test_python_examples_run(name: str) -> None:
    blocks = [text for language, text in fenced(ROOT / "docs" / name) if language == "python"]
    assert blocks
    for text in blocks:
        exec(compile(text, name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_works(
    page: Path, sandbox: Path, metrics_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sandbox)
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        elif "vllm" in words:
            _check_serve(words)
        elif words[1] in NOT_RUN:
            _parse(words)
        else:
            answer = call(*(_here(word, sandbox, metrics_url) for word in words[1:]))
            assert answer.code in (ExitCode.OK, ExitCode.PROBLEMS), f"{command}\n{answer}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_running_text_exists(page: Path) -> None:
    for name in names_in_text(page):
        answer = call(name, "--help")
        assert answer.code == ExitCode.OK, f"kvcascade {name}\n{answer}"


def _parse(words: Sequence[str]) -> None:
    """A wrong call raises."""
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], list(words[2:]))


def _here(word: str, sandbox: Path, metrics_url: str) -> str:
    """A word of a command, with the places of the docs replaced by those of the sandbox."""
    word = word.replace(CACHE, str(sandbox / "kv")).replace(METRICS, metrics_url)
    word = word.replace(SHARE, str(sandbox / "share"))
    word = key(0).hex() if word == BLOCK_HASH else word
    word = str(sandbox) if word == DISK else word
    return word.replace(RECORDING, str(sandbox / "trace.jsonl"))


def _check_serve(words: list[str]) -> None:
    if "--kv-transfer-config" in words:
        config = words[words.index("--kv-transfer-config") + 1]
        if config != "$(cat kv.json)":
            check_json(json.loads(config))
