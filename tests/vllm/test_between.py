"""What stands in for later versions' interface in vLLM 0.25 and 0.26.

That it works there, their own connector shows (`make test-vllm VERSION=0.25.1`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext

from kvcascade.errors import ConfigError
from kvcascade.manager.request import Request
from kvcascade.vllm import v0_25
from kvcascade.vllm.generation import (
    _plain_state_of,
    _set_plain_state,
    set_state,
    state_of,
)
from kvcascade.vllm.v0_26 import shape_facts


def spec(*tensors: tuple[int, int]) -> Any:
    """What vLLM's half of a spec holds in 0.25; tensors are (bytes, block stride)."""
    parallel = SimpleNamespace(
        rank=5,  # second worker of the third replica
        world_size=2,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
    )
    engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        parallel_config=parallel,
        model_config=SimpleNamespace(model="some/model"),
        cache_config=SimpleNamespace(cache_dtype="torch.bfloat16"),
    )
    cache = SimpleNamespace(
        num_blocks=10,
        kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"])],
        kv_cache_tensors=[SimpleNamespace(size=n, block_stride=s) for n, s in tensors],
    )
    return SimpleNamespace(
        vllm_config=engine,
        kv_cache_config=cache,
        extra_config={"tiers": []},
        gpu_block_size=(32,),
        hash_block_size=16,
        block_size_factor=4,
    )


def test_the_facts_are_those_of_later_versions() -> None:
    config = v0_25._config(spec((1000, 0), (500, 0)))
    assert shape_facts(cast(Any, config), None) == {
        "dtype": "bfloat16",
        "tokens_per_hash": "16",
        "blocks_per_chunk": "4",
        "rank_bytes": "600",
        "layout": "None",
        "row_layout": "",
        "parallel": "tp2 pp1 pcp1 dcp1 world2",
        "group0": "32 tokens: a,b",
    }
    assert (config.parallel.rank, config.engine_id, config.model.name) == (
        1,
        "engine",
        "some/model",
    )


def test_tensors_of_a_packed_layout_are_one_memory() -> None:
    config = v0_25._config(spec((1000, 64), (1000, 64)))
    assert config.worker_kv_bytes_per_block == 100


@dataclass
class PlainContext:
    """A request's context up to 0.26."""

    req_id: str


@pytest.mark.parametrize(
    ("make", "read", "write"),
    [(PlainContext, _plain_state_of, _set_plain_state), (ReqContext, state_of, set_state)],
)
def test_a_context_keeps_what_belongs_to_its_request(make: Any, read: Any, write: Any) -> None:
    one, other, request = make("one"), make("other"), Request()
    assert read(one, Request) is None
    write(one, request)
    assert read(one, Request) is request and read(other, Request) is None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A spec of ours over vLLM's half of it, with these options."""

    def made(**extra: Any) -> Any:
        def init(self: Any, *_: Any) -> None:
            vars(self).update(vars(spec((1000, 0))))
            self.extra_config = {"tiers": [{"type": "cpu", "capacity": "1MiB"}], **extra}

        monkeypatch.setattr(OffloadingSpec, "__init__", init)
        return v0_25.CascadeOffloadingSpec(None, None)

    return made


def test_blocks_per_chunk_means_what_it_does_in_later_versions(made: Callable[..., Any]) -> None:
    assert made()._geometry.blocks_per_chunk == 4, "as vLLM says"
    assert made(blocks_per_chunk=None)._geometry.blocks_per_chunk == 4
    geometry = made(blocks_per_chunk=3)._geometry
    assert (geometry.blocks_per_chunk, geometry.tokens_per_block) == (3, 96)


@pytest.mark.parametrize("extra", [{"blocks_per_chunk": 0}, {"blocks_per_chunk": "2"}])
def test_blocks_per_chunk_is_a_number(made: Callable[..., Any], extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="blocks_per_chunk: .* whole number from 1"):
        made(**extra)


def test_blocks_per_chunk_is_said_once(made: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="block_size: .* leave one of them out"):
        made(blocks_per_chunk=2, block_size=64)
