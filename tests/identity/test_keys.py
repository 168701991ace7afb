"""What vLLM puts into a block hash: salts and adapters tell apart requests with equal tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.project import ROOT
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcascade.vllm import generation

BLOCK_TOKENS = 16


def hashes(**request: Any) -> list[bytes]:
    """The block hashes of one prompt."""
    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=1)
    sampling.update_from_generation_config({}, 2)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    made = Request("r", list(range(64)), sampling, None, block_hasher=hasher, **request)
    return [bytes(block_hash) for block_hash in made.block_hashes]


@pytest.mark.parametrize(
    "request_of",
    [
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": LoRARequest("one", 1, "/adapters/one")},
        {"lora_request": LoRARequest("two", 2, "/adapters/two")},
    ],
    ids=["salt a", "salt b", "adapter one", "adapter two"],
)
def test_every_block_of_another_tenant_has_another_key(request_of: dict[str, Any]) -> None:
    plain, other = hashes(), hashes(**request_of)
    assert len(plain) == len(other) == 4
    assert not set(plain) & set(other), "the first block's key is part of all that follow"
    assert hashes(**request_of) == other


def test_an_adapter_of_the_same_name_elsewhere_has_other_keys() -> None:
    """Up to 0.30 it has not, within one engine either."""
    if generation.vllm_version() < (0, 31):
        pytest.skip("this vLLM hashes the name alone")
    old, new = (hashes(lora_request=LoRARequest("sql", 1, f"/adapters/{v}")) for v in (1, 2))
    assert not set(old) & set(new)


def test_the_page_computes_the_hashes_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user needs one to remove the prompt."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    expected = [block_hash.hex() for block_hash in hashes()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": [*range(64), 7]}))
    page = (ROOT / "docs" / "operations.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(compile(code, "operations.md", "exec"), {"__name__": "example"})
    ends = range(BLOCK_TOKENS, 65, BLOCK_TOKENS)
    lines = [f"{end} {text}" for end, text in zip(ends, expected, strict=True)]
    assert capsys.readouterr().out.splitlines() == lines


def test_two_tenants_share_nothing() -> None:
    assert not set(hashes(cache_salt="a")) & set(hashes(cache_salt="b"))
