"""The plugin finds the engine's configuration in the frames that load it, and checks it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.project import ROOT
from vllm import platforms

from kvcascade.errors import ConfigError
from kvcascade.identity import have_files_changed
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.vllm import plugin
from kvcascade.vllm.generation import adapter

GOOD = {"spec_name": "CascadeOffloadingSpec", "tiers": [{"type": "cpu", "capacity": "1MiB"}]}


def load_with(**given: Any) -> None:
    """A frame as vLLM's: the configuration is a local, the plugin is called below."""
    vllm_config = given.get("vllm_config")
    self = given.get("self")
    assert (vllm_config, self) is not None
    plugin.register()


def holder(extra: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_a_good_configuration_passes() -> None:
    load_with(vllm_config=holder(GOOD))
    load_with(self=SimpleNamespace(kv_transfer_config={"kv_connector_extra_config": GOOD}))


@pytest.mark.parametrize("name", ["vllm_config", "self"])
def test_a_bad_one_is_refused_before_anything_is_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.capacty.*unknown key"):
        load_with(**{name: holder({**GOOD, "tiers": [{"type": "cpu", "capacty": 1}]})})


def test_all_mistakes_are_named_at_once() -> None:
    extra = {**GOOD, "tiers": [{"type": "cpu", "capacty": 1}], "polcy": "lru"}
    with pytest.raises(ConfigError) as raised:
        load_with(vllm_config=holder(extra))
    for mistake in ("polcy", "tiers[0].capacty"):
        assert mistake in str(raised.value)


def test_what_does_not_fit_the_machine_is_refused_too(tmp_path: Path) -> None:
    tiers = [{"type": "cpu", "capacity": "900TiB"}]
    with pytest.raises(ConfigError, match="900TiB.*more memory than there is"):
        load_with(vllm_config=holder({**GOOD, "tiers": tiers}))


@pytest.mark.parametrize("kind", ["xpu", "tpu"])
def test_a_device_that_no_copier_reads_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(platforms.current_platform), "device_type", kind)
    with pytest.raises(ConfigError, match=f"runs on '{kind}'; leave kv_transfer_config out"):
        load_with(vllm_config=holder(GOOD))


@pytest.mark.parametrize("is_config", [False, True])
def test_files_that_are_replaced_from_then_on_are_noticed(is_config: bool, tmp_path: Path) -> None:
    """vLLM makes the spec after the weights are loaded: their files may be newer ones by then."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    engine = holder(GOOD)
    named = SimpleNamespace(model=str(tmp_path), model_weights="")
    engine.__dict__.update({"model_config": named} if is_config else named.__dict__)
    load_with(**{"vllm_config" if is_config else "self": engine})
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns))
    assert not have_files_changed(str(tmp_path)), "it was only read"
    weights.write_bytes(b"new")
    os.utime(weights, ns=(1, 1))
    load_with(self=engine)
    assert have_files_changed(str(tmp_path))


def test_a_model_is_noted_for_a_later_engine_if_the_first_has_no_connector(tmp_path: Path) -> None:
    """vLLM runs no plugin again in the processes that it forks."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    load_with(self=SimpleNamespace(kv_transfer_config=None, model=str(tmp_path)))
    assert not have_files_changed(str(tmp_path))
    weights.write_bytes(b"newer")
    assert have_files_changed(str(tmp_path))


@pytest.mark.parametrize(
    "part", ["whisper-large-v3/model.safetensors", "m-2-of-2.gguf", "mmproj.gguf"]
)
def test_other_files_of_the_model_that_are_replaced_are_noticed(part: str, tmp_path: Path) -> None:
    file, first = tmp_path / part, tmp_path / "m-1-of-2.gguf"
    file.parent.mkdir(exist_ok=True)
    for each in (file, first):
        each.write_bytes(b"old")
    engine = holder(GOOD)
    engine.model = str(first if part.endswith(".gguf") else tmp_path)
    load_with(self=engine)
    assert not have_files_changed(engine.model)
    file.write_bytes(b"newer")
    assert have_files_changed(engine.model)


@pytest.mark.parametrize("place", ["file", "override", "hf_config", "draft", "draft_config"])
def test_other_models_whose_files_are_replaced_are_noticed(place: str, tmp_path: Path) -> None:
    """Models that the configuration names for a part of the weights, and the one that drafts."""
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"old")
    named, engine = {"text_model_id": str(other)}, holder(GOOD)
    config = SimpleNamespace(model=str(model), revision="v1")
    if place == "file":
        (model / "config.json").write_text(json.dumps(named))
    elif place == "override":
        config.hf_overrides = named
    elif place == "hf_config":
        config.hf_config = SimpleNamespace(**named)
    elif place == "draft":
        engine.speculative_config = {"model": str(other), "num_speculative_tokens": 1}
    else:
        draft = SimpleNamespace(model=str(other), revision=None)
        engine.speculative_config = SimpleNamespace(draft_model_config=draft)
    engine.model_config = config
    load_with(vllm_config=engine)
    assert not have_files_changed(str(other))
    (other / "model.safetensors").write_bytes(b"newer")
    assert have_files_changed(str(other))
    assert not have_files_changed(str(model), "v1")


FORKED = """
import os, sys
from pathlib import Path
from kvcascade.identity import have_files_changed, note_files
weights = Path(sys.argv[1], "model.safetensors")
weights.write_bytes(b"old")
note_files(sys.argv[1])
weights.write_bytes(b"newer")
print(have_files_changed(sys.argv[1]), flush=True)
if os.fork() == 0:
    print(have_files_changed(sys.argv[1]), flush=True)
    weights.write_bytes(b"newest")
    print(have_files_changed(sys.argv[1]), flush=True)
    os._exit(0)
os.wait()
"""


def test_an_engine_that_is_forked_begins_with_the_files_of_then(tmp_path: Path) -> None:
    """A second engine of one process: vLLM runs plugins only for the first one. It loads what was
    saved between the two, and a replacement during its own start is noticed."""
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "False", "True"]


def two_commits(hub: Path, file: str) -> Path:
    """Make a model with two commits that have this file. Return the reference to the first."""
    model = hub / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / file).write_text("{}")
    (model / "refs").mkdir()
    main = model / "refs" / "main"
    main.write_text("a" * 40)
    return main


def test_a_name_of_the_hub_that_leads_to_another_commit_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may fetch a newer commit while this one loads the weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    main = two_commits(tmp_path, "config.json")
    engine = holder(GOOD)
    engine.model_config = SimpleNamespace(model="org/name", revision=None)
    load_with(vllm_config=engine)
    assert not have_files_changed("org/name")
    main.write_text("b" * 40)
    assert have_files_changed("org/name")
    assert not have_files_changed("org/another"), "without a copy, nothing can be told"


@pytest.mark.parametrize("is_config", [False, True])
def test_weights_in_a_download_directory_are_noticed_too(is_config: bool, tmp_path: Path) -> None:
    main = two_commits(tmp_path, "model.safetensors")
    engine, place = holder(GOOD), str(tmp_path)
    named = SimpleNamespace(model="org/name", revision=None)
    load = SimpleNamespace(download_dir=place)
    if is_config:
        engine.model_config, engine.load_config = named, load
    else:
        engine.__dict__.update(named.__dict__ | load.__dict__)
    load_with(**{"vllm_config" if is_config else "self": engine})
    assert not have_files_changed("org/name", None, place)
    main.write_text("b" * 40)
    assert have_files_changed("org/name", None, place)


def test_memory_of_a_killed_engine_counts_as_free(tmp_path: Path) -> None:
    """Else it could hold up every later start: nothing else removes it before the check."""
    geometry = ArenaGeometry(slots=2, rank_bytes=4096, world_size=1)
    with Arena.open(geometry, "dead", ArenaRole.worker(0), arena_dir=str(tmp_path)) as arena:
        left, content = Path(arena.path), Path(arena.path).read_bytes()
    left.write_bytes(content)
    left.chmod(0o600)
    tier = {"type": "cpu", "capacity": "1MiB", "arena_dir": str(tmp_path)}
    load_with(vllm_config=holder({**GOOD, "tiers": [tier]}))
    assert not left.exists()


@pytest.mark.parametrize("tiers", ["cpu", [7], [{"type": "cpu", "arena_dir": 7}], None])
def test_tiers_that_are_none_are_bad_configuration(tiers: object) -> None:
    with pytest.raises(ConfigError):
        load_with(vllm_config=holder({**GOOD, "tiers": tiers}))


def test_configurations_of_other_specs_are_left_alone() -> None:
    load_with(vllm_config=holder({"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1}))
    load_with(vllm_config=SimpleNamespace(kv_transfer_config=None))


FORKED_LATER = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from kvcascade.identity import have_files_changed
from kvcascade.vllm import plugin
weights = Path(sys.argv[1], "model.safetensors")
weights.write_bytes(b"old")
def load(self):
    plugin.register()
transfer = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={})
load(SimpleNamespace(model=sys.argv[1], kv_transfer_config=transfer))
if os.fork() == 0:
    print(have_files_changed(sys.argv[1]), flush=True)
    weights.write_bytes(b"newer")
    print(have_files_changed(sys.argv[1]), flush=True)
    os._exit(0)
os.wait()
"""


def test_files_are_noted_for_an_engine_that_follows_one_without_us(tmp_path: Path) -> None:
    """vLLM runs plugins only for the first engine of a process. The second one is forked."""
    command = [sys.executable, "-c", FORKED_LATER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    # Some versions of vLLM log to the standard output.
    assert done.stdout.split()[-2:] == ["False", "True"]


@pytest.mark.parametrize("extra", [{}, {"connectors": [7]}, GOOD])
@pytest.mark.parametrize("error", [ValueError, NotADirectoryError, RuntimeError])
def test_nothing_that_a_look_at_the_files_raises_stops_a_start(
    extra: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*model: str | None) -> None:
        asked.append(model)
        raise error

    asked: list[tuple[str | None, ...]] = []
    monkeypatch.setattr(plugin, "note_files", fail)
    engine = holder(extra)
    engine.model = "org/name"
    load_with(self=engine)
    assert asked == [("org/name", None, None)]


def test_an_object_that_asks_itself_for_ever_does_no_harm() -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    load_with(self=Wrapper())


def look_below(calls: int) -> Any:
    """Look for a configuration that the frame above holds, from so many calls below it."""
    if calls > 1:
        return look_below(calls - 1)
    engine = plugin._find_engine(inspect.currentframe())
    return engine.kv_transfer_config.kv_connector_extra_config if engine is not None else {}


def held_above(calls: int) -> Any:
    """What is found of a configuration so many calls up."""
    vllm_config = holder(GOOD)
    assert vllm_config is not None
    return look_below(calls)


def test_it_looks_no_further_than_its_limit() -> None:
    assert held_above(plugin.MAX_FRAMES - 1) == GOOD
    assert held_above(plugin.MAX_FRAMES) == {}
    assert held_above(plugin.MAX_FRAMES + 1) == {}


def test_vllm_finds_the_plugin_of_the_installed_package() -> None:
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["kvcascade"] is plugin.register


def test_the_spec_can_be_named_without_its_module() -> None:
    """In every generation; the class comes from the adapter of the installed vLLM."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    plugin.register()
    plugin.register()
    found = OffloadingSpecFactory._registry["CascadeOffloadingSpec"]()
    assert found.__module__ == f"kvcascade.vllm.{adapter()}"
