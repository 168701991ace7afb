"""Models that the engine cannot continue from cached blocks are refused.

MLA: vLLM runs DeepSeek's attention on a CPU, but without AMX it cannot begin behind cached blocks,
and its tokens are wrong with the right bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcascade import vllm_facts
from kvcascade.errors import ConfigError
from kvcascade.vllm_common import refuse_useless


def engine(*, mla: bool, is_off: bool) -> Any:
    """vLLM's configuration, as far as it is asked."""
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=not is_off),
        cache_config=SimpleNamespace(enable_prefix_caching=not is_off),
    )


def test_an_engine_that_cannot_continue_a_prefix_is_refused() -> None:
    refuse_useless(None)
    for config in (engine(mla=False, is_off=True), engine(mla=True, is_off=False)):
        refuse_useless(config)
    assert not vllm_facts.continues_prefixes(engine(mla=True, is_off=True))
    with pytest.raises(ConfigError, match="MLA"):
        refuse_useless(engine(mla=True, is_off=True))
