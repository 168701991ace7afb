"""Which block follows which: noted by an engine, used by `inspect`, `export` and `gc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.cache_rig import call
from support.keys import key
from support.path_cache import engine_on, folder_in
from support.path_engine import PathEngine

from kvcascade.assembly.chain_notes import ChainNotes, finest_chain
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.path_messages import chain_of
from kvcascade.tiers.nvme.segments.chains import (
    CELLS_MIN,
    MAX_RUN_BLOCKS,
    ChainLog,
    head_of,
)
from kvcascade.tools.commands.carry.carried import parse_record
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.prompt_chains import Chains, Successors
from kvcascade.tools.commands.saved_state import SavedState

TOKENS = 32
FIELDS = {"model": "some/model", "group0": "16 tokens: l0", "blocks_per_chunk": "2"}
SYSTEM, DOCUMENT, QUESTION = range(4), range(4, 8), range(8, 12)
"""A system prompt, and two prompts that begin with it."""


def ends_of(*numbers: int) -> dict[bytes, int]:
    """One request, as vLLM knows it."""
    return {key(n): TOKENS * (i + 1) for i, n in enumerate(numbers)}


def new_log(length: int = CELLS_MIN) -> tuple[ChainLog, npt.NDArray[np.uint64]]:
    cells = np.zeros(length, dtype=np.uint64)
    return ChainLog(cells, lambda: 1000.0), cells


def noted(log: ChainLog, *requests: tuple[dict[bytes, int], Iterable[int]]) -> None:
    """Requests that end one after the other, each with the blocks that it brought."""
    notes = ChainNotes(log.write)
    for ends, brought in requests:
        notes.note(ends, {key(n): True for n in brought})
    notes.send()


def prompts_on(root: Path) -> PathEngine:
    """An engine with both prompts, and what it noted of them."""
    engine = engine_on(root, namespace=NamespaceKey("some/model", FIELDS))
    engine.store(range(16))
    for numbers, fresh in (([*SYSTEM, *DOCUMENT], 0), ([*SYSTEM, *QUESTION], len(SYSTEM))):
        chain, tokens = finest_chain(ends_of(*numbers))
        engine.keeper.tell(chain_of(chain, fresh, tokens))
    state = SavedState(folder_in(root) / "state")
    engine.until(lambda: len(state.chains()) == 12)
    return engine


@pytest.fixture(params=["closed", "live"])
def cache(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cache with both prompts."""
    engine = prompts_on(tmp_path)
    if request.param == "closed":
        engine.close()
    yield tmp_path
    if request.param == "live":
        engine.close()


def test_a_block_knows_its_place_in_the_prompt(cache: Path) -> None:
    found = call("inspect", cache, "--block", key(5).hex(), "--json").document
    assert (found["prefix_position"], found["prefix_tokens"]) == (5, 6 * TOKENS)
    assert found["parent"] == key(4)[:8].hex()
    first = call("inspect", cache, "--block", key(0).hex(), "--json").document
    assert (first["prefix_position"], first["parent"]) == (0, "")
    assert "block 5, up to token 192" in call("inspect", cache, "--block", key(5).hex()).out
    unknown = call("inspect", cache, "--block", key(15).hex(), "--json").document
    assert unknown["prefix_position"] is None and unknown["prefix_tokens"] is None


def exported(cache: Path, *options: object) -> set[int]:
    from safetensors import safe_open

    out = cache / "out.safetensors"
    assert call("export", cache, out, "--force", *options).code == ExitCode.OK
    with safe_open(str(out), "np") as opened:
        records = [parse_record(row.tobytes()) for row in opened.get_tensor("slots")]
    return {int.from_bytes(record.key[:4], "big") for record in records if record is not None}


def test_a_prompt_is_exported_by_its_last_block(cache: Path) -> None:
    assert exported(cache, "--prefix", key(3).hex()) == set(SYSTEM)
    assert exported(cache, "--prefix", key(7).hex()) == {*SYSTEM, *DOCUMENT}
    both = exported(cache, "--prefix", key(7).hex(), "--prefix", key(11).hex())
    assert both == {*SYSTEM, *DOCUMENT, *QUESTION}
    assert exported(cache, "--prefix", key(3).hex(), "--hash", key(9).hex()) == {*SYSTEM, 9}


def test_what_is_missing_of_a_prompt_is_said(cache: Path) -> None:
    assert call("gc", cache, "--hash", key(5).hex()).code == ExitCode.OK
    out = cache / "out.safetensors"
    answer = call("export", cache, out, "--prefix", key(7).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert (answer.document["blocks"], answer.document["missing"]) == (7, 1)
    assert (
        "1 that were asked for are not stored"
        in call("export", cache, out, "--prefix", key(7).hex(), "--force").out
    )


def test_a_prompt_that_nobody_noted_is_refused(cache: Path) -> None:
    answer = call("export", cache, cache / "out.safetensors", "--prefix", key(15).hex())
    assert answer.code == ExitCode.USAGE and "no engine has recorded" in answer.err
    answer = call("export", cache, cache / "out.safetensors", "--prefix", "ff" * 36)
    assert answer.code == ExitCode.USAGE and "there is no block" in answer.err


def test_a_prefix_is_cleared_with_all_that_follows(cache: Path) -> None:
    would = call("gc", cache, "--prefix", key(4).hex(), "--dry-run", "--json").one
    assert would["blocks_removed"] == len(DOCUMENT)
    answer = call("gc", cache, "--prefix", key(4).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS and "4 other blocks may come" in answer.one["skipped"]
    assert exported(cache) == {*SYSTEM, *QUESTION, 12, 13, 14, 15}
    for number in range(12, 16):
        call("gc", cache, "--hash", key(number).hex())
    assert call("gc", cache, "--prefix", key(0).hex()).code == ExitCode.OK, "all are known"
    assert exported(cache) == set()


def test_a_block_whose_beginning_is_not_known_may_come_after_any() -> None:
    log, cells = new_log()
    log.note([key(1), key(2)], b"", 0, TOKENS, now_s=100)
    log.note([key(3)], key(2), 2, TOKENS, now_s=100)
    log.note([key(6), key(7)], key(5), 1, TOKENS, now_s=100)
    chains = Chains([cells])
    rooted = set(chains.rooted().tolist())
    assert rooted == {head_of(key(n)) for n in (1, 2, 3)}
    after = Successors(chains, head_of(key(2)))
    assert [n for n in range(1, 9) if after.has(head_of(key(n)))] == [2, 3]
    assert after.count_unknown() == 5, "4, 5 and 8 are in no log, and nobody knows what begins 6"
    assert not len(Chains([]).rooted())


def test_several_engines_and_the_later_word_counts() -> None:
    (one, first), (two, second) = new_log(), new_log()
    one.note([key(1), key(2)], b"", 0, TOKENS, now_s=100)
    two.note([key(2), key(3)], key(9), 2, TOKENS, now_s=200)
    chains = Chains([first, second])
    assert len(chains) == 3 and chains.end_of(head_of(key(2))) == 3 * TOKENS
    assert chains.up_to(head_of(key(3))) == ([head_of(key(n)) for n in (3, 2)], False)
    assert len(Chains([])) == 0 and Chains([]).end_of(1) is None


def test_a_circle_ends() -> None:
    log, cells = new_log()
    log.note([key(1), key(2)], key(2), 0, TOKENS, now_s=1)
    chains = Chains([cells])
    assert chains.up_to(head_of(key(2)))[1] is False
    assert chains.from_on(head_of(key(1))) == {head_of(key(1)), head_of(key(2))}


def test_the_oldest_is_overwritten_and_what_is_in_use_is_not() -> None:
    log, cells = new_log(800)
    answers = [range(1000 + 4 * i, 1004 + 4 * i) for i in range(220)]
    requests = [(ends_of(*SYSTEM, *answer), answer) for answer in answers]
    noted(log, (ends_of(*SYSTEM), SYSTEM), *requests)
    assert log.written > 2 * log.size
    chains = Chains([cells])
    assert chains.end_of(head_of(key(1000))) is None, "long ago"
    for answer in answers[-40:]:
        found, is_whole = chains.up_to(head_of(key(answer[-1])))
        assert is_whole and len(found) == len(SYSTEM) + len(answer)


def test_what_was_noted_lately_is_not_written_again() -> None:
    log, cells = new_log()
    noted(
        log,
        (ends_of(1, 2), [1, 2]),
        (ends_of(1, 2, 3), [3]),  # the next turn
        (ends_of(1, 2, 3), []),
        (ends_of(1, 2, 3, 4), [4]),
    )
    assert len(np.flatnonzero(cells == head_of(key(1)))) == 1
    assert Chains([cells]).up_to(head_of(key(4)))[1]


def test_one_chain_over_several_runs_is_whole() -> None:
    blocks = 3 * MAX_RUN_BLOCKS + 5
    log, cells = new_log()
    noted(log, (ends_of(*range(blocks)), range(blocks)))
    found, is_whole = Chains([cells]).up_to(head_of(key(blocks - 1)))
    assert is_whole and len(found) == blocks


def test_a_torn_run_is_left_out() -> None:
    log, cells = new_log()
    log.note([key(1), key(2)], b"", 0, TOKENS, now_s=1)
    log.note([key(3)], key(2), 2, TOKENS, now_s=1)
    for at in range(1, 7):  # the first run
        torn = cells.copy()
        torn[at] ^= np.uint64(1 << 40)
        assert len(Chains([torn])) == 1
    rng = np.random.default_rng(1)
    for _ in range(20):
        strange = rng.integers(0, 2**64, CELLS_MIN, dtype=np.uint64)
        strange[::7] = strange[::7] & np.uint64(2**32 - 1) | cells[1] & ~np.uint64(2**32 - 1)
        assert len(Chains([strange, strange[:3], strange[:0]])) == 0


def test_of_several_groups_the_finest_counts_up_to_a_gap() -> None:
    def group(number: int, block: int) -> bytes:
        return key(block)[:-4] + number.to_bytes(4, "big")

    ends = {group(1, 1): 64, group(0, 1): 64, group(0, 0): 32, group(1, 3): 128}
    ends |= {group(0, 2): 96, group(0, 3): 128}
    assert finest_chain(ends) == ([group(0, i) for i in range(4)], 32)
    del ends[group(0, 2)]
    assert finest_chain(ends) == ([group(0, 0), group(0, 1)], 32)
    assert finest_chain({}) == ([], 0)
