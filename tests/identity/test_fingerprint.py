"""Fields of the fingerprint from the engine's configuration: each one alone tells apart."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from support.kv_bytes import Shape, offloading_config

from kvcascade.config.schema import parse
from kvcascade.identity import note_files
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.vllm import engine_facts
from kvcascade.vllm.generation import vllm_version


class Stub:
    """An object with these fields; what is not there is not there."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class AnyField:
    """An object whose every field is 1."""

    def __getattr__(self, name: str) -> int:
        return 1


class HfConfig:
    """A model's own configuration."""

    def __init__(self, **fields: Any) -> None:
        self._fields = {"hidden_size": 64, "_name_or_path": "here", **fields}

    def to_dict(self) -> dict[str, Any]:
        """As transformers gives it."""
        return dict(self._fields)


def engine(hf: dict[str, Any] | None = None, **model: Any) -> Any:
    """What of an engine's configuration is looked at."""
    fields = {
        "quantization": None,
        "dtype": "torch.float16",
        "hf_overrides": {},
        "model": "",
        **model,
    }
    cache = Stub(cache_dtype="auto", prefix_caching_hash_algo="sha256")
    return Stub(
        model_config=Stub(hf_config=HfConfig(**(hf or {})), **fields),
        cache_config=cache,
        attention_config=Stub(backend=None),
        load_config=Stub(load_format="auto"),
    )


def fingerprint(config: Any) -> str:
    return NamespaceKey("label", engine_facts.model_facts(config)).fingerprint


BASE = engine()
CHANGED: dict[str, Any] = {
    "quantisation": engine(quantization="fp8"),
    "quantisation while loading": engine(quantization_config={"linear": "fp8_per_block"}),
    "quantisation in the checkpoint": engine(hf={"quantization_config": {"bits": 4}}),
    "dtype": engine(dtype="torch.bfloat16"),
    "overrides": engine(hf_overrides={"rope_theta": 1e6}),
    "configuration": engine(hf={"rope_theta": 1e6}),
    "no sliding window": engine(disable_sliding_window=True),
    "another implementation": engine(model_impl="transformers"),
    "other code": engine(code_revision="v2"),
    "longest prompt": engine(max_model_len=8192),
    "size of images": engine(multimodal_config=Stub(mm_processor_kwargs={"max_pixels": 4096})),
    "frames of videos": engine(multimodal_config=Stub(media_io_kwargs={"video": {"fps": 1}})),
    "tokens of videos": engine(multimodal_config=Stub(video_pruning_rate=0.5)),
}


def test_an_ordinary_engine_keeps_its_fingerprint() -> None:
    """Another value here means that every cache begins anew. A fact that few models need is added
    only where it is set."""
    golden = "c4d16cd1d8d7a63ccb31596c8b54f9cac736ebff35f36459fe01f3ceae432d4c"
    assert fingerprint(BASE) == golden


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_model_is_another_namespace(name: str) -> None:
    assert fingerprint(CHANGED[name]) != fingerprint(BASE)
    assert fingerprint(engine()) == fingerprint(BASE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_dtype", "fp8"),
        ("prefix_caching_hash_algo", "xxhash"),
        ("mamba_cache_dtype", "float32"),
        ("mamba_ssm_cache_dtype", "bfloat16"),
        ("mamba_cache_mode", "all"),
        ("mamba_block_size", 512),
        ("kv_cache_dtype_skip_layers", ["0"]),
    ],
)
def test_a_changed_cache_is_another_namespace(field: str, value: str) -> None:
    config = engine()
    setattr(config.cache_config, field, value)
    assert fingerprint(config) != fingerprint(BASE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "FLASHINFER"),
        ("backend_per_kind", {"sliding_window": "TRITON_ATTN"}),
        ("indexer_kv_dtype", "fp8"),
    ],
)
def test_another_attention_backend_is_another_namespace(field: str, value: Any) -> None:
    config = engine()
    setattr(config.attention_config, field, value)
    assert fingerprint(config) != fingerprint(BASE)


KERNELS = [
    ("kernel_config", "moe_backend", "auto", ["marlin", "flashinfer_trtllm"]),
    ("kernel_config", "linear_backend", "auto", ["marlin", "flashinfer_cutlass"]),
    ("kernel_config", "linear_backend_per_quant", None, [{"nvfp4_w4a16": "humming"}, {"fp8": "b"}]),
    ("attention_config", "use_prefill_query_quantization", False, [True]),
    ("attention_config", "disable_flashinfer_q_quantization", False, [True]),
]


@pytest.mark.parametrize(("part", "name", "default", "others"), KERNELS)
def test_a_kernel_that_quantises_otherwise_is_another_namespace(
    part: str, name: str, default: Any, others: list[Any]
) -> None:
    """By default it is vLLM's choice, as with a version that lacks the option."""
    config, found = engine(), {fingerprint(BASE)}
    setattr(config, part, Stub(backend=None, **{name: default}))
    assert fingerprint(config) in found
    for value in others:
        setattr(config, part, Stub(backend=None, **{name: value}))
        found.add(fingerprint(config))
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize(("part", "name", "default", "others"), KERNELS)
def test_vllm_has_the_default_that_is_left_out(
    part: str, name: str, default: Any, others: list[Any]
) -> None:
    """Another one would begin every cache anew."""
    kind = {"kernel_config": "KernelConfig", "attention_config": "AttentionConfig"}[part]
    made = getattr(pytest.importorskip("vllm.config"), kind)()
    if vllm_version() >= (0, 33):  # older ones lack some of these options
        assert hasattr(made, name), "it has another name now"
    assert getattr(made, name, default) == default
    assert default not in others


def test_a_function_that_overrides_is_the_same_at_the_next_start() -> None:
    """`hf_overrides` may be one; each process has it at another address."""

    def made_anew(theta: float) -> Any:
        def override(config: Any) -> Any:
            config.rope_theta = theta
            return config

        return override

    first, second = made_anew(1e4), made_anew(1e4)
    assert fingerprint(engine(hf_overrides=first)) == fingerprint(engine(hf_overrides=second))
    assert fingerprint(engine(hf_overrides=first)) != fingerprint(BASE)


def test_another_order_of_a_state_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(engine())
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert fingerprint(engine()) != before


@pytest.mark.parametrize("name", ["cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"])
def test_tokens_that_lie_on_other_ranks_are_another_namespace(name: str) -> None:
    config = engine()
    config.parallel_config = Stub(**{name: 8})
    assert fingerprint(config) != fingerprint(BASE)


def test_a_length_that_vllm_made_fit_the_memory_is_no_part_of_it() -> None:
    fitted = [engine(max_model_len=n, original_max_model_len=-1) for n in (8192, 8176)]
    assert fingerprint(fitted[0]) == fingerprint(fitted[1]) != fingerprint(BASE)


@pytest.mark.parametrize("name", ["canonical_layout", "replicated_layout"])
def test_rows_in_another_order_are_another_namespace(name: str) -> None:
    modern = pytest.importorskip("kvcascade.vllm.v0_26")
    config = offloading_config(Shape(pages=(1024,)), {}, "engine", 0)
    if not hasattr(config, name):
        pytest.skip("this vLLM arranges rows in one way")
    changed: dict[str, Any] = {name: not getattr(config, name)}
    other = replace(config, **changed)
    assert modern.shape_facts(other, None) != modern.shape_facts(config, None)


def test_another_layout_is_another_namespace() -> None:
    """The order of heads and tokens in a page, which changes no size."""
    modern = pytest.importorskip("kvcascade.vllm.v0_26")
    config = offloading_config(Shape(pages=(1024,)), {}, "engine", 0)
    if not hasattr(config, "kv_cache_layout"):
        pytest.skip("this vLLM has it from the workers: see test_layers.py")
    facts = [
        modern.shape_facts(replace(config, kv_cache_layout=layout), None)
        for layout in ("LBHNC", "LBNHC", "BLHNC", None)
    ]
    assert len({NamespaceKey("label", each).fingerprint for each in facts}) == 4


def test_a_layout_that_only_the_user_says_is_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 0.28 the offloading configuration has none."""
    modern = pytest.importorskip("kvcascade.vllm.v0_26")
    any_field = AnyField()
    config = Stub(
        model=any_field,
        cache=any_field,
        parallel=any_field,
        worker_kv_bytes_per_block=1024,
        groups=[],
    )
    facts = [modern.shape_facts(config, None)]
    for layout in ("NHD", "HND"):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        facts.append(modern.shape_facts(config, None))
    assert [each["layout"] for each in facts] == ["None", "NHD", "HND"]


def test_queries_that_a_generation_config_scales_are_another_namespace() -> None:
    """Llama 4 takes it from the model's file, and from `--override-generation-config`."""

    def with_file(file: dict[str, Any], override: dict[str, Any]) -> str:
        return fingerprint(
            engine(
                try_get_generation_config=lambda: dict(file), override_generation_config=override
            )
        )

    option = "attn_temperature_tuning"
    assert with_file({"top_p": 0.9}, {"temperature": 0.6}) == fingerprint(BASE)
    on, off = with_file({option: True}, {}), with_file({option: False}, {})
    assert len({fingerprint(BASE), on, off}) == 3
    assert with_file({}, {option: True}) == with_file({option: False}, {option: True}) == on


@pytest.mark.parametrize("name", ["quantization_config_file", "mm_encoder_fp8_scale_path"])
def test_a_named_file_counts_by_its_content(name: str, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    options: dict[str, Any] = {"hf_overrides": {name: str(file)}}
    if name.startswith("mm_"):
        options = {"multimodal_config": Stub(**{name: str(file)})}
    found = set()
    for text in ('{"scale": 1}', '{"scale": 2}', '{"scale": 1}'):
        file.write_text(text)
        found.add(fingerprint(engine(**options)))
    assert len(found) == 2


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
        "VLLM_MARLIN_INPUT_DTYPE",
        "VLLM_DEEPEPLL_NVFP4_DISPATCH",
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_ROCM_USE_AITER_MOE_SITUV2",
        "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
        "VLLM_B12X_MOE_FP4_FORCE_A16",
    ],
)
def test_numbers_that_only_the_environment_names_are_another_namespace(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "numbers.json"
    file.write_text("fp8")
    found = {fingerprint(BASE)}
    for value in ("int8", '{"bits": 8}' * 1000, str(file)):
        monkeypatch.setenv(name, value)
        found.add(fingerprint(engine()))
    monkeypatch.setenv(name, "fp8")
    assert fingerprint(engine()) in found, "whether as it is or in a file"
    monkeypatch.setenv(name, "")
    assert fingerprint(engine()) == fingerprint(BASE)
    assert len(found) == 4


def test_scales_that_are_not_rounded_are_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM rounds them by default, and may say so in the environment."""
    ordinary = fingerprint(BASE)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    assert fingerprint(BASE) == ordinary
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    assert fingerprint(BASE) != ordinary


def test_no_other_model_reads_its_generation_config() -> None:
    """A model of vLLM that takes something from it must be looked at: it may change blocks."""
    vllm = pytest.importorskip("vllm")
    found = {
        path.stem
        for folder in ("model_executor", "models")
        for path in Path(vllm.__path__[0], folder).rglob("*.py")
        if "try_get_generation_config" in path.read_text()
    }
    of_answers = {"gemma4_mm", "gemma4_mtp", "gemma4_unified", "diffusion_gemma"}
    assert found - of_answers <= {"llama4"}


def test_weights_elsewhere_are_not_those_of_the_local_folder() -> None:
    config = engine(model="/local", model_weights="s3://bucket/llama", revision=None)
    config.load_config = Stub(load_format="runai_streamer")
    assert engine_facts.weights_facts(config) == ("s3://bucket/llama", None, True, None)


@pytest.mark.parametrize("name", ["tensorizer", "ipc_cache", "modelexpress", "dummy", "a-plugin"])
def test_files_vouch_for_no_weights_that_come_from_elsewhere(name: str) -> None:
    config = engine(model="/local", revision=None)
    config.load_config = Stub(load_format=name)
    assert engine_facts.weights_facts(config) == ("/local", None, False, None)


def test_every_format_of_vllm_that_reads_the_model_is_known() -> None:
    """One that is new and not named keeps nothing for the next start: to be looked at."""
    loaders = pytest.importorskip("vllm.model_executor.model_loader")
    elsewhere = {"tensorizer", "ipc_cache", "modelexpress", "dummy"}
    for name in set(get_args(loaders.LoadFormats)) - elsewhere:
        config = engine(model="/local", revision=None)
        config.load_config = Stub(load_format=name)
        assert engine_facts.weights_facts(config)[2], name


def test_a_name_on_modelscope_is_none_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's cache may hold another model's weights, or other weights, under that name."""
    config = engine(model="org/llama", revision=None)
    config.load_config = Stub(load_format="auto")
    assert engine_facts.weights_facts(config)[2]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert not engine_facts.weights_facts(config)[2]
    config.model_config.model = str(tmp_path)
    assert engine_facts.weights_facts(config)[2], "a folder is what it is"


def test_what_the_loader_is_told_is_part_of_it() -> None:
    config = engine()
    config.load_config = Stub(model_loader_extra_config={"tensorizer_uri": "s3://bucket/llama"})
    assert fingerprint(config) != fingerprint(BASE)
    for speed in ({"enable_multithread_load": True, "num_threads": 8}, {"concurrency": 16}):
        config.load_config = Stub(model_loader_extra_config=speed)
        assert fingerprint(config) == fingerprint(BASE), "the same weights, read faster"


def test_a_model_that_drafts_has_an_identity_of_its_own() -> None:
    config = engine(model="/models/llama", revision=None)
    assert engine_facts.draft_facts(config) is None
    config.speculative_config = Stub(draft_model_config=config.model_config)
    assert engine_facts.draft_facts(config) is None, "the model drafts for itself"
    config.speculative_config = Stub(draft_model_config=Stub(model="/models/eagle", revision=None))
    assert engine_facts.draft_facts(config) == ("/models/eagle", None, True, None)


def test_a_model_that_drafts_may_be_loaded_in_another_way() -> None:
    config = engine(model="org/llama", revision=None)
    config.load_config = Stub(load_format="auto", download_dir="/models")
    draft, dummy = Stub(model="org/eagle", revision=None), Stub(load_format="dummy")
    config.speculative_config = Stub(draft_model_config=draft, draft_load_config=None)
    assert engine_facts.draft_facts(config) == ("org/eagle", None, True, "/models")
    config.speculative_config = Stub(draft_model_config=draft, draft_load_config=dummy)
    assert engine_facts.draft_facts(config) == ("org/eagle", None, False, None)
    assert engine_facts.weights_facts(config) == ("org/llama", None, True, "/models")


def test_a_model_that_the_configuration_names_has_an_identity_of_its_own() -> None:
    """vLLM loads it at no revision: the one of the model is of another repository."""
    config = engine({"text_model_id": "org/llama", "audio_model_id": None}, revision="v1")
    assert engine_facts.other_weights_facts(config) == {
        "text_model_id": ("org/llama", None, True, None)
    }
    config.load_config = Stub(load_format="dummy", download_dir="/models")
    assert engine_facts.other_weights_facts(config) == {
        "text_model_id": ("org/llama", None, False, "/models")
    }
    assert engine_facts.other_weights_facts(engine()) == {}


def test_no_model_loads_weights_from_elsewhere_unseen() -> None:
    """A place that is new here must be looked at: the identity may miss its weights."""
    vllm = pytest.importorskip("vllm")
    found = set()
    for folder in ("model_executor", "models"):
        for path in Path(vllm.__path__[0], folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Loader.Source"):
                    place = [each.value for each in call.keywords if each.arg == "model_or_path"]
                    found.add(ast.unparse((place or call.args)[0]))
    own = {"model_config.model", "vllm_config.model_config.model", "self.model_config.model"}
    assert found, "they are made in another way now"
    assert found - own <= {"config.audio_model_id", "config.text_model_id"}


def test_where_the_model_lies_is_no_part_of_it() -> None:
    assert fingerprint(engine(hf={"_name_or_path": "elsewhere"})) == fingerprint(BASE)


def with_media(cache_gb: float, **cache: Any) -> Any:
    """An engine for images."""
    config = engine(multimodal_config=Stub(mm_processor_cache_gb=cache_gb))
    config.cache_config.__dict__.update(cache)
    return config


def test_media_that_are_counted_and_not_hashed_are_never_shared() -> None:
    """Then vLLM's identifier of the first image is that of the first image after a restart."""
    counted = with_media(0, enable_prefix_caching=False)
    assert list(engine_facts.reasons_not_to_share(counted)) == ["media_hashes"]
    assert not engine_facts.reasons_not_to_share(with_media(0, enable_prefix_caching=True))
    assert not engine_facts.reasons_not_to_share(with_media(4, enable_prefix_caching=False))
    assert not engine_facts.reasons_not_to_share(engine())


def test_adapters_whose_files_nobody_looks_at_are_never_shared() -> None:
    config = engine()
    assert not engine_facts.reasons_not_to_share(config)
    config.lora_config = Stub(max_loras=1)
    assert list(engine_facts.reasons_not_to_share(config)) == ["adapters"]


def test_weights_that_a_trainer_may_replace_are_never_shared() -> None:
    config = engine()
    config.weight_transfer_config = None
    assert not engine_facts.reasons_not_to_share(config)
    config.weight_transfer_config = Stub(backend="nccl")
    assert list(engine_facts.reasons_not_to_share(config)) == ["transferred_weights"]


def test_tokens_that_are_sent_to_random_experts_are_never_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")
    assert not engine_facts.reasons_not_to_share(engine())
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    assert list(engine_facts.reasons_not_to_share(engine())) == ["simulated_routing"]


def test_scales_that_each_process_finds_are_never_shared() -> None:
    config = engine()
    config.cache_config.calculate_kv_scales = True
    assert list(engine_facts.reasons_not_to_share(config)) == ["scales"]


class TestNamespaceFacts:
    """What the reasons, and the absence of a configuration, do to a namespace."""

    @pytest.fixture(autouse=True)
    def local_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(bytes(1000))
        self.model = str(tmp_path)

    def facts(self, config: Any, **settings: Any) -> dict[str, str]:
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}], **settings})
        if config is not None:
            config.model_config.__dict__.update(model=self.model, revision=None)
            config.load_config = Stub(load_format="auto")
        found: dict[str, str] = common.namespace_facts(given, config, self.model, {})
        return found

    def is_shared(self, config: Any, **settings: Any) -> bool:
        return self.facts(config, **settings) == self.facts(config, **settings)

    def test_what_cannot_be_told_apart_is_this_process_alone(self) -> None:
        assert self.is_shared(engine())
        assert not self.is_shared(with_media(0, enable_prefix_caching=False))
        assert not self.is_shared(with_media(0, enable_prefix_caching=False), weights_id="mine")
        config = engine()
        config.lora_config = Stub(max_loras=1)
        assert not self.is_shared(config)
        assert self.is_shared(config, weights_id="base and adapters of May"), "the user answers"
        config.weight_transfer_config = Stub(backend="nccl")
        assert not self.is_shared(config, weights_id="mine"), "it is given before they change"

    def test_files_that_were_replaced_since_the_start_vouch_for_nothing(self) -> None:
        note_files(self.model)
        assert self.is_shared(engine())
        (Path(self.model) / "model.safetensors").write_bytes(b"x" * 999)
        assert not self.is_shared(engine())
        assert not self.is_shared(engine(), weights_id="mine"), "which ones were loaded is unknown"

    def with_format(self, name: str, **settings: Any) -> dict[str, str]:
        """The facts with this load format."""
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        config = engine(model=self.model, revision=None)
        config.load_config = Stub(load_format=name)
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}], **settings})
        found: dict[str, str] = common.namespace_facts(given, config, self.model, {})
        return found

    @pytest.mark.parametrize("name", ["pt", "mistral", "sharded_state", "runai_streamer_sharded"])
    def test_a_load_format_that_reads_other_files_is_another_namespace(self, name: str) -> None:
        """New safetensors, say, beside the old `.bin` files."""
        usual = self.with_format("auto")
        assert self.with_format(name) == {**usual, "load_format": name}
        assert self.with_format(name, weights_id="mine") == self.with_format(
            "auto", weights_id="mine"
        )

    def test_load_formats_that_read_the_same_files_share(self) -> None:
        usual = self.with_format("auto")
        same = ("hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
        assert all(self.with_format(name) == usual for name in same)
        (Path(self.model) / "consolidated.safetensors").write_bytes(bytes(1000))
        assert "load_format" not in self.with_format("auto"), "it prefers these"
        assert all(self.with_format(name)["load_format"] == name for name in same)

    def test_a_draft_model_may_have_a_load_format_of_its_own(self) -> None:
        config = engine(model=self.model, revision=None)
        draft, load = Stub(model="org/eagle", revision=None), Stub(load_format="pt")
        config.speculative_config = Stub(draft_model_config=draft, draft_load_config=load)
        assert engine_facts.format_facts(config) == {"draft_load_format": "pt"}

    def test_a_copy_of_the_weights_that_is_never_made_anew_is_never_shared(self) -> None:
        """vLLM's `npcache` loads what is in the folder np, and does not look whether it is old."""
        config = engine()
        config.load_config = Stub(load_format="npcache")
        assert list(engine_facts.reasons_not_to_share(config)) == ["npcache"]

    def test_weights_of_a_model_that_the_configuration_names_count(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("llama")
        found = []
        for value in (1, 2):
            (other / "model.safetensors").write_bytes(bytes([value]) * 1000)
            found.append(self.facts(engine({"text_model_id": str(other)})))
        differing = {name for name in found[0] if found[0][name] != found[1][name]}
        assert differing == {"text_model_id"}
        assert not self.is_shared(engine({"text_model_id": "nobody/has-this-model"}))

    def test_weights_of_a_named_model_that_are_replaced_are_noticed(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("whisper")
        (other / "model.safetensors").write_bytes(bytes(1000))
        named = {"audio_model_id": str(other)}
        (Path(self.model) / "config.json").write_text(json.dumps(named))
        note_files(self.model)
        assert self.is_shared(engine(named))
        (other / "model.safetensors").write_bytes(bytes(999))
        assert not self.is_shared(engine(named))

    def test_code_of_another_repository_counts_if_it_is_trusted(self, tmp_path: Path) -> None:
        named = {"auto_map": {"AutoModel": f"{tmp_path}--modeling_own.Model"}}
        (tmp_path / "modeling_own.py").write_text("SCALE = 1")
        (Path(self.model) / "config.json").write_text(json.dumps(named))
        assert "remote_code" not in self.facts(engine())
        trusting: dict[str, Any] = {"trust_remote_code": True}
        assert self.facts(engine(**trusting))["remote_code"].startswith("files:")
        assert "remote_code" not in self.facts(engine(**trusting), weights_id="mine")

    def test_a_file_that_cannot_be_read_shares_nothing_and_the_log_has_the_remedy(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        (Path(self.model) / "pytorch_model.bin").symlink_to("nowhere")
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        facts = self.facts(engine())
        assert not self.is_shared(engine()) and self.is_shared(engine(), weights_id="mine")
        caplog.clear()
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}]})
        common.warn_of_privacy(given, engine(), facts, self.model)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "set weights_id" in caplog.text

    def test_weights_in_a_download_directory_are_those_of_the_namespace(
        self, tmp_path: Path
    ) -> None:
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        for name, commit in (("llama", "a" * 40), ("eagle", "b" * 40)):
            snapshot = tmp_path / f"models--org--{name}" / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / "model.safetensors").write_text("{}")
        config = engine(model="org/llama", revision="a" * 40)
        config.load_config = Stub(load_format="auto", download_dir=str(tmp_path))
        draft = Stub(model="org/eagle", revision="b" * 40)
        config.speculative_config = Stub(draft_model_config=draft)
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}]})
        found = common.namespace_facts(given, config, "org/llama", {})
        assert found["weights"] == f"hub:models--org--llama@{'a' * 40}"
        assert found["draft_weights"] == f"hub:models--org--eagle@{'b' * 40}"

    def test_without_the_engines_configuration_nothing_is_shared(self) -> None:
        assert not self.is_shared(None)
        assert self.is_shared(None, weights_id="mine")

    @pytest.mark.parametrize(
        ("version", "fact"),
        [
            *((release, "0.33") for release in ("0.33.0", "0.33.2+cpu", "0.33.1.post1")),
            *((other, other) for other in ("0.33.0rc1", "0.33.1.dev7+g1a2b3c", "0.33.0rc2.dev5")),
            ("0.1.0+g1a2b3c", "0.1.0+g1a2b3c"),
            ("v0.33.0", "0.33"),
        ],
    )
    def test_only_releases_of_one_minor_version_share(
        self, version: str, fact: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pages may have another layout in the next development build."""
        pytest.importorskip("vllm")
        monkeypatch.setattr("vllm.__version__", version)
        assert self.facts(engine())["vllm"] == fact

    @pytest.mark.parametrize("version", ["dev", ""])
    def test_a_build_whose_version_has_no_number_shares_nothing(
        self, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Any build from source may have it. `weights_id` vouches for the build, too."""
        pytest.importorskip("vllm")
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        assert self.is_shared(engine())
        monkeypatch.setattr("vllm.__version__", version)
        facts = self.facts(engine())
        assert not self.is_shared(engine()) and self.is_shared(engine(), weights_id="mine")
        assert not self.is_shared(None) and self.is_shared(None, weights_id="mine")
        mine, other = (self.facts(engine(), weights_id=word)["vllm"] for word in ("mine", "other"))
        assert mine != other
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}]})
        caplog.clear()
        common.warn_of_privacy(given, engine(), facts, self.model)
        lines = [each.getMessage() for each in caplog.records if "weights_id" in each.getMessage()]
        assert len(lines) == 1 and "vLLM" in lines[0]

    def test_one_line_for_each_reason(self, caplog: pytest.LogCaptureFixture) -> None:
        common = pytest.importorskip("kvcascade.vllm.scheduler_side")
        config = with_media(0, enable_prefix_caching=False)
        config.cache_config.calculate_kv_scales = True
        given = parse({"tiers": [{"type": "cpu", "capacity": "1GiB"}]})
        facts = self.facts(config)
        caplog.clear()
        common.warn_of_privacy(given, config, facts, self.model)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "processor cache" in caplog.text and "calculate_kv_scales" in caplog.text
