"""Public name of our policies: `"cache_policy_module_path": "kvcascade.vllm_policies"` in vLLM.

Every built-in order is here: `LruOrder` as `LruPolicy`, `S3FifoOrder` as `S3FifoPolicy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm.cpu_policies import POLICIES

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Any]: ...


globals().update(POLICIES)
