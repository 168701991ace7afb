"""Equal weights are recognised, different ones told apart, without reading them whole."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcascade.identity import (
    _PARTS_OF_MODELS,
    code_identity,
    have_files_changed,
    is_shareable,
    note_files,
    prefers_mistral_files,
    weights_identity,
)
from kvcascade.weight_digest import (
    SAMPLE_BYTES,
    SAMPLES_PER_TENSOR,
    _offsets,
    _safetensors_header,
    _samples,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_SHAPE = b'{"embed": {"data_offsets": [0, 9], "shape": []}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    write_weights(folder, seed=0)
    return folder


def write_weights(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {f"layer{i}": rng.standard_normal((64, 64), dtype=np.float32) for i in range(8)}
    save_file(tensors, folder / "model.safetensors")


def identity(folder: Path) -> str:
    return weights_identity(str(folder), None, is_real=True)


def test_ordinary_weights_keep_their_identity(tmp_path: Path) -> None:
    """Another value here means that the caches of all models in safetensors begin anew."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    places = {"model.embed_tokens.weight": ([4, 64], 0, 1024), "norm": ([64], 1024, 1280)}
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
            for name, (shape, start, end) in places.items()
        }
    ).encode()
    data = bytes(range(256)) * 5
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    golden = "1a365b930dffb68517ae10ba0e32097dabe90adcc01ca1abd2c54377ef2cd0f6"
    assert identity(tmp_path) == f"files:{golden}"


def test_a_copy_elsewhere_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert identity(copy) == identity(model)
    assert is_shareable(identity(model))


def test_other_values_of_the_same_shapes_are_another_model(model: Path) -> None:
    before = identity(model)
    size = (model / "model.safetensors").stat().st_size
    write_weights(model, seed=1)
    assert (model / "model.safetensors").stat().st_size == size
    assert identity(model) != before


@pytest.mark.parametrize("layer", range(8))
def test_one_changed_tensor_is_noticed(model: Path, layer: int) -> None:
    before = identity(model)
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    start, end = header[f"layer{layer}"]["data_offsets"]
    data = 8 + header_bytes
    raw[data + start : data + end] = bytes(255 - b for b in raw[data + start : data + end])
    path.write_bytes(raw)
    assert identity(model) != before


@pytest.mark.parametrize("width", [16, 64, 500])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight"])
def test_a_few_words_that_were_trained_are_noticed(name: str, width: int, model: Path) -> None:
    table = np.random.default_rng(0).standard_normal((1000, width), dtype=np.float32)
    save_file({name: table}, model / "model.safetensors")
    before = identity(model)
    for row in (0, 1, 500, 998, 999):
        changed = table.copy()
        changed[row] += 1
        save_file({name: changed}, model / "model.safetensors")
        assert identity(model) != before, row


@pytest.mark.parametrize(
    ("name", "shape", "places"),
    [
        ("vision.class_embedding", (1, 1, 1024), [(0, 0, 200)]),
        ("embeddings.token_type_embeddings.weight", (2, 4096), [(1, 1000)]),
        ("vit.pos_embed", (1, 577, 1024), [(0, 1), (0, 100), (0, 576)]),
        ("embed.position_table", (2, 300, 64), [(0, 1), (1, 150)]),
        ("embed_tokens.weight_scale", (100_000,), [(1,), (50_001,), (99_998,)]),
    ],
)
def test_other_embeddings_that_changed_in_part_are_noticed(
    name: str, shape: tuple[int, ...], places: list[tuple[int, ...]], model: Path
) -> None:
    """A row of a table of positions, and any number of a small embedding."""
    table = np.zeros(shape, np.float32)
    save_file({name: table}, model / "model.safetensors")
    before = identity(model)
    for place in places:
        changed = table.copy()
        changed[place] = 1
        save_file({name: changed}, model / "model.safetensors")
        assert identity(model) != before, place


def test_dense_models_of_text_and_images_keep_their_identity(tmp_path: Path) -> None:
    """They have neither experts nor convolutions but that of an embedding."""
    (tmp_path / "config.json").write_text('{"hidden_size": 512}')
    shapes = {
        "model.embed_tokens.weight": (100, 512),
        "model.layers.0.input_layernorm.weight": (2048,),
        "model.layers.0.mlp.gate_proj.weight": (64, 512),
        "vision_model.embeddings.patch_embedding.weight": (64, 3, 14, 14),
    }
    tensors = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    golden = "786ca0f43b831461dd8c4811ff31ed46de1ab392fde727947f4bc49f2a8e594b"
    assert identity(tmp_path) == f"files:{golden}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.gate_up_proj", (32, 64, 64)),
        ("mlp.w1", (32, 64, 64)),
        ("mlp.experts.gate_up_proj_bias", (32, 1000)),
        ("mlp.gate.weight", (32, 1000)),
        ("mlp.router.weight", (1024, 32)),
    ],
)
def test_one_retrained_expert_is_noticed(name: str, shape: tuple[int, ...], model: Path) -> None:
    """Of fused experts, each one has a slice of one tensor."""
    numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    save_file({name: numbers}, model / "model.safetensors")
    before = identity(model)
    for expert in range(shape[0]):
        if shape[0] > 100 and expert % 97:
            continue
        changed = numbers.copy()
        changed[expert] += 1
        save_file({name: changed}, model / "model.safetensors")
        assert identity(model) != before, expert


@pytest.mark.parametrize("beside", ["nothing", "experts", "a file of experts"])
@pytest.mark.parametrize("n", [10, 256, 384, 16_000])
def test_each_number_of_a_router_is_noticed(n: int, beside: str, model: Path) -> None:
    """And of any other small tensor, in each model: a name need not say that it is a router."""
    experts = {"mlp.experts.0.w1": np.ones((64, 64), np.float32)}
    numbers = np.zeros(n, np.float32)
    if beside == "a file of experts":
        save_file(experts, model / "experts.safetensors")

    def with_numbers(changed: np.ndarray) -> str:
        tensors = {"mlp.correction": changed, **(experts if beside == "experts" else {})}
        save_file(tensors, model / "model.safetensors")
        return identity(model)

    before = with_numbers(numbers)
    for place in {*range(min(n, 40)), *range(0, n, n // 7), n - 1}:
        changed = numbers.copy()
        changed[place] = 5
        assert with_numbers(changed) != before, place


def test_a_model_of_many_experts_is_not_read_whole(model: Path) -> None:
    """Each expert that is a tensor of its own has three samples, and so have shared experts."""
    names = ("mlp.experts.7.up.weight", "mlp.shared_experts.up.weight", "self_attn.q_proj.weight")
    tensors = {name: np.zeros((200, 100), np.float32) for name in names}
    save_file(tensors, model / "model.safetensors")
    path = model / "model.safetensors"
    with path.open("rb") as file:
        _, found = _safetensors_header(file, path.stat().st_size)
    assert found is not None
    assert len([*_offsets(found, path.stat().st_size)]) == 3 * SAMPLES_PER_TENSOR


def test_a_changed_configuration_is_another_model(model: Path) -> None:
    before = identity(model)
    (model / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 1e6}))
    assert identity(model) != before


def test_other_prompts_are_the_same_model(model: Path) -> None:
    """Keys of blocks cover their tokens, however these were made.

    `test_fingerprint.py` has the option of a generation config that does change blocks."""
    before = identity(model)
    for name in ("tokenizer_config.json", "chat_template.json", "generation_config.json"):
        (model / name).write_text('{"changed": 1}')
    assert identity(model) == before
    (model / "preprocessor_config.json").write_text("{}")
    assert identity(model) != before, "a medium that is treated otherwise is another one"


def test_changed_code_is_another_model(model: Path) -> None:
    """What a folder brings along may be what computes its blocks (`trust_remote_code`)."""
    (model / "modeling_own.py").write_text("SCALE = 1.0")
    before = identity(model)
    (model / "modeling_own.py").write_text("SCALE = 2.0")
    assert identity(model) != before


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, struct.pack("<Q", 1 << 62), struct.pack("<Q", 4) + b"[1]]", b"short"]
    + [struct.pack("<Q", len(NO_SHAPE)) + NO_SHAPE],
)
def test_a_hostile_header_is_sampled_like_any_file(model: Path, header: bytes) -> None:
    (model / "model.safetensors").write_bytes(header + b"x" * 1000)
    before = identity(model)
    (model / "model.safetensors").write_bytes(header + b"y" * 1000)
    assert identity(model) != before


def test_other_weight_formats_are_sampled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bytes(range(256)) * 4000)
    before = identity(model)
    (model / "pytorch_model.bin").write_bytes(bytes(range(255, -1, -1)) * 4000)
    assert identity(model) != before


def test_one_changed_record_of_a_torch_file_is_noticed(model: Path) -> None:
    """A norm between large tensors, where no sample of the whole file falls."""
    (model / "model.safetensors").unlink()

    def with_norm(value: int) -> str:
        with ZipFile(model / "pytorch_model.bin", "w") as file:
            for number in range(100):
                norm = number == 3
                data = bytes([value] * 64) if norm else bytes(20_001)
                file.writestr(ZipInfo(f"model/data/{number}"), data)
        return identity(model)

    assert with_norm(1) != with_norm(2)
    assert with_norm(1) == with_norm(1)


def gguf(norm: float, word: float, scale: float, version: int = 3, expert: int = -1) -> bytes:
    """A file with an embedding of 1000 words and a norm between two large tensors.

    `expert`: the one of 16 fused experts that is not zero."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = [text("general.words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")]
    counts = [text("general.counts") + struct.pack("<IIQ", 9, 4, 3) + bytes(12)]
    lists = [text("general.lists") + struct.pack("<IIQIQ", 9, 9, 1, 0, 5) + bytes(5)]
    numbers = [text("general.alignment") + struct.pack("<II", 4, 64)]
    numbers += [text("rope.scale") + struct.pack("<If", 6, scale)]
    options = words + counts + lists + numbers
    embedding = np.zeros((1000, 128), dtype=np.float32)
    embedding[500] = word
    large = np.zeros((1000, 512), dtype=np.float32)
    experts = np.zeros((16, 64, 64), dtype=np.float32)
    if expert >= 0:
        experts[expert] = 1
    tensors = {
        "blk.0.ffn_up_exps.weight": experts,
        "blk.0.ffn_up.weight": large,
        "blk.0.norm.weight": np.full((16,), norm, dtype=np.float32),
        "blk.1.ffn_up.weight": large,
        "token_embd.weight": embedding,
    }
    table, data = b"", b""
    for name, tensor in tensors.items():
        shape = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        table += text(name) + shape + struct.pack("<IQ", 0, len(data))
        data += tensor.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(options))
    head += b"".join(options) + table
    return head + bytes(-len(head) % 64) + data


@pytest.mark.parametrize("version", [2, 3])
def test_every_tensor_of_a_gguf_file_counts(version: int, tmp_path: Path) -> None:
    path, found = tmp_path / "model.gguf", []
    for values in [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]:
        path.write_bytes(gguf(*values, version))
        found.append(identity(path))
    assert len(set(found)) == 4 and found[0] == found[1]


def test_one_retrained_expert_of_a_gguf_file_is_noticed(tmp_path: Path) -> None:
    path, found = tmp_path / "model.gguf", set()
    for expert in range(-1, 16):
        path.write_bytes(gguf(1, 1, 1, expert=expert))
        found.add(identity(path))
    assert len(found) == 17


@pytest.mark.parametrize("length", [0, 3, 24, 40, 120, 350, 500])
def test_a_gguf_file_without_an_end_is_sampled_like_any_file(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = gguf(1, 1, 1)
    path.write_bytes(whole[:length] + b"\xff" * 500)
    before = identity(path)
    path.write_bytes(whole[:length] + b"\xff" * 499 + b"\xfe")
    assert identity(path) != before
    nested = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(8)
    path.write_bytes(nested + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)
    assert is_shareable(identity(path))


@pytest.mark.parametrize("name", ["m-00002-of-00002.gguf", "mmproj-f16.gguf", "m-mmproj.gguf"])
def test_files_that_vllm_loads_with_a_gguf_file_count(name: str, tmp_path: Path) -> None:
    """The other parts of a model in parts, and what encodes media."""
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(gguf(1, 1, 1))
    (tmp_path / name).write_bytes(gguf(1, 1, 1))
    before = identity(first)
    (tmp_path / name).write_bytes(gguf(2, 1, 1))
    assert identity(first) != before
    before = identity(first)
    for other in ("other-00002-of-00002.gguf", "m-00002-of-00003.gguf", "m-q8.gguf"):
        (tmp_path / other).write_bytes(gguf(3, 1, 1))
    assert identity(first) == before, "files of other models"


def test_a_gguf_file_in_a_folder_that_cannot_be_listed_is_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another part may be there, and another one the next time."""

    def refuse(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(gguf(1, 1, 1))
    assert is_shareable(identity(first))
    for lister in ("listdir", "scandir"):
        monkeypatch.setattr(os, lister, refuse)
    assert not is_shareable(identity(first))


def test_weights_in_a_subfolder_count(model: Path) -> None:
    """Kimi-Audio has its encoder there, with a configuration of its own."""
    alone, found = identity(model), set()
    encoder = model / "whisper-large-v3"
    encoder.mkdir()
    (encoder / "config.json").write_text("{}")
    assert identity(model) == alone, "no weights"
    for seed, config in ((0, "{}"), (1, "{}"), (1, '{"d_model": 64}')):
        write_weights(encoder, seed)
        (encoder / "config.json").write_text(config)
        found.add(identity(model))
    assert len(found | {alone}) == 4


@pytest.mark.parametrize("name", ["original", "checkpoint-500", "epoch_3", ".cache"])
def test_subfolders_of_which_vllm_loads_nothing_do_not_count(name: str, model: Path) -> None:
    """A training may write into them while the model is served."""
    before = identity(model)
    note_files(str(model))
    (model / name).mkdir()
    write_weights(model / name, seed=1)
    (model / name / "optimizer.pt").symlink_to("gone")
    assert identity(model) == before and not have_files_changed(str(model))


def test_weights_in_a_subfolder_alone_are_never_shared(model: Path) -> None:
    (model / "whisper-large-v3").mkdir()
    (model / "model.safetensors").rename(model / "whisper-large-v3" / "model.safetensors")
    assert not is_shareable(identity(model))


def code_of(reference: object, folder: Path, revision: str | None = None) -> str | None:
    """The identity of the code that a configuration with this reference names."""
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": reference}}))
    return code_identity(str(folder), None, revision)


def test_code_of_another_repository_counts_by_its_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    other = tmp_path / "models--org--code"
    texts = {"a" * 40: "SCALE = 1", "b" * 40: "SCALE = 2", "c" * 40: "SCALE = 1"}
    for commit, text in texts.items():
        (other / "snapshots" / commit).mkdir(parents=True)
        (other / "snapshots" / commit / "modeling_own.py").write_text(text)
    (other / "refs").mkdir()
    found = []
    for commit in texts:
        (other / "refs" / "main").write_text(commit)
        found.append(code_of("org/code--modeling_own.Model", model))
    assert found[0] == found[2] != found[1], "a commit without a change of the code is no new code"
    assert code_of("org/code--modeling_own.Model", model, "a" * 40) == found[0]
    (model / "config.json").write_text("{}")
    (model / "preprocessor_config.json").write_text(
        '{"auto_map": {"AutoImageProcessor": [null, "org/code--modeling_own.Images"]}}'
    )
    assert code_identity(str(model), None, None) == found[2], "code for media"


def test_code_that_was_not_run_counts_for_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has most models itself, and then nobody fetches their code."""
    assert code_of("org/code--modeling_own.Model", model) is None
    assert code_of("modeling_own.Model", model) is None, "it is one of the model's files"
    assert code_of({"odd": 1}, model) is None
    monkeypatch.setenv("TRANSFORMERS_CACHE", str(model))
    word = code_of("org/code--modeling_own.Model", model)
    assert word is not None and not is_shareable(word), "nobody looks there"
    (model / "config.json").write_text("[]")
    assert code_identity(str(model), None, None) is None


def test_code_of_another_folder_counts(model: Path, tmp_path: Path) -> None:
    found = set()
    for text in ("SCALE = 1", "SCALE = 2"):
        (tmp_path / "modeling_own.py").write_text(text)
        found.add(code_of(f"{tmp_path}--modeling_own.Model", model))
    assert len(found) == 2 and None not in found


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_a_hub_snapshot_is_named_by_its_commit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the name of its model: offline, vLLM replaces that by the folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert identity(snapshot) == f"hub:models--org--name@{COMMIT}"
    (snapshot / name).write_text("{}")
    assert weights_identity("org/name", COMMIT, is_real=True) == identity(snapshot)


def test_a_download_directory_is_asked_instead_of_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM downloads weights there, and the configuration to the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    cached, loaded = "a" * 40, "b" * 40
    hub, own = (tmp_path / name / "models--org--name" for name in ("hub", "own"))
    for folder, commit, file in ((hub, cached, "config.json"), (own, loaded, "model.safetensors")):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / file).write_text("{}")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    assert weights_identity("org/name", None, is_real=True).endswith(cached)
    for revision in (None, "main", loaded):
        for place in (str(tmp_path / "own"), "~/own"):
            found = weights_identity("org/name", revision, True, place)
            assert found == f"hub:models--org--name@{loaded}"
    for revision in (cached, "a-branch", "../../hub"):
        assert not is_shareable(weights_identity("org/name", revision, True, place))
    (own / "snapshots" / loaded / "model.safetensors").unlink()
    assert not is_shareable(weights_identity("org/name", None, True, place)), "nothing is there"


def test_a_folder_that_only_looks_like_a_snapshot_is_read(model: Path, tmp_path: Path) -> None:
    """Of training, say, which writes new weights into it."""
    snapshot = tmp_path / "run 7" / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    assert identity(snapshot) == identity(model)


def test_weights_in_memory_are_never_shared(model: Path) -> None:
    first = weights_identity(str(model), None, is_real=False)
    assert not is_shareable(first)
    assert first != weights_identity(str(model), None, is_real=False)


def test_a_hub_name_without_a_local_copy_is_never_shared() -> None:
    assert not is_shareable(weights_identity("nobody/has-this-model", None, is_real=True))
    assert not is_shareable(weights_identity("not a/valid/name", None, is_real=True))


UNREAD = ("gone.safetensors", "pytorch_model.bin", "m-Q4.gguf", "trainer_state.json", "mod.py")


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_cannot_be_read_makes_a_model_private(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a part of the weights, so it must neither be left out nor stop the engine."""
    said: list[str] = []
    warning = "kvcascade.identity._log.warning"
    monkeypatch.setattr(warning, lambda text, *about: said.append(text % about))
    (model / name).symlink_to(model / "nowhere")
    assert not is_shareable(identity(model))
    assert len(said) == 1 and name in said[0]


@pytest.mark.parametrize("name", UNREAD)
def test_a_folder_with_the_name_of_a_file_does_not_count(name: str, model: Path) -> None:
    before = identity(model)
    (model / name).mkdir()
    assert identity(model) == before
    (model / "model.safetensors").unlink()
    assert not is_shareable(identity(model)), "it is no weights"


def test_code_that_cannot_be_read_is_never_shared(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is code of a hub's cache that cannot be searched: it may have been run."""
    (tmp_path / "modeling_own.py").symlink_to("nowhere")
    found = [code_of(f"{tmp_path}--modeling_own.Model", model)]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    unsearchable_cache(tmp_path, "org/code")
    found.append(code_of("org/code--modeling_own.Model", model))
    assert all(word is not None and not is_shareable(word) for word in found)


def test_a_folder_with_the_name_of_a_configuration_does_not_count(model: Path) -> None:
    (model / "video_preprocessor_config.json").mkdir()
    assert code_identity(str(model), None, None) is None


def unsearchable_cache(hub: Path, model: str) -> None:
    """Make a cache in which the folder of a model's commits is no folder."""
    cached = hub / f"models--{model.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    (cached / "snapshots").touch()


def test_a_cache_that_cannot_be_searched_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "org/unsearchable"  # no other test notes its files
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    unsearchable_cache(tmp_path, model)
    note_files(model)
    assert not have_files_changed(model)
    assert not is_shareable(weights_identity(model, None, is_real=True))
    assert prefers_mistral_files(model, None, None), "the load format tells them apart"


def test_a_download_directory_below_an_unknown_home_stops_no_start() -> None:
    place = "~nobody-of-this-name/models"
    note_files("org/name", None, place)
    assert not is_shareable(weights_identity("org/name", None, True, place))


def test_a_name_that_is_no_text_is_part_of_the_identity(model: Path) -> None:
    before = identity(model)
    for name in (b"\xff.json", b"\xfe.json"):
        path = os.fsencode(model) + b"/" + name
        with open(path, "wb") as file:
            file.write(b"{}")
        assert identity(model) != before
        before = identity(model)


def test_weights_in_files_that_are_not_known_are_never_shared(tmp_path: Path) -> None:
    """Their configuration vouches for nothing: other weights have the same."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.tensors").write_bytes(bytes(1000))
    assert not is_shareable(identity(tmp_path))


@pytest.mark.parametrize("stride", [0, 100, 20_000, 32 << 10, 40 << 10, 5 << 20])
def test_samples_that_are_read_together_are_those_of_their_places(
    tmp_path: Path, stride: int
) -> None:
    whole = np.arange(3 << 20, dtype=np.uint32).tobytes()
    (tmp_path / "file").write_bytes(whole)
    places = [7 + stride * number for number in range(700)]
    with (tmp_path / "file").open("rb") as file:
        found = [*_samples(file.fileno(), places)]
    assert found == [whole[at : at + SAMPLE_BYTES] for at in places]


def test_a_folder_that_cannot_be_read_stops_no_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls this for every engine with a KV connector, and catches nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    note_files(str(model))
    assert not have_files_changed(str(model))
    assert not is_shareable(identity(model)), "weights may lie there"


def test_no_other_model_is_loaded_from_a_subfolder() -> None:
    """A subfolder that is new here must be looked at: the identity may miss its weights."""
    vllm = pytest.importorskip("vllm")
    found = set()
    for path in Path(vllm.__path__[0], "model_executor", "models").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Loader.Source"):
                found |= {each.value for each in call.keywords if each.arg == "subfolder"}
    named = {ast.literal_eval(each) for each in found}
    assert named - {None} <= set(_PARTS_OF_MODELS)
