"""What decides how numbers lie inside a page is part of the fingerprint, each thing alone."""

from __future__ import annotations

from types import SimpleNamespace as Stub
from typing import Any

import pytest

from kvcascade.config.schema import parse
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.vllm.packing import group_facts, packing_of_layers


class TestMachine:
    """What kind of machine computes."""

    def fingerprint(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *sets: str,
        name: str = "cpu",
        kind: str = "cpu",
        fp8: str = "float8_e4m3fn",
    ) -> str:
        """On this platform, on a CPU with these instruction sets."""
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        platform = Stub(device_name=name, device_type=kind, fp8_dtype=lambda: fp8)
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
        monkeypatch.setattr(
            "torch.cpu.get_capabilities", lambda: dict.fromkeys(sets, True), raising=False
        )
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: "amx_tile" in sets)
        settings = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}], "weights_id": "mine"})
        return NamespaceKey("", common.namespace_facts(settings, None, "model", {})).fingerprint

    def test_another_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kinds = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}
        found = [self.fingerprint(monkeypatch, name=name, kind=kinds[name]) for name in kinds]
        assert len(set(found)) == len(kinds)
        assert self.fingerprint(monkeypatch) == found[0]

    def test_another_form_of_8_bit_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of MI300 are half of those of MI355, from equal bytes."""
        found = {
            self.fingerprint(monkeypatch, name="rocm", kind="cuda", fp8=fp8)
            for fp8 in ("float8_e4m3fn", "float8_e4m3fnuz")
        }
        assert len(found) == 2

    def test_an_order_that_only_the_environment_names(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [self.fingerprint(monkeypatch, name="rocm", kind="cuda")]
        for value in ("0", "1", "True"):
            monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", value)
            found.append(self.fingerprint(monkeypatch, name="rocm", kind="cuda"))
        assert found[0] == found[1] != found[2] == found[3]

    def test_other_instruction_sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sets = ["avx512_f", "avx512_bf16", "amx_tile", "avx10_2"]  # the last is AMX for vLLM, too
        found = {self.fingerprint(monkeypatch, *sets[:end]) for end in range(len(sets) + 1)}
        assert len(found) == len(sets) + 1

    def test_tiles_of_which_only_vllm_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Up to torch 2.10, which has no list of instruction sets."""
        attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
        found = []
        for isa in ("vec", "amx"):
            monkeypatch.setattr(attention, "_get_attn_isa", lambda *_, isa=isa: isa)
            found.append(self.fingerprint(monkeypatch))
        assert found[0] != found[1]

    def test_a_vllm_that_cannot_be_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
        monkeypatch.delattr(attention, "_get_attn_isa")
        assert self.fingerprint(monkeypatch) != self.fingerprint(monkeypatch, "amx_tile")


def contents(*specs: Any) -> dict[str, str]:
    """The facts of groups with these specifications."""
    groups = [Stub(kv_cache_spec=spec) for spec in specs]
    return group_facts(Stub(kv_cache_groups=groups), range(len(specs)))


def test_what_a_group_says_of_its_pages() -> None:
    spec = {"num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16", "block_size": 16}
    base = contents(Stub(**spec))
    assert base == {"content0": "num_kv_heads=8 head_size=64 dtype=bfloat16"}
    for change in ({"num_head_slots": 2}, {"state_content_bytes": 576}, {"kv_quant_mode": 5}):
        assert contents(Stub(**spec, **change)) != base
    by_layer = Stub(kv_cache_specs={"a": Stub(head_size=64), "b": Stub(head_size=128)})
    assert contents(by_layer) == {"content0": "head_size=64; head_size=128"}
    assert group_facts(None, [0]) == {}


class Tensor:
    """A KV cache tensor, as far as it is looked at."""

    def __init__(self, *shape: int, order: tuple[int, ...] | None = None) -> None:
        """`order`: the dimensions from the slowest to the fastest."""
        self.shape = shape
        self._strides = [0] * len(shape)
        step = 1
        for dimension in reversed(order or range(len(shape))):
            self._strides[dimension] = step
            step *= shape[dimension]

    def stride(self) -> tuple[int, ...]:
        """As torch gives them."""
        return tuple(self._strides)


class Flash:
    """An attention backend."""


class Triton:
    """Another one."""


def packing(*layers: tuple[type, Any], num_blocks: int = 10) -> str:
    """Of one group with these layers."""
    found = {
        str(i): Stub(get_attn_backend=lambda backend=backend: backend, kv_cache=cache)
        for i, (backend, cache) in enumerate(layers)
    }
    config = Stub(compilation_config=Stub(static_forward_context=found))
    return packing_of_layers(config, [list(found)], num_blocks)


def test_what_layers_show() -> None:
    base = packing((Flash, Tensor(10, 2, 32, 128)))
    assert base == "Flash,1x2x32x128:0123"
    others = [
        packing((Triton, Tensor(10, 2, 32, 128))),
        packing((Flash, Tensor(10, 2, 32, 128, order=(0, 2, 1, 3)))),  # tokens before heads
        packing((Flash, Tensor(20, 2, 16, 128))),  # the kernel's blocks are half as large
        packing((Flash, [Tensor(10, 2, 32, 128), Tensor(10, 64)])),
        packing((Flash, Tensor(10, 2, 32, 128)), (Triton, Tensor(10, 2, 32, 128))),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_how_many_blocks_and_layers_there_are_is_no_part_of_it() -> None:
    base = packing((Flash, Tensor(10, 2, 32, 128)))
    assert packing((Flash, Tensor(12, 2, 32, 128)), num_blocks=12) == base
    assert packing(*[(Flash, Tensor(10, 2, 32, 128))] * 2) == base
    apart = packing((Flash, Tensor(2, 10, 32, 64)))
    assert packing((Flash, Tensor(2, 12, 32, 64)), num_blocks=12) == apart


def test_where_no_layers_are() -> None:
    assert packing_of_layers(None, [["a"], ["b"]], 10) == ""
    assert packing_of_layers(Stub(compilation_config=Stub()), [["a"]], 10) == ""
    assert packing((Flash, None)) == "Flash"
