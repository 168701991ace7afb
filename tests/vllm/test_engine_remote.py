"""The real engine with a remote tier: a second engine finds what the first one computed.

The model is a small Llama with random weights in float32: a damaged block shows as another token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import AT_ANY_SPEED, Engine, engine_options
from support.network import neighbour_of, other_host
from support.remote_servers import HOST, PATIENT, ServerProcess, redis_server
from support.waiting import wait_until

from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.dev.other_host import OtherHost

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 128 * 4
"""Layers, tokens, K and V, KV heads times head size, float32."""
PROMPT_TOKENS = 1000
PROMPTS = 4
CACHED_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
BLOCKS = PROMPTS * (CACHED_TOKENS // BLOCK_TOKENS)
WRITTEN = "vllm:kvcascade_demoted_blocks[remote]"
READ = "vllm:kvcascade_promoted_blocks[remote]"
READ_BYTES = "vllm:kvcascade_remote_bytes[remote,read]"
FROM_NVME = "vllm:kvcascade_promoted_blocks[nvme]"


@pytest.fixture
def redis() -> Iterator[ServerProcess]:
    server = redis_server()
    yield server
    server.kill()


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def tiers(
    shared: str, port: int, nvme: Path | None, host: str = HOST, **options: Any
) -> list[dict[str, Any]]:
    """A CPU tier, an NVMe tier in a folder if one is given, and the server."""
    cpu = {"type": "cpu", "capacity": 72 * BLOCK_BYTES * 4 + 4096, "arena_dir": shared}
    capacity = 320 * (BLOCK_BYTES + 4096) * 16 // 15
    disk = {"type": "nvme", "path": str(nvme), "capacity": capacity, "min_free": 0}
    remote = {"type": "remote", "url": f"redis://{host}:{port}", **PATIENT, **options}
    return [cpu, *([] if nvme is None else [disk]), remote]


def tokens(answers: Any) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def has_written(engine: Engine, blocks: int) -> bool:
    return engine.metrics().get(WRITTEN, 0) >= blocks


@pytest.mark.parametrize("has_nvme", [False, True])
def test_a_second_engine_finds_what_the_first_one_computed(
    tmp_path: Path, redis: ServerProcess, has_nvme: bool
) -> None:
    """Its own tiers are empty. It also serves when the server dies, or is down at its start."""
    model, asked = make_llama(tmp_path / "llama"), prompts()
    log = tmp_path / "engine.log"
    with TemporaryDirectory(dir="/dev/shm") as shared:

        def engine(name: str, **options: Any) -> Engine:
            nvme = tmp_path / name if has_nvme else None
            extra: dict[str, Any] = {"tiers": tiers(shared, redis.port, nvme, **options)}
            extra |= {**AT_ANY_SPEED, "write_mode": "through"}
            return Engine(log, engine_options(model, 160, extra))

        with engine("first", writes="through") as first:
            expected: list[list[int]] = []
            for number, prompt in enumerate(asked, start=1):  # a chain has few blocks in flight
                expected += tokens(first.generate([prompt]))
                written = partial(has_written, first, number * BLOCKS // PROMPTS)
                wait_until(written)
            first.stop()
        with engine("second") as second:
            answers = second.generate(asked)
            assert tokens(answers) == expected
            assert [answer["cached"] for answer in answers] == [CACHED_TOKENS] * PROMPTS
            wait_until(lambda: second.metrics()[READ_BYTES] == BLOCKS * BLOCK_BYTES)
            _check_reads(second.metrics())
            redis.kill()
            rng = random.Random(8)
            new = [[rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
            assert len(tokens(second.generate(new))) == 2
            second.stop()
        with engine("second") as again:  # the server is down
            assert tokens(again.generate(asked)) == expected
            if has_nvme:  # what was read from the server was written there
                assert again.metrics()[FROM_NVME] == BLOCKS
            again.stop()
        assert not list(Path(shared).iterdir())


def _check_reads(counted: dict[str, float]) -> None:
    """The metrics of an engine that read every block from the server, and wrote none there."""
    assert counted[READ] == BLOCKS
    calls, requests = (
        counted[f"vllm:kvcascade_remote_{n}[remote,read]"] for n in ("calls", "requests")
    )
    assert 0 < calls <= requests
    assert counted["vllm:kvcascade_remote_blocks[remote,read,ok]"] == BLOCKS
    assert counted["vllm:kvcascade_remote_openings[remote,read]"] == 0


def test_engines_in_networks_of_their_own(tmp_path: Path) -> None:
    """Two hosts that reach nothing but the server, which is on a third one.

    The second one finds as much as the first one has on its own.
    """
    model, asked = make_llama(tmp_path / "llama"), prompts()[:2]
    given: dict[str, Any] = {"writes": "through", "insecure": True}
    with ExitStack() as stack:
        shared = stack.enter_context(TemporaryDirectory(dir="/dev/shm"))
        third = stack.enter_context(other_host())
        hosts = [stack.enter_context(neighbour_of(third, number)) for number in range(2)]
        everywhere = ("--protected-mode", "no", "--bind", "0.0.0.0")
        server = redis_server(*everywhere, host=third.address, within=third.within)
        stack.callback(server.kill)

        def engine(host: OtherHost) -> Engine:
            nearby = tiers(shared, server.port, None, host.peer, **given)
            extra: dict[str, Any] = {**AT_ANY_SPEED, "tiers": nearby}
            return Engine(tmp_path / "engine.log", engine_options(model, 160, extra), host.network)

        with engine(hosts[0]) as first:
            expected = tokens(first.generate(asked))
            blocks = len(asked) * (CACHED_TOKENS // BLOCK_TOKENS)
            wait_until(lambda: has_written(first, blocks))
            local = first.generate(asked)
            first.stop()
        with engine(hosts[1]) as second:
            answers = second.generate(asked)
            assert tokens(answers) == tokens(local) == expected
            for found in (local, answers):
                assert [answer["cached"] for answer in found] == [CACHED_TOKENS] * len(asked)
            assert second.metrics()[READ] == blocks
            second.stop()
