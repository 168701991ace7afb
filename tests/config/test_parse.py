"""Every wrong configuration is one sentence that names key, value and remedy; a right one is typed.

Parsing is pure, so nothing on disk can change; `test_machine.py` shows that for the machine checks.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.schema import (
    VLLM_KEYS,
    AdmissionMode,
    CascadeConfig,
    Durability,
    Movers,
    OnReset,
    WriteMode,
    parse,
)
from kvcascade.config.sizes import Blocks, Bytes, DriveWrites, Share
from kvcascade.errors import ConfigError, ErrorKind
from kvcascade.tiers.policies import known_names

GOOD: dict[str, Any] = {
    "spec_name": "CascadeOffloadingSpec",
    "spec_module_path": "kvcascade.spec",
    "tiers": [
        {"type": "cpu", "capacity": "64GiB"},
        {"type": "nvme", "capacity": "2TiB", "path": "/mnt/nvme/kv"},
    ],
}
GONE = object()


def changed(key: str, value: object) -> dict[str, Any]:
    """`GOOD` with one option set, or removed by `GONE`; "cpu." and "nvme." name the tiers."""
    config = copy.deepcopy(GOOD)
    place = config
    if key.startswith(("cpu.", "nvme.")):
        tier, key = key.split(".")
        place = config["tiers"][("cpu", "nvme").index(tier)]
    if value is GONE:
        del place[key]
    else:
        place[key] = value
    return config


def message(config: Any, **options: Any) -> str:
    """The one sentence that refuses a configuration."""
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError) as caught:
        parse(config, **{"policies": known_names(), **options})
    assert config == before
    assert caught.value.kind is ErrorKind.CONFIG
    text = str(caught.value)
    assert text.endswith(".") and ". " not in text and "\n" not in text, f"one sentence: {text}"
    assert ";" in text, f"a remedy follows the problem: {text}"
    return text


def full_key(key: str) -> str:
    return key.replace("cpu.", "tiers[0].").replace("nvme.", "tiers[1].")


def test_defaults() -> None:
    config = parse(GOOD)
    assert config.cpu is config.tiers[0] and config.nvme == config.tiers[1:]
    assert config.cpu.key == "tiers[0]" and config.nvme[0].key == "tiers[1]"
    assert config.cpu.capacity == Bytes(64 * 2**30)
    assert config.cpu.arena_dir == Path("/dev/shm") and config.cpu.prefault
    assert config.cpu.low_watermark == Share(Fraction(40, 100))
    assert config.cpu.high_watermark == Share(Fraction(50, 100))
    nvme = config.nvme[0]
    assert nvme.capacity == Bytes(2 * 2**40) and nvme.path == (Path("/mnt/nvme/kv"),)
    assert (nvme.policy, config.cpu.policy) == ("lru", "lru")
    assert (nvme.durability, nvme.admission) == (Durability.PROCESS, AdmissionMode.ALL)
    assert (nvme.write_budget, nvme.io_threads) == (None, 3)
    assert nvme.min_free == Share(Fraction(5, 100))
    assert (nvme.direct_io, nvme.segment_size) == (True, None)
    assert nvme.min_share is None
    assert nvme.movers is Movers.PROCESS
    assert (config.write_mode, config.on_reset) == (None, OnReset.INVALIDATE)
    assert (config.dirty_age_s, config.shutdown_flush_s) == (5.0, None)
    assert (config.promotion_deadline_s, config.label) == (10.0, "")
    assert config.promotion_budget is None
    assert config.weights_id is None
    assert (config.load_or_recompute, config.prefill_tokens_per_s, config.record) == (
        True,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("write_mode", "back", WriteMode.BACK),
        ("on_reset", "keep", OnReset.KEEP),
        ("dirty_age_s", 0, 0.0),
        ("shutdown_flush_s", 1.5, 1.5),
        ("promotion_budget", 32, Blocks(32)),
        ("load_or_recompute", False, False),
        ("prefill_tokens_per_s", 12_000, 12_000.0),
        ("prefill_tokens_per_s", None, None),
        ("record", "/var/log/kv", Path("/var/log/kv")),
        ("record", None, None),
        ("label", "team a", "team a"),
        ("weights_id", "sha256:abc", "sha256:abc"),
        ("weights_id", None, None),
        ("cpu.capacity", 4096, Bytes(4096)),
        ("cpu.policy", "arc", "arc"),
        ("cpu.policy", "my.policies:Mine", "my.policies:Mine"),
        ("cpu.prefault", False, False),
        ("cpu.arena_dir", "/mnt/huge/", Path("/mnt/huge")),
        ("nvme.path", ["/mnt/a", "/mnt/b/../c"], (Path("/mnt/a"), Path("/mnt/c"))),
        ("nvme.durability", "power", Durability.POWER),
        ("nvme.admission", "second_touch", AdmissionMode.SECOND_TOUCH),
        ("nvme.write_budget", "500GB", Bytes(500 * 10**9)),
        ("nvme.write_budget", None, None),
        ("nvme.write_budget", "0.3 DWPD", DriveWrites(Fraction(3, 10))),
        ("nvme.admission", "my.rules:admit", "my.rules:admit"),
        ("nvme.min_free", 0, Bytes(0)),
        ("nvme.min_share", "20GiB", Bytes(20 * 2**30)),
        ("nvme.min_share", None, None),
        ("nvme.io_threads", 64, 64),
        ("nvme.movers", "threads", Movers.THREADS),
        ("nvme.direct_io", True, True),
        ("nvme.direct_io", False, False),
        ("nvme.direct_io", "auto", True),
        ("nvme.segment_size", "64MiB", Bytes(64 * 2**20)),
    ],
)
def test_accepted(key: str, value: object, expected: object) -> None:
    config = parse(changed(key, value))
    place: object = config
    if "." in key:
        tier, key = key.split(".")
        place = config.cpu if tier == "cpu" else config.nvme[0]
    assert getattr(place, key) == expected
    assert type(getattr(place, key)) is type(expected)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse(changed("nvme.path", "~/kv")).nvme[0].path == (Path("/home/someone/kv"),)


def test_one_tier_and_three() -> None:
    assert parse({"tiers": GOOD["tiers"][:1]}).nvme == ()
    slow = {"type": "nvme", "capacity": "9TB", "path": "/mnt/slow"}
    assert [tier.key for tier in parse({"tiers": [*GOOD["tiers"], slow]}).nvme] == [
        "tiers[1]",
        "tiers[2]",
    ]


def test_vllm_keys_are_looked_at_and_passed_over() -> None:
    values: dict[str, Any] = {
        "spec_name": "AnotherSpec",
        "spec_module_path": None,
        "block_size": None,
        "blocks_per_chunk": 4,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "sync_load_budget_bytes": 1 << 30,
        "canonical_layout": False,
    }
    assert set(values) == set(VLLM_KEYS)
    assert parse(GOOD | values) == parse(GOOD)
    assert "leave one of them out" in message({**GOOD, "block_size": 32, "blocks_per_chunk": 2})


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        parse(GOOD).label = "x"  # type: ignore[misc]


_QUOTED = [f'"{name}"' for name in known_names()]
ALL_POLICIES = f"{', '.join(_QUOTED[:-1])} or {_QUOTED[-1]}"
WRONG: list[tuple[str, object, str]] = [
    # unknown keys
    ("writemode", "back", 'did you mean "write_mode"?'),
    ("zzz", 3, "known are tiers, write_mode"),
    ("nvme.capcity", "1TiB", 'did you mean "capacity"?'),
    ("nvme.arena_dir", "/x", "known are path, capacity"),
    ("cpu.path", "/x", "known are capacity, policy"),
    ("write_budget", "500GB", "write_budget is a key of the nvme tier, so write out tiers"),
    ("arena_dir", "/x", "arena_dir is a key of the cpu tier, so write out tiers"),
    ("capacity", "1TiB", "capacity is a key of the cpu and nvme tiers"),
    ("url", "file:///x", "url is a key of the remote tier"),
    ("cpu_bytes_to_use", 5, "use tiers[0].capacity"),
    ("eviction_policy", "lru", "use tiers[0].policy"),
    ("canonical_layout", True, "leave it out"),
    ("canonical_layout", "yes", "leave it out"),
    # wrong types
    ("write_mode", 3, '"demote", "back" or "through"'),
    ("write_mode", "behind", '"demote", "back" or "through"'),
    ("on_reset", None, '"invalidate" or "keep"'),
    ("dirty_age_s", "5", "number of seconds"),
    ("dirty_age_s", True, "number of seconds"),
    ("dirty_age_s", -1, "number of seconds"),
    ("shutdown_flush_s", math.inf, "number of seconds"),
    ("shutdown_flush_s", math.nan, "number of seconds"),
    ("promotion_deadline_s", 0, "number of seconds above 0"),
    ("load_or_recompute", "yes", "true or false"),
    ("prefill_tokens_per_s", 0, "tokens per second above 0"),
    ("prefill_tokens_per_s", "fast", "tokens per second above 0"),
    ("prefill_tokens_per_s", math.inf, "tokens per second above 0"),
    ("record", "requests.jsonl", "give an absolute path"),
    ("record", True, "is not a folder"),
    ("record", "/mnt/\udcff", "in UTF-8"),
    ("promotion_budget", 0, "number of blocks"),
    ("promotion_budget", 0.5, "number of blocks"),
    ("label", 7, "give a string"),
    ("spec_name", 3, "give a string"),
    ("spec_name", None, "give a string"),
    ("spec_module_path", ["kvcascade.spec"], "give a string"),
    ("blocks_per_chunk", "two", "whole number from 1 to 65536"),
    ("blocks_per_chunk", "2", "whole number from 1 to 65536"),
    ("blocks_per_chunk", 0, "whole number from 1 to 65536"),
    ("blocks_per_chunk", 2.7, "whole number from 1 to 65536"),
    ("blocks_per_chunk", True, "whole number from 1 to 65536"),
    ("block_size", -16, "whole number from 1 to 1048576"),
    ("block_size", 10**30, "whole number from 1 to 1048576"),
    ("offload_prompt_only", "false", "true or false"),
    ("offload_prompt_only", None, "true or false"),
    ("self_describing_kv_events", 1, "true or false"),
    ("sync_load_budget_bytes", "1GiB", "a whole number"),
    ("weights_id", " ", "leave it out"),
    ("weights_id", 1, "give a string"),
    ("cpu.prefault", 1, "true or false"),
    ("nvme.io_threads", True, "whole number from 1 to 64"),
    ("nvme.io_threads", 0, "whole number from 1 to 64"),
    ("nvme.io_threads", 65, "whole number from 1 to 64"),
    ("nvme.io_threads", 2.0, "whole number from 1 to 64"),
    ("nvme.movers", "fork", '"process" or "threads"'),
    ("nvme.direct_io", "on", '"auto", true or false'),
    ("nvme.direct_io", 1, '"auto", true or false'),
    ("nvme.durability", "disk", '"process" or "power"'),
    ("nvme.admission", ["all"], 'or "package.module:name"'),
    # sizes
    ("cpu.capacity", 0, "64GiB"),
    ("cpu.capacity", -1, "64GiB"),
    ("cpu.capacity", True, "64GiB"),
    ("cpu.capacity", 1.5, "64GiB"),
    ("cpu.capacity", None, "64GiB"),
    ("nvme.capacity", "lots", "64GiB"),
    ("nvme.capacity", "12G", "GiB or GB"),
    ("nvme.capacity", "150%", "50%"),
    ("nvme.write_budget", "50%", "500GB"),
    ("nvme.write_budget", 0, "500GB"),
    ("nvme.write_budget", "0 DWPD", "0.3 DWPD"),
    ("nvme.write_budget", "fast", "0.3 DWPD"),
    ("nvme.segment_size", "5%", "500GB"),
    ("nvme.min_share", "5%", "500GB"),
    ("nvme.min_free", "-5%", "50%"),
    ("cpu.low_watermark", "1GiB", "50%"),
    ("cpu.low_watermark", 0.1, "50%"),
    ("cpu.high_watermark", "10%", "above low_watermark, which is 40%"),
    # paths
    ("nvme.path", "", "/mnt/nvme/kv"),
    ("nvme.path", 3, "/mnt/nvme/kv"),
    ("nvme.path", "/a\0b", "/mnt/nvme/kv"),
    ("nvme.path", [], "one per device"),
    ("nvme.path", "kv", "absolute path"),
    ("cpu.arena_dir", "shm", "absolute path"),
    # policies
    ("cpu.policy", "lrru", 'did you mean "lru"?'),
    ("nvme.policy", "clock", ALL_POLICIES),
    ("nvme.policy", 3, ALL_POLICIES),
    ("nvme.policy", "a.b:C:d", '"package.module:Class"'),
    # tiers
    ("tiers", [], '{"type": "cpu"'),
    ("tiers", "cpu", '{"type": "cpu"'),
    ("tiers", {"type": "cpu"}, '{"type": "cpu"'),
    ("cpu.type", "nvme", '"cpu" for the first tier'),
    ("nvme.type", "cpu", '"nvme" for others'),
]


@pytest.mark.parametrize(("key", "value", "remedy"), WRONG)
def test_refused(key: str, value: object, remedy: str) -> None:
    text = message(changed(key, value))
    assert text.startswith(full_key(key)), f"{text} names the key"
    assert json.dumps(value) in text, f"{text} names the value"
    assert remedy in text, f"{text} says what to do"


@pytest.mark.parametrize("key", ["cpu.type", "nvme.type"])
@pytest.mark.parametrize("value", ["tape", "ssd", ["cpu"], None])
def test_a_type_that_is_none_names_those_that_are(key: str, value: object) -> None:
    text = message(changed(key, value))
    assert (
        text == f"{full_key(key)}: invalid tier type {value!r}; expected 'cpu', 'nvme' or 'remote'."
    )


def test_all_problems_are_noted_and_the_first_is_raised() -> None:
    """What can be read is read all the same, so that every tier and option has its turn."""
    wrong: dict[str, Any] = {
        "write_mod": "back",
        "block_size": 0,
        "store_threshold": 2,
        "label": 3,
        "dirty_age_s": -1,
        "tiers": [
            {"type": "cpu", "policy": "lrru"},
            {"type": "nvme", "capacity": "much", "path": "kv", "admision": "all"},
            {"type": "ssd"},
            {"type": "nvme", "capacity": 1, "path": ["/a", "/a"]},
        ],
    }
    noted: list[str] = []
    found = parse(wrong, known_names(), noted)
    keys = [text.split()[0].rstrip(":") for text in noted]
    assert sorted(keys) == sorted(
        ["write_mod", "block_size", "store_threshold", "label", "dirty_age_s"]
        + ["tiers[0].policy", "tiers[2].type", "tiers[3].path"]
        + ["tiers[1].capacity", "tiers[1].path", "tiers[1].admision"]
    )
    assert [tier.key for tier in found.tiers] == ["tiers[0]", "tiers[3]"]
    assert found.dirty_age_s == 5.0
    assert message(wrong) == noted[0]


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("tiers", '"type": "cpu"'),
        ("cpu.type", '"cpu" for the first tier'),
        ("nvme.path", '"/mnt/nvme/kv"'),
    ],
)
def test_missing(key: str, remedy: str) -> None:
    text = message(changed(key, GONE))
    assert text.startswith(f"{full_key(key)} is missing;") and remedy in text


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("dirty_age_s", "from 0 to 1000000000"),
        ("shutdown_flush_s", "from 0 to 1000000000"),
        ("promotion_deadline_s", "from 0 to 1000000000"),
        ("prefill_tokens_per_s", "up to 1000000000000"),
    ],
)
def test_numbers_are_bounded(key: str, remedy: str) -> None:
    text = message(changed(key, 10**400))
    assert text.startswith(f"{key}: 1000") and remedy in text


def test_half_a_character_is_no_text() -> None:
    """JSON can write it; it could be neither stored nor printed."""
    for key, value in (("label", "\ud800"), ("record", "/\ud800"), ("write_mode", "\ud800")):
        assert "\\ud800" in message(changed(key, value)).encode().decode()


def test_item_of_a_path_list_is_named() -> None:
    text = message(changed("nvme.path", ["/mnt/a", "b"]))
    assert text.startswith('tiers[1].path[1]: "b"')


@pytest.mark.parametrize("path", [["/mnt/a", "/mnt/x/../a"], "/mnt/nvme/kv"])
def test_a_path_is_used_once(path: object) -> None:
    config = changed("tiers", [*GOOD["tiers"], {"type": "nvme", "capacity": 1, "path": path}])
    assert "already; give a folder that is used once" in message(config)


@pytest.mark.parametrize("tier", [None, "cpu", 3, ["cpu"]])
def test_a_tier_is_a_dictionary(tier: object) -> None:
    text = message({"tiers": [tier]})
    assert text.startswith(f"tiers[0]: {json.dumps(tier)}") and '{"type": "cpu"}' in text


def test_too_many_tiers() -> None:
    tier = GOOD["tiers"][1]
    tiers = [GOOD["tiers"][0], *(tier | {"path": f"/mnt/{i}"} for i in range(8))]
    assert "has 9 tiers; give 8 at most" in message({"tiers": tiers})


@pytest.mark.parametrize("config", [None, [], "tiers", 3])
def test_the_whole_is_a_dictionary(config: Any) -> None:
    assert message(config).startswith("kv_connector_extra_config: ")


def test_policies_come_from_the_caller() -> None:
    assert parse(changed("cpu.policy", "sieve"), policies=["lru", "sieve"]).cpu.policy == "sieve"
    assert 'use "lru" or "sieve"' in message(
        changed("cpu.policy", "arc"), policies=["lru", "sieve"]
    )


def test_long_values_are_cut() -> None:
    text = message(changed("write_mode", "x" * 10_000))
    assert len(text) < 300 and "xxx… " in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = sorted({key for key, _, _ in WRONG})


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_json_is_a_config_or_a_config_error(changes: Mapping[str, object]) -> None:
    config = copy.deepcopy(GOOD)
    for key, value in changes.items():
        place = config
        if "." in key:
            tier, key = key.split(".")
            place = GOOD["tiers"][("cpu", "nvme").index(tier)] | {}
            config["tiers"] = [place if t["type"] == tier else t for t in GOOD["tiers"]]
        place[key] = value
    try:
        assert isinstance(parse(config), CascadeConfig)
    except ConfigError as error:
        assert str(error).endswith(".")
