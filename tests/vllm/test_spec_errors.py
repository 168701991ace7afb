"""Bad input ends in one sentence, before anything is changed, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from support.kv_bytes import Shape, tiers
from support.spec_driver import Driver

from kvcascade.errors import ConfigError, KVCascadeError

SHAPE = Shape()


class OneBackend:
    """Attention that vLLM may have chosen."""


class AnotherBackend:
    """As well."""


@pytest.fixture(autouse=True)
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses; nothing may be left in it."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not os.listdir(folder)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of the namespaces of a path; `.kvcascade*` has what the last writer noted."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.relative_to(path).parts[0].startswith(".kvcascade")
    }


def filled(path: Path, shared: Path) -> list[Any]:
    """Tier options whose NVMe path holds blocks."""
    options = tiers(SHAPE, path, cpu=8, nvme=32)
    options[0]["arena_dir"] = str(shared)
    with Driver(SHAPE, options) as driver:
        for text in range(3):
            driver.serve(f"text {text}", 4)
    return options


def refuse(options: list[Any], kind: type[KVCascadeError], *words: str, **more: Any) -> None:
    """Opening fails with one line that has these words in it."""
    with pytest.raises(kind) as failure:
        Driver(SHAPE, options, **more)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_second_engine_shares_the_namespace(shared: Path, tmp_path: Path) -> None:
    options = filled(tmp_path, shared)
    with Driver(SHAPE, options) as driver:
        with Driver(SHAPE, options) as other:
            assert other.serve("text 2", 4) == driver.serve("text 2", 4) == 4
        assert driver.serve("text 0", 4) == 4, "the first one goes on"
    with Driver(SHAPE, options) as driver:
        assert driver.serve("text 1", 4) == 4


@pytest.mark.parametrize("size", [0, 100, 4096, None], ids=["empty", "short", "torn", "noise"])
def test_a_damaged_index_is_refused_and_left_alone(
    shared: Path, tmp_path: Path, size: int | None
) -> None:
    options = filled(tmp_path, shared)
    (index,) = tmp_path.glob("*/blocks/data.mdb")
    whole = index.read_bytes()
    noise = bytes(byte ^ 0xA5 for byte in whole[:8192])
    index.write_bytes(noise + whole[8192:] if size is None else whole[:size])
    before = contents(tmp_path)
    refuse(options, ConfigError, str(index.parent.parent), "remove the directory")
    assert contents(tmp_path) == before
    index.write_bytes(whole)
    with Driver(SHAPE, options) as driver:
        assert driver.serve("text 2", 4) == 4


def test_an_unknown_format_version_is_refused_and_left_alone(shared: Path, tmp_path: Path) -> None:
    options = filled(tmp_path, shared)
    (description,) = tmp_path.glob("*/namespace.json")
    document = json.loads(description.read_text())
    document["format_version"] = 99
    description.write_text(json.dumps(document))
    before = contents(tmp_path)
    refuse(options, ConfigError, "99")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"no_such_key": 1}, ("no_such_key",)),
        ({"write_mode": "sometimes"}, ("write_mode", "sometimes")),
        ({"shutdown_flush_s": -1}, ("shutdown_flush_s", "-1")),
        ({"tiers": []}, ("tiers",)),
        ({"tiers": [{"type": "cpu", "capacity": "lots"}]}, ("tiers[0].capacity", "lots")),
        ({"tiers": [{"type": "cpu", "capacity": 0}]}, ("tiers[0].capacity", "0")),
        ({"tiers": [{"type": "cpu", "capacity": "1MiB", "policy": "x"}]}, ("policy", "x")),
        ({"cpu_bytes_to_use": 1 << 30}, ("cpu_bytes_to_use", "tiers[0].capacity")),
        ({"canonical_layout": True}, ("canonical_layout", "true")),
    ],
)
def test_a_bad_key_or_value_is_named(
    shared: Path, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    options = filled(tmp_path, shared)
    before = contents(tmp_path)
    given: dict[str, Any] = {"tiers": options, **change}
    tier_options = given.pop("tiers")
    refuse(tier_options, ConfigError, *words, **given)
    assert contents(tmp_path) == before


def test_more_memory_than_there_is() -> None:
    refuse([{"type": "cpu", "capacity": "900TiB"}], KVCascadeError, "/dev/shm")


def test_a_tier_that_holds_nothing(tmp_path: Path) -> None:
    options = tiers(SHAPE, tmp_path / "new", cpu=8, nvme=32)
    options[1]["capacity"] = 4096
    refuse(options, ConfigError, "capacity", "4096")
    options[0]["capacity"] = 100
    refuse(options, ConfigError, "100")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    refuse(tiers(SHAPE, file, cpu=8, nvme=32), KVCascadeError, str(file))
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (SHAPE, {"label": "other"}),
        (SHAPE, {"weights_id": "other"}),
        (Shape(pages=(2048, 2048)), {}),
        (Shape(pages=(3072, 1024)), {}),
        (Shape(pages=(1024, 1024), chunk=2), {}),
        (Shape(pages=(1024, 1024), world=2), {}),
        (Shape(pages=(1024, 3072), groups=((0,), (1,))), {}),
    ],
)
def test_other_facts_are_another_namespace(
    shape: Shape, change: dict[str, Any], shared: Path, tmp_path: Path
) -> None:
    """Equal hashes and equal sizes are not enough."""
    options = filled(tmp_path, shared)
    with Driver(shape, options, **change) as driver:
        assert driver.serve("text 2", 4) == 0


def engine_with(backend: type) -> Any:
    """vLLM's configuration, with the layers of the driver's model in it."""
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    layers = {f"layer.0.{tensor}": layer for tensor in range(len(SHAPE.pages))}
    return SimpleNamespace(
        model_config=SimpleNamespace(model="test/model"),
        cache_config=SimpleNamespace(),
        load_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def test_the_backend_that_workers_took_is_part_of_the_namespace(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user did not ask for one; vLLM chose by the machine."""
    for backend, found in ((OneBackend, 0), (OneBackend, 4), (AnotherBackend, 0)):
        config = engine_with(backend)
        monkeypatch.setattr(
            "kvcascade.vllm.engine_facts.engine_config", lambda config=config: config
        )
        options = tiers(SHAPE, tmp_path, cpu=8, nvme=32)
        options[0]["arena_dir"] = str(shared)
        with Driver(SHAPE, options) as driver:
            assert driver.serve("text", 4) == found
