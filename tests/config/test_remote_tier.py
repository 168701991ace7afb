"""A remote tier in a configuration: where it may stand, and its way to the node."""

from __future__ import annotations

from typing import Any

import pytest

from kvcascade.config.environment import with_environment
from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.config.schema import parse
from kvcascade.errors import ConfigError

CPU: dict[str, Any] = {"type": "cpu"}
NVME: dict[str, Any] = {"type": "nvme", "path": "/mnt/nvme/kv"}
REMOTE: dict[str, Any] = {"type": "remote", "url": "valkeys://cache.example.org:6379"}


@pytest.mark.parametrize("tiers", [[CPU, REMOTE], [CPU, NVME, REMOTE]])
def test_it_is_the_last_tier(tiers: list[dict[str, Any]]) -> None:
    config = parse({"tiers": tiers})
    assert config.remote is not None
    assert config.remote is config.tiers[-1]
    assert len(config.below) == len(tiers) - 1
    assert config.remote.key == f"tiers[{len(tiers) - 1}]"


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([CPU, REMOTE, NVME], "tiers[1].type"),
        ([CPU, REMOTE, REMOTE], "tiers[1].type"),
        ([REMOTE], "tiers[0].type"),
        ([{**CPU, "persist": True}, REMOTE], "tiers[0].persist"),
        ([CPU, {**REMOTE, "policy": "lru"}], "tiers[1].policy"),
        ([CPU, {**REMOTE, "url": "valkey://cache.example.org"}], "tiers[1].url"),
    ],
)
def test_refused(tiers: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tiers": tiers})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "endpoint",
    ["http://[x", "https://[::1", "https://h:99999", "https://h:port", "https://h:0", "h", 1],
)
def test_an_endpoint_that_is_no_address_is_refused(endpoint: object) -> None:
    bucket = {"type": "remote", "url": "s3://bucket/prefix", "endpoint": endpoint}
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.endpoint: give a URL"):
        parse({"tiers": [CPU, bucket]})


def test_options_come_from_the_environment() -> None:
    given, _ = with_environment({"tiers": [CPU, REMOTE]}, {"KVCASCADE_REMOTE_WRITES": "through"})
    remote = parse(given).remote
    assert remote is not None and remote.writes == "through"


def test_the_node_reads_the_same_options() -> None:
    options = {
        **REMOTE,
        "writes": "off",
        "queue_bytes": "64MiB",
        "read_rate": "1GB",
        "deadline_s": 3,
        "username": "u",
        "password_file": "/run/secrets/valkey",
    }
    read = parse_remote(At("tiers[1]"), {k: v for k, v in options.items() if k != "type"})
    assert parse_remote(At("tiers[1]"), read.as_given()) == read
