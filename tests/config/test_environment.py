"""Options from environment variables, and the list of tiers that `path` stands for."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvcascade.assembly.named import checked_tier, configured
from kvcascade.config.environment import (
    OF_VLLM,
    PREFIX,
    TOP,
    misspelt,
    of_tier,
    texts,
    with_environment,
)
from kvcascade.config.machine import Machine
from kvcascade.config.schema import CascadeConfig, WriteMode, parse
from kvcascade.config.sizes import Bytes, DeviceShare, FreeShare
from kvcascade.errors import ConfigError


def read(given: dict[str, Any], **variables: str) -> CascadeConfig:
    named = {f"{PREFIX}{name.upper()}": value for name, value in variables.items()}
    return parse(with_environment(given, named)[0])


def test_a_path_is_a_complete_configuration() -> None:
    config = parse({"spec_name": "CascadeOffloadingSpec", "path": "/mnt/nvme/kv"})
    assert config == parse({"tiers": [{"type": "cpu"}, {"type": "nvme", "path": "/mnt/nvme/kv"}]})
    assert config.cpu.capacity == DeviceShare(Fraction(4, 10))
    assert config.nvme[0].capacity == FreeShare(Fraction(8, 10))


def test_path_and_tiers_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^path: .* beside tiers"):
        parse({"path": "/mnt/nvme/kv", "tiers": [{"type": "cpu"}]})
    noted: list[str] = []
    parse({"path": "/mnt/nvme/kv", "tiers": [{"type": "cpu"}]}, noted=noted)
    assert len(noted) == 1, "the key is known"


def test_the_environment_alone_configures_an_engine() -> None:
    config = read(
        {}, path="/mnt/nvme/kv", cpu_capacity="8GiB", nvme_policy="sieve", write_mode="through"
    )
    assert config.cpu.capacity == Bytes(8 * 2**30)
    assert config.nvme[0].policy == "sieve" and config.write_mode is WriteMode.THROUGH


def test_values_are_json_where_they_can_be() -> None:
    config = read(
        {"path": "/mnt/0"}, cpu_prefault="false", dirty_age_s="2.5", nvme_path='["/mnt/1"]'
    )
    assert config.cpu.prefault is False and config.dirty_age_s == 2.5
    assert [str(path) for path in config.nvme[0].path] == ["/mnt/0"], "the configuration wins"


@pytest.mark.parametrize("value", ["2024", "20250131", "1e3", "true", "null", "[1]", '"2024"'])
def test_values_of_text_options_are_text(value: str) -> None:
    config = read({"path": "/mnt/0"}, label=value, weights_id=value)
    assert config.label == config.weights_id == value.strip('"')
    remote = {"type": "remote", "url": "s3://bucket/prefix"}
    config = read({"tiers": [{"type": "cpu"}, remote]}, remote_region=value)
    assert config.remote is not None and config.remote.region == value.strip('"')


def test_text_options_are_those_that_hold_text_only() -> None:
    assert {"KVCASCADE_LABEL", "KVCASCADE_NVME_POLICY", "KVCASCADE_REMOTE_URL"} <= texts()
    assert texts().isdisjoint({"KVCASCADE_PATH", "KVCASCADE_RECORD", "KVCASCADE_WRITE_MODE"})


def test_the_configuration_has_precedence() -> None:
    given = {"tiers": [{"type": "cpu", "capacity": "1GiB"}], "label": "mine"}
    config = read(given, cpu_capacity="8GiB", cpu_policy="arc", label="other", path="/mnt/0")
    assert config.cpu.capacity == Bytes(2**30) and config.cpu.policy == "arc"
    assert config.label == "mine" and not config.nvme


def test_only_the_first_tier_of_a_type_is_completed() -> None:
    disks = [{"type": "nvme", "path": "/mnt/0"}, {"type": "nvme", "path": "/mnt/1"}]
    config = read({"tiers": [{"type": "cpu"}, *disks]}, nvme_capacity="9GiB")
    assert config.nvme[0].capacity == Bytes(9 * 2**30)
    assert config.nvme[1].capacity == FreeShare(Fraction(8, 10))


def test_what_is_no_list_of_tiers_is_reported_as_given() -> None:
    with pytest.raises(ConfigError, match=r"^tiers: \"/mnt\" is not a list of tiers"):
        read({"tiers": "/mnt"}, cpu_capacity="8GiB")
    with pytest.raises(ConfigError, match=r"^tiers is missing"):
        read({}, cpu_capacity="8GiB")


def test_every_option_has_a_variable_of_its_own() -> None:
    assert TOP.keys().isdisjoint(of_tier())
    assert {"KVCASCADE_PATH", "KVCASCADE_TIERS", "KVCASCADE_ON_RESET"} <= TOP.keys()
    assert {"KVCASCADE_CPU_CAPACITY", "KVCASCADE_NVME_PATH"} <= of_tier().keys()


def test_misspelt_variables_are_named_and_those_of_others_are_not() -> None:
    variables = ["KVCASCADE_CPU_CAPACTY", "KVCASCADE_SERVICE_HOST", "KVCASCADE_PORT", "HOME"]
    (said,) = misspelt([*variables, "KVCASCADE_PATH"])
    assert "KVCASCADE_CPU_CAPACTY" in said and "KVCASCADE_CPU_CAPACITY" in said


def test_variables_of_keys_that_vllm_reads_are_named() -> None:
    (said,) = misspelt(["KVCASCADE_BLOCK_SIZE", "KVCASCADE_LABEL"])
    assert "KVCASCADE_BLOCK_SIZE has no effect" in said and "kv_connector_extra_config" in said
    assert OF_VLLM.keys().isdisjoint((*TOP, *of_tier()))


def test_variables_of_a_tier_that_is_not_in_the_list_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables = {"KVCASCADE_REMOTE_URL": "s3://bucket", "KVCASCADE_NVME_IO_THREADS": "2"}
    configured({"path": "/mnt/nvme/kv"}, environment=variables)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "KVCASCADE_REMOTE_URL" in said and "'remote'" in said


def test_a_tier_with_a_problem_is_not_called_missing(caplog: pytest.LogCaptureFixture) -> None:
    problems: list[str] = []
    tiers = [{"type": "cpu"}, {"type": "nvme"}]
    configured({"tiers": tiers}, problems, environment={"KVCASCADE_NVME_POLICY": "arc"})
    assert len(problems) == 1 and not caplog.records


@pytest.mark.parametrize(
    ("given", "variable", "value", "key"),
    [
        ({"path": "/mnt"}, "WRITE_MODE", "thru", "write_mode"),
        ({"path": "/mnt"}, "CPU_CAPACITY", "lots", "tiers[0].capacity"),
        ({"path": "/mnt"}, "NVME_POLICY", "lru2", "tiers[1].policy"),
        ({}, "PATH", "relative", "tiers[1].path"),
        ({}, "TIERS", '[{"type": "cpu", "capacit": 1}]', "tiers[0].capacit"),
    ],
)
def test_a_problem_names_the_variable(
    given: dict[str, object], variable: str, value: str, key: str
) -> None:
    problems: list[str] = []
    environment = {f"{PREFIX}{variable}": value}
    with pytest.raises(ConfigError) as caught:
        configured(given, None, environment)
    configured(given, problems, environment)
    for problem in (str(caught.value), problems[0]):
        assert problem.startswith(key), problem
        assert problem.endswith(f" (from the environment variable {PREFIX}{variable}).")


def test_a_problem_of_the_configuration_names_no_variable() -> None:
    environment = {"KVCASCADE_WRITE_MODE": "back", "KVCASCADE_LABEL": "mine"}
    with pytest.raises(ConfigError, match=r"^write_mode: [^(]*\.$"):
        configured({"path": "/mnt", "write_mode": 3}, None, environment)


def test_an_option_of_a_tier_names_its_own_variable() -> None:
    environment = {"KVCASCADE_TIERS": '[{"type": "cpu"}]', "KVCASCADE_CPU_CAPACITY": "lots"}
    with pytest.raises(ConfigError, match="environment variable KVCASCADE_CPU_CAPACITY"):
        configured({}, None, environment)


def test_a_tier_inside_vllms_tiering_is_completed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    names = ("LABEL", "NVME_ADMISSION", "NVME_POLICY", "CPU_CAPACITY", "WRITE_MODE", "NVME_POLCY")
    values = ("blue", "second_touch", "arc", "1GiB", "back", "lru")
    environment = {f"{PREFIX}{name}": value for name, value in zip(names, values, strict=True)}
    given = {"path": str(tmp_path), "capacity": "64MiB", "policy": "sieve"}
    config = checked_tier(given, Machine(), environment=environment)
    (tier,) = config.nvme
    assert (config.label, tier.admission, tier.policy) == ("blue", "second_touch", "sieve")
    said = "; ".join(record.getMessage() for record in caplog.records)
    for name in names:
        assert (f"variable {PREFIX}{name} " in said) == (name not in names[:3])


def test_a_problem_of_that_tier_names_the_variable(tmp_path: Path) -> None:
    environment = {"KVCASCADE_NVME_CAPACITY": "lots"}
    with pytest.raises(ConfigError) as caught:
        checked_tier({"path": str(tmp_path)}, Machine(), "here", environment=environment)
    assert str(caught.value).startswith("here.capacity")
    assert "KVCASCADE_NVME_CAPACITY" in str(caught.value)
