"""The plugin refuses before the model is loaded what would be refused after it, and no more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.plugins
from support import small_models
from vllm import platforms
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore

from kvcascade.config.machine import Disk, Machine, Memory
from kvcascade.errors import ConfigError
from kvcascade.vllm import generation, plugin

GIB = 1 << 30
CASCADE: dict[str, Any] = {
    "spec_name": "CascadeOffloadingSpec",
    "tiers": [{"type": "cpu", "capacity": "1MiB"}],
}
TIER = {"type": "KVCascadeTier", "module_path": "kvcascade.vllm_tier"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def transfer(extra: Any, connector: str = "OffloadingConnector", role: str = "kv_both") -> Any:
    """vLLM's `KVTransferConfig`, as far as it is asked."""
    return SimpleNamespace(
        kv_connector=connector, kv_role=role, kv_connector_extra_config=dict(extra)
    )


def in_multi(*beside: Any, role: str = "kv_both", **extra: Any) -> Any:
    """A `MultiConnector` of ours and others; vLLM leaves what it makes as dictionaries."""
    ours = vars(transfer(CASCADE | extra, role=role))
    return transfer({"connectors": [*beside, ours]}, "MultiConnector")


def tiering(**options: Any) -> dict[str, Any]:
    """vLLM's own tiering with our tier, and one of its own before it."""
    tiers = [{"type": "fs", "root_dir": "/nowhere"}, TIER | options]
    return {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}


def of_engine(extra: Any = None, **parts: Any) -> SimpleNamespace:
    """vLLM's `VllmConfig`: an object for each part."""
    model = {"use_mla": False, "is_encoder_decoder": False, **parts.pop("model", {})}
    return SimpleNamespace(
        kv_transfer_config=parts.pop("transfer", None) or transfer(extra or CASCADE),
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**{"world_size": 1} | parts.pop("parallel", {})),
        **parts,
    )


def of_args(extra: Any = None, **options: Any) -> SimpleNamespace:
    """vLLM's `EngineArgs`: all options in one object."""
    return SimpleNamespace(kv_transfer_config=transfer(extra or CASCADE), **options)


def start(vllm_config: Any) -> None:
    """Load the plugin where vLLM does, below a frame that has the configuration."""
    assert vllm_config is not None
    plugin.register()


def memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """Give the machine 1000 GiB of memory and 8 GPUs."""
    monkeypatch.setattr(Machine, "memory", lambda _: Memory(1000 * GIB, available))
    monkeypatch.setattr(Machine, "disk", lambda *_: Disk(1, 1000 * GIB, 900 * GIB))
    monkeypatch.setattr(Machine, "devices", lambda _: 8)


OFF = {
    "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
    "cache_config": SimpleNamespace(enable_prefix_caching=False),
}
POOLS = {"runner_type": "pooling", "is_prefix_caching_supported": False}
EXPERTS = {"enable_return_routed_experts": True}
AUX = SimpleNamespace(enabled=True)
LAUNCHED = {"distributed_executor_backend": "external_launcher"}
ON_TWO_HOSTS = {"nnodes_within_dp": 2, "master_addr": "10.0.0.1", "world_size": 16}


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (of_engine(model={"use_mla": True}, **OFF), "MLA"),
        (of_engine(tiering(path="/tmp/kv"), model={"use_mla": True}, **OFF), "MLA"),
        (of_engine(model=POOLS), "pooling model"),
        (of_engine(model={"is_encoder_decoder": True}), "encoder-decoder"),
        (of_engine(model=EXPERTS), "--enable-return-routed-experts"),
        (of_engine(aux_output_config=AUX), "--enable-return-routed-experts"),
        (of_args(**EXPERTS), "--enable-return-routed-experts"),
        (of_args(aux_output_config=AUX), "--enable-return-routed-experts"),
        (of_engine(parallel=LAUNCHED | {"world_size": 2}), '"external_launcher" starts an'),
        (of_args(**LAUNCHED, tensor_parallel_size=2), '"external_launcher" starts an'),
        (of_args(**LAUNCHED, data_parallel_size=2), '"external_launcher" starts an'),
        (of_engine(parallel=ON_TWO_HOSTS), "nnodes: .* they are on 2; use"),
        (of_engine(transfer=in_multi(tiers=[{"type": "cpu", "capacty": 1}])), "unknown key"),
        (of_engine(tiering(path="/tmp/kv", capcity="1GiB")), r"secondary_tiers\[1\]\.capcity"),
    ],
)
def test_an_engine_is_refused_before_its_model_is_loaded(engine: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        start(engine)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "engine",
    [
        of_engine(tiering(path="/tmp/kv")),
        of_engine(model={"use_mla": True}),
        of_engine(model=POOLS | {"is_prefix_caching_supported": True}),
        of_engine(parallel=LAUNCHED),
        of_engine(parallel=ON_TWO_HOSTS | {"master_addr": "127.0.0.1"}),
        of_engine(parallel={"nnodes": 2, "nnodes_within_dp": 1}),
        of_engine(transfer=in_multi()),
        of_engine(transfer=transfer({"connectors": 7}, "MultiConnector")),
        of_engine(tiering(module_path="of.another", capcity=1)),
        of_engine({"spec_name": "TieringOffloadingSpec", "secondary_tiers": "none"}),
        of_engine(transfer=transfer({}, role="kv_producer"), model=EXPERTS),
    ],
)
def test_what_would_pass_later_passes(engine: Any) -> None:
    start(engine)


@pytest.mark.parametrize("minor", [32, 33])
def test_another_connector_is_refused_up_to_0_32(
    minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, minor))
    for connectors in (in_multi(NIXL), transfer({"connectors": [vars(in_multi(NIXL))]}, "Multi")):
        connectors.kv_connector = "MultiConnector"
        if minor == 33:
            start(of_engine(transfer=connectors))
            continue
        with pytest.raises(ConfigError, match=r"MultiConnector .* install vLLM 0\.33"):
            start(of_engine(transfer=connectors))


def test_a_producer_is_refused_where_its_blocks_are_freed_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "vllm_version", lambda: (0, 33))
    whole = in_multi()
    whole.kv_role = "kv_producer"
    alone = transfer(CASCADE, role="kv_producer")
    producers = [alone, vars(alone), in_multi(role="kv_producer"), whole]
    monkeypatch.setattr(generation, "adapter", lambda: "v0_26")
    for each in producers:
        with pytest.raises(ConfigError, match='use "kv_both"'):
            start(of_engine(transfer=each))
    start(of_engine(transfer=in_multi(NIXL | {"kv_role": "kv_producer"})))
    monkeypatch.setattr(generation, "adapter", lambda: generation.SEED)
    for each in producers:
        start(of_engine(transfer=each))


def test_requests_are_not_recorded_where_they_are_not_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = of_engine(CASCADE | {"record": str(tmp_path / "record")})
    monkeypatch.setattr(generation, "adapter", lambda: "v0_26")
    start(engine)
    monkeypatch.setattr(generation, "adapter", lambda: "v0_16")
    with pytest.raises(ConfigError, match="record: vLLM 0.16 to 0.19 do not tell"):
        start(engine)


def test_all_mistakes_of_options_are_named_at_once() -> None:
    extra = CASCADE | {"tiers": [{"type": "cpu", "capacty": 1}]}
    with pytest.raises(ConfigError) as raised:
        start(of_engine(extra, parallel=ON_TWO_HOSTS))
    assert [line.split(":")[0] for line in str(raised.value).splitlines()][1:] == ["nnodes"]


DEFAULT = {"spec_name": "CascadeOffloadingSpec", "tiers": [{"type": "cpu"}]}
LARGE = CASCADE | {"tiers": [{"type": "cpu", "capacity": "200GiB"}]}


@pytest.mark.parametrize(
    "engine",
    [
        of_engine(DEFAULT, parallel={"world_size": 8}),
        of_args(DEFAULT, tensor_parallel_size=4, pipeline_parallel_size=2),
        of_args(DEFAULT, tensor_parallel_size=4, prefill_context_parallel_size=2),
    ],
)
def test_the_default_share_counts_all_ranks(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 400 * GIB)
    start(engine)
    memory(monkeypatch, 399 * GIB)
    with pytest.raises(ConfigError, match='= 400.0 GiB" is more memory than there is'):
        start(engine)


@pytest.mark.parametrize(
    "engine",
    [
        of_engine(LARGE, parallel={"data_parallel_size_local": 2}),
        of_engine(LARGE, parallel={"data_parallel_size_local": 2, "data_parallel_rank_local": 0}),
        of_args(LARGE, data_parallel_size=2),
        of_args(LARGE, data_parallel_size=8, data_parallel_size_local=2, nnodes=4),
    ],
)
def test_engines_that_start_together_need_memory_together(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 400 * GIB)
    start(engine)
    memory(monkeypatch, 399 * GIB)
    with pytest.raises(ConfigError, match=r"than there is \(399.0 GiB available for 2 engines\)"):
        start(engine)


@pytest.mark.parametrize(
    "engine",
    [
        of_engine(LARGE, parallel={"data_parallel_size_local": 2, "data_parallel_rank_local": 1}),
        of_engine(LARGE, parallel={"data_parallel_size_local": 0}),
        of_args(LARGE, data_parallel_size=2, data_parallel_backend="ray"),
        of_args(LARGE, data_parallel_size=2, data_parallel_rank=1),
        of_args(LARGE, data_parallel_size=2, data_parallel_external_lb=True),
        of_args(LARGE, data_parallel_size=2, nnodes=2),
    ],
    ids=["second", "no engine", "ray", "rank", "balanced", "hosts"],
)
def test_engines_elsewhere_need_no_memory_here(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 200 * GIB)
    start(engine)


NOWHERE = {"type": "nvme", "path": "/proc/kvcascade", "capacity": "1TiB"}
RAY = {"data_parallel_backend": "ray", "data_parallel_size": 2}


@pytest.mark.parametrize("backend", [{}, RAY])
def test_a_machine_that_only_answers_requests_needs_nothing_of_the_tiers(
    backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines run elsewhere, and each of them checks its own machine."""
    memory(monkeypatch, GIB)
    monkeypatch.setattr(type(platforms.current_platform), "device_type", "tpu")
    no_engine = backend or {"data_parallel_size_local": 0}
    tiers = [*LARGE["tiers"], NOWHERE]
    for extra in (CASCADE | {"tiers": tiers}, tiering(path="/proc/kvcascade", capacity="1TiB")):
        start(of_args(extra, **no_engine))
    for wrong in ({"type": "cpu", "capacty": 1}, {"type": "cpu", "policy": "no.such.policy"}):
        with pytest.raises(ConfigError):
            start(of_args(CASCADE | {"tiers": [wrong]}, **no_engine))


def test_an_engine_that_ray_started_checks_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are those of the head, which may run no engine."""
    memory(monkeypatch, GIB)
    for local in (0, 2):
        with pytest.raises(ConfigError, match="more memory"):
            start(of_engine(LARGE, parallel=RAY | {"data_parallel_size_local": local}))


def test_one_of_several_api_servers_leaves_the_checks_to_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM starts them beside the engines, which may have taken their memory already."""
    memory(monkeypatch, 100 * GIB)

    def serve(client_config: dict[str, Any] | None) -> None:
        assert client_config is None or client_config
        start(of_args(LARGE))

    serve({"client_count": 2, "client_index": 1})
    with pytest.raises(ConfigError, match="more memory"):
        serve(None)


class HalfMade:
    """A part of vLLM's configuration that cannot answer yet."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name} yet")


def test_what_is_not_known_yet_is_left_for_later() -> None:
    start(of_engine(parallel={"world_size": None, "nnodes_within_dp": "two"}))
    engine = of_engine()
    engine.model_config = engine.parallel_config = HalfMade()
    start(engine)


def make_args(monkeypatch: pytest.MonkeyPatch, model: Path, **options: Any) -> EngineArgs:
    """Make vLLM's own options in a process that has loaded no plugin yet."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=CASCADE,
        ),
        **options,
    )


def test_vllms_own_options_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        make_args(monkeypatch, tmp_path, enable_return_routed_experts=True)


def test_vllms_own_engine_is_refused_before_its_workers_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []
    args = make_args(monkeypatch, small_models.make_mla(tmp_path))
    config = args.create_engine_config()
    config.scheduler_config.enable_chunked_prefill = False  # as on a CPU without AMX
    config.cache_config.enable_prefix_caching = False
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    with pytest.raises(ConfigError, match="MLA"):
        EngineCore(config, made.append, log_stats=False)  # type: ignore[arg-type]
    assert not made
