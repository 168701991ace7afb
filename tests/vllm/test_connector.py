"""vLLM's scheduler and connector over the cascade: random requests, every byte compared.

Chunked prefill, preemption, aborts, resets, damaged files and overlapped steps (async scheduling),
at the speed of a scheduler without a model.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.kv_bytes import Shape, damage, tiers
from support.scheduler_rig import BLOCK_TOKENS, Kind, SchedulerRig, survives_aborts
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvcascade.errors import ConfigError
from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.dev.server import offloading
from kvcascade.vllm import generation, v0_26
from kvcascade.vllm.generation import offers_states_once, offers_the_last_token
from kvcascade.vllm.v0_26 import CascadeManager

STEPS = 400
UNFINISHED_MAX = 8
REMEMBERED = 10
"""Texts that conversations may go on from."""
TEXT_MAX = 700
"""Tokens of a text that goes on, or of a prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only its configuration is read."""
    return make_llama(tmp_path_factory.mktemp("model"), layers=1, hidden=64, heads=2, kv_heads=1)


class Story:
    """Chooses what happens, by seed."""

    def __init__(
        self, seed: int, model: Path, path: Path, is_async: bool, kind: Kind | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.path = path
        kind = kind or Kind()
        shape = Shape(pages=kind.pages, chunk=kind.chunk)
        options: dict[str, Any] = {
            "write_mode": self.rng.choice(["demote", "back", "through"]),
            "dirty_age_s": 0.01,
            "offload_prompt_only": self.rng.random() < 0.3 or offers_the_last_token(),
            "weights_id": "test",
            "on_reset": self.rng.choice(["invalidate", "keep"]),
        }
        cpu, nvme = self.rng.choice([8, 20]), self.rng.choice([32, 96])
        self.rig = SchedulerRig(
            model,
            {"tiers": tiers(shape, path, cpu=cpu, nvme=nvme), **options},
            device_blocks=self.rng.choice([40, 64]),
            is_async=is_async,
            kind=kind,
        )
        self.families = [self._tokens(TEXT_MAX) for _ in range(5)]
        self.asked: deque[str] = deque(maxlen=REMEMBERED)
        self.chunk_tokens = kind.chunk * BLOCK_TOKENS
        self.names = (f"request-{number}" for number in range(STEPS))
        self.resets = 0
        self.may_abort = survives_aborts()

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(n)]

    def run(self) -> None:
        """All steps, and the end of every request."""
        for _ in range(STEPS):
            self._act()
            self.rig.step()
        self.rig.drain()

    def _act(self) -> None:
        chance = self.rng.random()
        if chance < 0.25 and len(self.rig.unfinished) < UNFINISHED_MAX:
            self._ask()
        elif chance < 0.27 and self.rig.unfinished and self.may_abort:
            self.rig.abort(self.rng.choice(self.rig.unfinished))
        elif chance < 0.28 and (self.may_abort or not self.rig.unfinished):
            self.resets += self.rig.reset()
        elif chance < 0.29:
            damage(self.path, every=4096)

    def _ask(self) -> None:
        """A new request; many go on from an earlier one's text and answer.

        Many answers end where a chunk does: the last token of an answer is never computed.
        """
        told = [name for name in self.asked if name not in self.rig.unfinished]
        texts = [text for name in told if len(text := self.rig.texts[name].tokens) < TEXT_MAX]
        if texts and self.rng.random() < 0.4:
            prompt = self.rng.choice(texts) + self._tokens(self.rng.choice([5, 20]))
        else:
            shared = self.rng.choice(self.families)[: self.rng.randrange(40, TEXT_MAX)]
            prompt = shared + self._tokens(self.rng.choice([0, 0, 20]))
        up_to_chunk = -len(prompt) % self.chunk_tokens or self.chunk_tokens
        self.asked.append(next(self.names))
        self.rig.add(self.asked[-1], prompt, self.rng.choice([1, 5, 40, up_to_chunk]))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_random_requests(seed: int, is_async: bool, model: Path, tmp_path: Path) -> None:
    story = Story(seed, model, tmp_path, is_async)
    try:
        story.run()
    finally:
        story.rig.close()


KINDS = {
    "mla": Kind(is_mla=True),
    "pipeline": Kind(stages=2),
    "window": Kind(window=96, chunk=1),
}
HANDS_STATES_OVER = offers_states_once()
if HANDS_STATES_OVER:
    KINDS["state"] = Kind(has_state=True, chunk=1)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_other_kinds(seed: int, kind: str, is_async: bool, model: Path, tmp_path: Path) -> None:
    """Of the first two no engine runs here: on a CPU, vLLM continues no MLA model from cached
    blocks, and no pipeline without compiling."""
    story = Story(100 + seed, model, tmp_path, is_async, KINDS[kind])
    try:
        story.run()
    finally:
        story.rig.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_next_turn_after_an_answer_that_fills_its_block(is_async: bool, model: Path) -> None:
    """The last token of an answer is never computed, so that block must not be stored."""
    extra = {
        "tiers": [{"type": "cpu", "capacity": "1MiB"}],
        "offload_prompt_only": offers_the_last_token(),
        "weights_id": "test",
    }
    rig = SchedulerRig(model, extra, 40, is_async, Kind(chunk=1))
    try:
        for turn in range(4):
            said = rig.texts[f"turn {turn - 1}"].tokens if turn else [7] * 90
            prompt = [*said, *range(10)]
            rig.add(f"turn {turn}", prompt, -len(prompt) % BLOCK_TOKENS)
            rig.drain()
    finally:
        rig.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_who_holds_blocks_runs_though_an_earlier_one_needs_more_than_is_left(
    is_async: bool, model: Path, tmp_path: Path
) -> None:
    """The long prompt comes up from the disk, so the next one overtakes it, and is loaded."""
    usable, held = 39, 18
    options = {"write_mode": "through", "offload_prompt_only": True, "weights_id": "test"}
    extra = {"tiers": tiers(Shape(), tmp_path, cpu=24, nvme=96), **options}
    rig = SchedulerRig(model, extra, usable + 1, is_async)
    manager = rig.scheduler.connector.connector_scheduler.manager._cascade.manager
    blocks = {"long": usable - held + 1, "one": 24, "two": 24, "short": held}
    prompts = {name: [n] * blocks[name] * BLOCK_TOKENS for n, name in enumerate(blocks)}

    def lies_below(chunks: int) -> bool:
        """A block counts from the moment it has a slot; while it is written, it is pinned above."""
        below = manager.tier_states()[1]
        return bool(below.blocks == chunks and below.demote_jobs == 0)

    try:
        for number, (name, prompt) in enumerate(prompts.items(), start=1):
            rig.add(name, prompt, max_tokens=1)
            rig.drain()
            due = sum(list(blocks.values())[:number]) // 2
            rig.step_until(partial(lies_below, due))
            assert rig.scheduler.reset_prefix_cache()
        for name in ("long", "short"):
            rig.add(f"{name} again", [*prompts[name], 99], max_tokens=1)
        rig.drain()
        assert manager.counters.loaded_blocks == [held // 2, blocks["long"] // 2]
    finally:
        rig.close()


@pytest.mark.skipif(not HANDS_STATES_OVER, reason="this vLLM offers states as it does the rest")
def test_a_state_is_offered_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is put off comes again at every step of its request."""
    offers: Counter[OffloadKey] = Counter()

    def put_off(manager: CascadeManager, keys: list[OffloadKey], context: ReqContext) -> None:
        offers.update(keys)

    monkeypatch.setattr(CascadeManager, "prepare_store", put_off)
    extra = {"tiers": [{"type": "cpu", "capacity": "1MiB"}], "weights_id": "test"}
    rig = SchedulerRig(model, extra, 40, is_async=False, kind=KINDS["state"])
    try:
        rig.add("request", [7] * 8 * BLOCK_TOKENS, max_tokens=4)
        rig.drain()
        manager = rig.scheduler.connector.connector_scheduler.manager
    finally:
        rig.close()
    (end,) = manager._cascade.manager.options.offered_once
    states = [n for key, n in offers.items() if key.endswith(end)]
    others = [n for key, n in offers.items() if not key.endswith(end)]
    assert states and set(states) == {1}
    assert len(others) == 8 and min(others) > 1


def test_chunks_of_a_window_are_refused(model: Path) -> None:
    """vLLM offers a chunk by its last block, and does not copy those before it that are gone."""
    extra = {"tiers": [{"type": "cpu", "capacity": "1MiB"}]}
    with pytest.raises(ConfigError, match="blocks_per_chunk: 2 does not work with this model"):
        SchedulerRig(model, extra, 40, is_async=False, kind=Kind(window=96, chunk=2))


@pytest.mark.skipif(not offers_the_last_token(), reason="this vLLM leaves the last token out")
def test_answers_that_end_with_what_nobody_computed_are_refused(model: Path) -> None:
    extra = {"tiers": [{"type": "cpu", "capacity": "1MiB"}], "offload_prompt_only": False}
    with pytest.raises(ConfigError, match=r"offload_prompt_only: vLLM 0\.26 to 0\.29"):
        SchedulerRig(model, extra, 40, is_async=False)


class NotRefusedError(Exception):
    """The engine would have started."""


@pytest.mark.parametrize("ours_is", [0, 1], ids=["first", "second"])
def test_another_connector_beside_ours_is_refused(
    ours_is: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.32 it may load into blocks that are still being stored; alone, ours has them all."""
    extra = {"tiers": [{"type": "cpu", "capacity": "1MiB"}], "weights_id": "test"}
    rig = SchedulerRig(model, extra, 40, is_async=False, kind=Kind(chunk=1))
    config, cache = copy(rig.scheduler.vllm_config), rig.scheduler.kv_cache_config
    rig.close()
    ours = offloading(config.kv_transfer_config.kv_connector_extra_config)
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }

    def stop_here(*_: Any, **__: Any) -> None:
        raise NotRefusedError

    def make(*connectors: dict[str, Any]) -> None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": list(connectors)},
        )
        MultiConnector(config, KVConnectorRole.SCHEDULER, cache)

    both = [theirs]
    both.insert(ours_is, ours)
    monkeypatch.setattr(v0_26, "open_scheduler_side", stop_here)
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, 32))
    with pytest.raises(NotRefusedError):
        make(ours)
    with pytest.raises(ConfigError, match=r"MultiConnector .* install vLLM 0\.33"):
        make(*both)
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, 33))
    with pytest.raises(NotRefusedError):
        make(*both)
