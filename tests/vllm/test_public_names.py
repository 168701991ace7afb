"""Every name that users write in a configuration or a script can be imported."""

from __future__ import annotations

import configparser
from importlib import import_module

import pytest
from support.project import ROOT

from kvcascade.tiers.policies import ENTRY_POINTS

POLICIES = "Arc Fifo Lirs Lru Prefix S3Fifo Sieve Slru".split()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kvcascade.spec", "CascadeOffloadingSpec"),
        ("kvcascade.tiers.policies", "EvictionOrder"),
        ("kvcascade.tiers.policies.lru", "LruOrder"),
    ],
)
def test_names_of_the_package(module: str, name: str) -> None:
    assert isinstance(getattr(import_module(module), name), type)


def test_the_spec_is_the_one_of_the_installed_vllm() -> None:
    generation = import_module("kvcascade.vllm.generation")
    found = import_module("kvcascade.spec").CascadeOffloadingSpec
    assert found.__module__ == f"kvcascade.vllm.{generation.adapter()}"


def test_the_secondary_tier() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.tiering.base")
    found = import_module("kvcascade.vllm_tier").KVCascadeTier
    assert issubclass(found, base.SecondaryTierManager)


def test_policies_for_vllms_own_manager() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.cpu.policies.base")
    module = import_module("kvcascade.vllm_policies")
    for name in POLICIES:
        assert issubclass(getattr(module, f"{name}Policy"), base.CachePolicy)


def test_entry_points() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (line,) = setup["options.entry_points"]["vllm.general_plugins"].strip().splitlines()
    module, _, function = line.partition("=")[2].strip().partition(":")
    assert callable(getattr(import_module(module), function))
    assert ENTRY_POINTS == "kvcascade.policies"
