"""The spec for vLLM 0.16 to 0.19 without an engine, its calls as that connector makes them.

Needs one of those versions installed (`make test-vllm VERSION=0.19.1`); every byte is compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvcascade.assembly.build import open_worker
from kvcascade.errors import ConfigError
from kvcascade.vllm.generation import adapter

if adapter() != "v0_16":
    pytest.skip("needs vLLM 0.16 to 0.19", allow_module_level=True)

# By name: the pinned vLLM, whose types are checked, has other ones.
vllm_spec: Any = import_module("vllm.v1.kv_offload.spec")
GPULoadStoreSpec: Any = import_module("vllm.v1.kv_offload.mediums").GPULoadStoreSpec
CascadeOffloadingSpec: Any = import_module("kvcascade.spec").CascadeOffloadingSpec

BLOCKS, TOKENS, LAYERS, HALF = 64, 16, 2, (2, 16, 4)
PAGE_BYTES = 2 * 2 * 16 * 4 * 4
ROUNDS_MAX = 400
_engines = itertools.count()


class Backend:
    """Keys of all blocks, then values of all blocks."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)


class Engine:
    """Worker and scheduler side in one process, as these versions may have them."""

    def __init__(self, path: Path, shared: Path, chunk: int = 1, **extra: Any) -> None:
        tiers = [
            {"type": "cpu", "capacity": 24 * LAYERS * PAGE_BYTES * chunk + 8192},
            {"type": "nvme", "capacity": "4MiB", "path": str(path), "min_free": 0},
        ]
        tiers[0]["arena_dir"] = str(shared)
        given = {"tiers": tiers, "weights_id": "test", "blocks_per_chunk": chunk, **extra}
        config, cache = vllm_config(given), cache_config()
        self.chunk = chunk
        self.layers = {
            f"layer.{i}": torch.zeros(2, BLOCKS, *HALF, dtype=torch.float32) for i in range(LAYERS)
        }
        worker: Any = CascadeOffloadingSpec(config, cache)
        if hasattr(vllm_spec, "CanonicalKVCaches"):
            registered = list(worker.get_handlers(self._canonical()))
        else:
            registered = list(worker.get_handlers(self.layers, dict.fromkeys(self.layers, Backend)))
        media = [(source.medium(), target.medium()) for source, target, _ in registered]
        assert media == [("GPU", "CPU"), ("CPU", "GPU")]
        self.handler = registered[0][2]
        scheduler: Any = CascadeOffloadingSpec(config, cache)
        self.manager = scheduler.get_manager()
        self._jobs = itertools.count()
        self._free = itertools.cycle(range(BLOCKS))

    def _canonical(self) -> Any:
        halves = [half for tensor in self.layers.values() for half in tensor.unbind(0)]
        rows = [half.reshape(BLOCKS, -1).view(torch.int8) for half in halves]
        size = rows[0].shape[1]
        return vllm_spec.CanonicalKVCaches(
            [vllm_spec.CanonicalKVCacheTensor(row, size) for row in rows],
            [[vllm_spec.CanonicalKVCacheRef(i, size) for i in range(len(rows))]],
        )

    def close(self) -> None:
        """What the end of the process does."""
        self.manager.close()

    def update_connector_output(self, hashes: set[bytes]) -> None:
        """The connector's method of this name."""
        self.manager.complete_store(hashes)

    def gpu(self, blocks: list[int], first: int | None = None) -> Any:
        """Device blocks, with their group where this version says it."""
        if not hasattr(vllm_spec, "CanonicalKVCaches"):
            return GPULoadStoreSpec(blocks)
        indices = None if first is None else (first,)
        return GPULoadStoreSpec(blocks, group_sizes=(len(blocks),), block_indices=indices)

    def transfer(self, source: Any, target: Any) -> None:
        """One job from its submission to its report."""
        job = next(self._jobs)
        assert self.handler.transfer_async(job, (source, target))
        self.handler.wait({job, 12345})
        (result,) = self.handler.get_finished()
        assert (result.job_id, result.success) == (job, True)
        assert result.transfer_type == (source.medium(), target.medium())

    def store(self, hashes: list[bytes], *, is_preempted: bool = False) -> int:
        """Compute, store, finish; returns how many were new."""
        self.manager.touch(iter(hashes))
        output = None
        for _ in range(ROUNDS_MAX):  # slots may be busy: the same list is offered at every step
            output = self.manager.prepare_store(iter(hashes))
            if output is not None:
                break
            self.manager.take_events()
            self.manager._cascade.manager._core.below.wait(1.0)
        assert output is not None
        new = list(output.block_hashes_to_store)
        if new:
            self.manager.touch(iter(hashes))
            blocks = [next(self._free) for _ in range(len(new) * self.chunk)]
            for at, block in enumerate(blocks):
                self.fill(block, new[at // self.chunk], at % self.chunk)
            self.transfer(self.gpu(blocks), output.store_spec)
            if is_preempted:
                self.manager.complete_store(set(new))
            else:
                self.update_connector_output(set(new))
        self.manager.take_events()
        return len(new)

    def await_hits(self, hashes: list[bytes]) -> int:
        """Ask at every step until there is an answer."""
        for _ in range(ROUNDS_MAX):
            self.manager.touch(iter(hashes))
            hits = self.manager.lookup(iter(hashes))
            if hits is not None:
                return int(hits)
            self.manager.take_events()
            self.manager._cascade.manager._core.below.wait(1.0)
        raise AssertionError("a lookup never ended")

    def load(self, hashes: list[bytes], skip: int = 0) -> None:
        """Load what was just answered as hits, from block `skip` on, and compare."""
        source = self.manager.prepare_load(iter(hashes))
        places = range(skip, len(hashes) * self.chunk)
        blocks = [next(self._free) for _ in places]
        for block in blocks:
            self.fill(block, b"other bytes", 0)
        self.transfer(source, self.gpu(blocks, skip))
        for place, block in zip(places, blocks, strict=True):
            for tensor, content in self.contents(hashes[place // self.chunk], place % self.chunk):
                assert torch.equal(tensor[:, block], content)
        self.manager.complete_load(set(hashes))
        self.manager.take_events()

    def contents(self, name: bytes, sub: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The one right content of a block, per layer."""
        for number, tensor in enumerate(self.layers.values()):
            raw = hashlib.shake_128(name + bytes([sub, number])).digest(2 * 2 * 16 * 4)
            values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).float()
            yield tensor, values.reshape(2, *HALF)

    def fill(self, block: int, name: bytes, sub: int) -> None:
        for tensor, content in self.contents(name, sub):
            tensor[:, block] = content


def vllm_config(extra: dict[str, Any]) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra, engine_id=f"seed-{next(_engines)}-{id(extra):x}"
        ),
        cache_config=SimpleNamespace(block_size=TOKENS, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(model="test/model", dtype=torch.float32),
        load_config=SimpleNamespace(load_format="auto"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


def cache_config(groups: int = 1, window: int | None = None) -> Any:
    shape: Any = {"num_kv_heads": 2, "head_size": 4, "dtype": torch.float32, "block_size": TOKENS}
    group = SimpleNamespace(
        layer_names=[f"layer.{i}" for i in range(LAYERS)],
        kv_cache_spec=SlidingWindowSpec(**shape, sliding_window=window)
        if window
        else FullAttentionSpec(**shape),
    )
    tensors = [SimpleNamespace(size=BLOCKS * PAGE_BYTES) for _ in range(LAYERS)]
    return SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group] * groups
    )


def hashes(text: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{text}:{i}".encode()).digest() for i in range(count)]


@pytest.fixture
def shared() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize("chunk", [1, 2])
def test_stored_evicted_restarted(chunk: int, shared: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path, shared, chunk)
    for text in range(8):  # more than the first tier holds
        assert engine.store(hashes(f"text {text}", 4)) == 4
    assert engine.await_hits(hashes("text 7", 5)) == 4
    engine.load(hashes("text 7", 4), skip=chunk - 1)
    assert engine.await_hits(hashes("text 0", 4)) == 4, "from below"
    engine.load(hashes("text 0", 4))
    engine.close()
    engine = Engine(tmp_path, shared, chunk)
    for text in range(8):
        assert engine.await_hits(hashes(f"text {text}", 4)) == 4
        engine.load(hashes(f"text {text}", 4))
    engine.close()


def test_another_chunk_size_or_label_shares_nothing(shared: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path, shared)
    engine.store(hashes("text", 4))
    engine.close()
    changes: list[dict[str, Any]] = [{"chunk": 2}, {"label": "other"}]
    for change in changes:
        engine = Engine(tmp_path, shared, **change)
        assert engine.await_hits(hashes("text", 4)) == 0
        engine.close()


def test_a_preempted_store_waits_for_the_workers(shared: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path, shared)
    engine.store(hashes("text", 4), is_preempted=True)
    assert engine.manager.lookup(iter(hashes("text", 4))) is None
    assert engine.await_hits(hashes("text", 4)) == 4
    engine.load(hashes("text", 4))
    engine.close()


def test_a_gpu_is_given_all_of_a_store_at_once(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows that of the request's end: the engine may sleep, and discard the pages."""
    adapted = import_module("kvcascade.vllm.v0_16")
    asked: list[dict[str, Any]] = []

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return open_worker(*args, **options)

    monkeypatch.setattr(adapted, "open_worker", noted)
    Engine(tmp_path, shared).close()
    assert [options["steps_while_storing"] for options in asked] == [False]


def test_bad_configurations_are_one_sentence(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks_per_chunk: 0 is not allowed"):
        Engine(tmp_path, shared, 0)
    extra = {"tiers": [{"type": "cpu", "capacity": "1MiB"}]}
    with pytest.raises(ConfigError, match="0.24 or newer for a model with several"):
        CascadeOffloadingSpec(vllm_config(extra), cache_config(groups=2))
    with pytest.raises(ConfigError, match="0.24 or newer for a model whose layers all keep"):
        CascadeOffloadingSpec(vllm_config(extra), cache_config(window=64))


def test_what_these_versions_cannot_do_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    tiers = [{"type": "cpu", "capacity": "1MiB"}]

    def made(**extra: Any) -> Any:
        caplog.clear()
        return CascadeOffloadingSpec(vllm_config({"tiers": tiers, **extra}), cache_config())

    with pytest.raises(ConfigError, match="record: vLLM 0.16 to 0.19 do not tell requests apart"):
        made(record="/nowhere")
    assert made()._geometry.tokens_per_block == 0
    assert "load_or_recompute" not in caplog.text
    assert made(load_or_recompute=True)._geometry.tokens_per_block == 0
    assert "load_or_recompute has no effect" in caplog.text
    assert made(load_or_recompute=True, prefill_tokens_per_s=5000)._geometry.tokens_per_block == 16
    assert "load_or_recompute" not in caplog.text
