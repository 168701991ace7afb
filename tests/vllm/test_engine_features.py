"""Rarer features of vLLM on the real engine: answers with the cascade equal answers without it.

Each case stores, loads from memory and disk after a reset of the device's own cache, and loads from
disk after a restart. A case is skipped where a package is missing, or where a vLLM older than the
pinned one cannot run it without the cascade either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine_rig import (
    Answers,
    Engine,
    EngineFailed,
    engine_options,
    environment,
    has_device_each,
)
from support.server_rig import SERVE, VOCABULARY, cascade_options, launcher
from support.small_llava import IMAGE_TOKEN, make_llava
from support.small_models import make_eagle
from support.waiting import wait_until

from kvcascade.tools.commands.path_blocks import open_path
from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.dev.server import ServerProcess, is_on_cpu, served_model
from kvcascade.vllm.generation import vllm_version

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]

PINNED = (0, 32)
"""From this vLLM on every feature must be there."""
BLOCK_TOKENS = 32
LAYER_BYTES = BLOCK_TOKENS * 2 * 128 * 4
"""Of one block: tokens, K and V, KV heads times head size, float32."""
DEVICE_BLOCKS, ROOMY_BLOCKS, MODEL_TOKENS = 30, 400, 640
CPU_BLOCKS, NVME_BLOCKS = 26, 320
"""Neither the device nor the memory tier holds the blocks of all prompts."""
PROMPTS, PROMPT_TOKENS, SHARED_TOKENS = 4, 360, 96
LEAST_LOADED = PROMPTS * ((PROMPT_TOKENS - SHARED_TOKENS) // BLOCK_TOKENS - 1)
"""Blocks of single prompts that an empty device must load; speculation may compute the last one."""
FEW_WORDS = 24
"""A vocabulary so small that guesses of the next token are often right."""
LOGPROB_TOLERANCE = 1e-3
"""Sums of float32 in another order move a logprob by less than 1e-5 here; a single wrong block
moves some by more than 1."""
REGEX, SO_FAR = "([12][0-9]){200}", "([12][0-9])*[12]?"
LOADED = "vllm:kvcascade_loaded_blocks"
HTTP_TOKENS, CLIENTS = 12, 4
BLOCKS = SHARED_TOKENS // BLOCK_TOKENS
BLOCKS += PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS - BLOCKS)
"""Of all prompts, the common ones once."""
WRITTEN_LIMIT_S, LOOK_S = 180.0, 0.5


def make_words(folder: Path) -> Path:
    """A Llama with a tokenizer, as beam search and structured output need it."""
    return served_model(folder, VOCABULARY)


def make_few_words(folder: Path, seed: int = 0, layers: int = 4) -> Path:
    """A Llama whose speculation is often right."""
    return make_llama(folder, seed, layers=layers, vocab=FEW_WORDS)


def make_other_few_words(folder: Path) -> Path:
    """A draft model that is often wrong."""
    return make_few_words(folder, seed=3, layers=2)


def make_eagle_of_few_words(folder: Path) -> Path:
    """An EAGLE head for `make_few_words`."""
    return make_eagle(folder, FEW_WORDS)


@dataclass(frozen=True)
class Case:
    """One feature."""

    make_model: Callable[[Path], Path] = make_words
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    make_draft: Callable[[Path], Path] | None = None
    """Model that speculates."""
    layers: int = 4
    """Layers of a block, those of the draft model included."""
    samplings: tuple[dict[str, Any], ...] = ({},)
    """The prompts take turns with them."""
    loading: float = 1.0
    """Share of the prompts that load blocks."""
    answer_tokens: int = 24
    request: str = "tokens"
    """Kind of the prompts; see `rare_requests.py`."""
    has_images: bool = False
    together: int = 2
    """Prompts that are sent at once."""
    how: dict[str, Any] = field(default_factory=dict)
    """More arguments of `Runner.ask`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More of the cascade's configuration."""
    grows: str = ""
    """Counter of vLLM that shows the feature at work."""
    is_always_right: bool = False
    """Every guess must be accepted, because the draft model is the model."""
    package: str = ""
    """Optional package that the feature needs."""
    program: str = ""
    """Program that the feature needs."""


def speculating(method: str, **options: Any) -> dict[str, Any]:
    """Return arguments of an engine that speculates."""
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **options}}


NGRAM: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
KEPT: dict[str, Any] = {"answer_tokens": 60, "extra": {"on_reset": "keep"}}
GUESSES, ACCEPTED = (f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted"))
GUESSED: dict[str, Any] = {"make_model": make_few_words, "grows": ACCEPTED, "answer_tokens": 40}

EVERYTHING = {"reset_running_requests": True, "reset_connector": True}
"""With the connector: without it, vLLM up to 0.32 may end (docs/compatibility.md)."""

CASES: dict[str, Case] = {
    "ngram": Case(options={**speculating("ngram", **NGRAM), "async_scheduling": False}, **GUESSED),
    "draft_model": Case(
        options=speculating("draft_model"),
        make_draft=make_few_words,
        layers=8,
        is_always_right=True,
        **GUESSED,
    ),
    "bad_draft_model": Case(
        options=speculating("draft_model"), make_draft=make_other_few_words, layers=6, **GUESSED
    ),
    "eagle": Case(
        options=speculating("eagle"), make_draft=make_eagle_of_few_words, layers=5, **GUESSED
    ),
    "samples": Case(samplings=({"n": 3, "temperature": 0.8, "seed": 5},)),
    "logprobs": Case(samplings=({"logprobs": 3},), program="g++"),
    # vLLM computes a prompt whose logprobs are asked for, and takes no block from any cache.
    "prompt_logprobs": Case(
        samplings=({"logprobs": 1}, {"prompt_logprobs": 2}), loading=0.5, program="g++"
    ),
    "beams": Case(how={"beams": {"beam_width": 3, "max_tokens": 8}}),
    "structured": Case(samplings=({"regex": REGEX},), package="xgrammar"),
    "embeds": Case(options={"enable_prompt_embeds": True}, request="embeds"),
    "images": Case(
        make_llava, {"limit_mm_per_prompt": {"image": 2}}, has_images=True, package="torchvision"
    ),
    "priority": Case(
        options={"scheduling_policy": "priority"},
        together=PROMPTS,
        how={"priority": list(range(PROMPTS))[::-1]},
        answer_tokens=150,
        grows="vllm:num_preemptions",
    ),
    "reset": Case(how={"call": ["reset_prefix_cache", EVERYTHING]}, **KEPT),
    "sleep": Case(
        options={"enable_sleep_mode": not is_on_cpu()},
        how={"call": ["sleep", {"level": 1, "mode": "keep"}]},
        **KEPT,
    ),
    "pause": Case(how={"call": ["sleep", {"level": 0, "mode": "keep"}]}, **KEPT),
}


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts with one beginning."""
    rng = random.Random(11)
    shared, *ends = (
        [rng.randrange(3, vocabulary) for _ in range(length)]
        for length in (SHARED_TOKENS, *[PROMPT_TOKENS - SHARED_TOKENS] * PROMPTS)
    )
    return [shared + end for end in ends]


def requests(case: Case) -> list[dict[str, Any]]:
    """The requests of a case. With images, two of them have one text, and differ in an image."""
    vocabulary = FEW_WORDS if case.make_model is make_few_words else IMAGE_TOKEN
    texts = prompts(vocabulary)
    if not case.has_images:
        return [{case.request: text} for text in texts]
    found = []
    for number in range(PROMPTS):
        text = texts[number // 2]
        pieces = text[:BLOCK_TOKENS], text[BLOCK_TOKENS:SHARED_TOKENS], text[SHARED_TOKENS:]
        tokens = [*pieces[0], IMAGE_TOKEN, *pieces[1], IMAGE_TOKEN, *pieces[2]]
        found.append({"tokens": tokens, "images": [0, number]})
    return found


def ask(engine: Engine, case: Case) -> Answers:
    """Send all requests of a case. Calls that interrupt them must succeed now and then."""
    everything, kinds = requests(case), islice(cycle(case.samplings), PROMPTS)
    samplings = [{"max_tokens": case.answer_tokens, **each} for each in kinds]
    answers: Answers = []
    for start in range(0, PROMPTS, case.together):
        some = slice(start, start + case.together)
        answers += engine.ask(everything[some], samplings=samplings[some], **case.how)
    if "call" in case.how:
        assert sum(answer.get("calls", 0) for answer in answers) > 0
    return [answer for answer in answers if "calls" not in answer]


def numbers(answer: Mapping[str, Any]) -> list[float]:
    """All logprobs, or the scores of all beams."""
    return [number for numbers in answer["numbers"] for number in numbers]


def check(got: Answers, expected: Answers, case: Case) -> None:
    """Tokens are equal; logprobs are, but for the order of sums."""
    assert [answer["samples"] for answer in got] == [answer["samples"] for answer in expected]
    assert [answer.get("ids") for answer in got] == [answer.get("ids") for answer in expected]
    for one, other in zip(got, expected, strict=True):
        assert np.allclose(numbers(one), numbers(other), rtol=0, atol=LOGPROB_TOLERANCE)
    if "regex" in case.samplings[0]:
        texts = ["".join(map(str, sample)) for answer in got for sample in answer["samples"]]
        assert all(re.fullmatch(SO_FAR, text) for text in texts)


def loaded(metrics: Mapping[str, float]) -> float:
    """Blocks that came from any tier."""
    return sum(count for name, count in metrics.items() if name.startswith(LOADED))


class Features:
    """Engines of one case."""

    def __init__(self, case: Case, folder: Path, shared: Path) -> None:
        self.case = case
        self._folder = folder
        self.model = case.make_model(folder / "model")
        self._options = dict(case.options)
        if case.make_draft is not None:
            draft = str(case.make_draft(folder / "draft"))
            speculation = self._options["speculative_config"]
            self._options["speculative_config"] = {**speculation, "model": draft}
        if case.make_model is not make_few_words:
            self._options["skip_tokenizer_init"] = False
        self.extra = {
            "load_or_recompute": False,  # what is read depends on no speed
            "offload_prompt_only": False,
            **case.extra,
            "tiers": tiers(folder / "disk", shared, case.layers * LAYER_BYTES),
        }

    def start(self, log: str, device_blocks: int, has_cascade: bool = True) -> Engine:
        """An engine."""
        extra = self.extra if has_cascade else None
        given = engine_options(self.model, device_blocks, extra)
        return Engine(self._folder / log, {**given, "max_model_len": MODEL_TOKENS, **self._options})

    def expected(self) -> Answers:
        """The answers of an engine without the cascade. Skips what this vLLM cannot do."""
        try:
            with self.start("reference.log", ROOMY_BLOCKS, has_cascade=False) as engine:
                return ask(engine, self.case)
        except EngineFailed as error:
            if vllm_version() >= PINNED:
                raise
            pytest.skip(f"this vLLM cannot, without the cascade either: {str(error)[:200]}")


def tiers(disk: Path, shared: Path, block_bytes: int) -> list[dict[str, Any]]:
    """Memory for a part of the blocks, and a disk for all."""
    return [
        {"type": "cpu", "capacity": CPU_BLOCKS * block_bytes + 4096, "arena_dir": str(shared)},
        {
            "type": "nvme",
            "capacity": NVME_BLOCKS * (block_bytes + 4096),
            "path": str(disk),
            "min_free": 0,
        },
    ]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses; nothing may be left in it."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize("name", CASES)
def test_answers_stay_the_same(name: str, shared: Path, tmp_path: Path) -> None:
    """Blocks of each feature are loaded in the same process, and in another one."""
    case = CASES[name]
    if case.package and find_spec(case.package) is None:
        pytest.skip(f"needs the package {case.package}")
    if case.program and which(case.program) is None:
        pytest.skip(f"needs {case.program}, with which vLLM compiles")
    features = Features(case, tmp_path, shared)
    expected = features.expected()
    least = case.loading * LEAST_LOADED
    distinct = {str(answer["samples"]) for answer in expected}
    assert len(distinct) >= PROMPTS, "each prompt has an answer of its own"
    with features.start("engine.log", DEVICE_BLOCKS) as engine:
        check(ask(engine, case), expected, case)
        before = engine.metrics()
        engine.reset(connector=False)
        check(ask(engine, case), expected, case)
        after = engine.metrics()
        assert loaded(after) - loaded(before) >= least
        assert not case.grows or after[case.grows] > before[case.grows]
        assert not case.is_always_right or after[ACCEPTED] == after[GUESSES]
        engine.stop()
    with features.start("engine.log", DEVICE_BLOCKS) as engine:
        check(ask(engine, case), expected, case)
        after = engine.metrics()
        assert after[f"{LOADED}[nvme]"] >= least
        assert not case.is_always_right or after[ACCEPTED] == after[GUESSES]
        engine.stop()


SERVERS: dict[str, dict[str, Any]] = {
    "api_servers": {"api_server_count": 2},
    "data_parallel": {"data_parallel_size": 2, "api_server_count": 2},
}


def prompt_tokens(server: ServerProcess) -> dict[str, float]:
    """Tokens that each engine was asked to continue."""
    text = server.fetch("/metrics").decode()
    samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
    return {
        sample.labels["engine"]: sample.value
        for sample in samples
        if sample.name == "vllm:prompt_tokens_total"
    }


def has_written(server: ServerProcess, disk: Path) -> bool:
    """Let each engine take a step, and return True once the disk has the blocks of all prompts."""
    server.metrics()
    with open_path(disk) as path:
        return sum(len(list(path.blocks(name))) for name in path.names) >= BLOCKS


@pytest.mark.parametrize("name", SERVERS)
def test_several_servers(
    name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes answer, or compute; after a restart all load from the same disk."""
    engines = SERVERS[name].get("data_parallel_size", 1)
    if not has_device_each(engines):
        pytest.skip(f"needs {engines} NVIDIA GPUs")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # engines shall share the cores
    features = Features(Case(answer_tokens=HTTP_TOKENS), tmp_path, shared)
    expected = [tuple(answer["samples"][0]) for answer in features.expected()]
    device = {"num_gpu_blocks_override": DEVICE_BLOCKS, "max_model_len": MODEL_TOKENS}
    options = cascade_options(features.model, features.extra, **device, **SERVERS[name])
    texts = prompts(IMAGE_TOKEN)
    for is_again in (False, True):
        log = tmp_path / f"server{int(is_again)}.log"
        with ServerProcess(log, options, environment(), SERVE, launcher()) as server:
            server.ready()
            for _ in range(1 if is_again else 2):
                answers = server.complete_all(texts, HTTP_TOKENS, CLIENTS)
                assert [answer.tokens for answer in answers] == expected
            served = prompt_tokens(server)
            assert len(served) == engines and all(served.values()), served
            if is_again:
                assert loaded(server.metrics()) >= LEAST_LOADED
            wait_until(partial(has_written, server, tmp_path / "disk"), WRITTEN_LIMIT_S, LOOK_S)
            server.stop()
        text = log.read_text(errors="replace")
        assert all(f"ApiServer_{number} " in text for number in range(2))
