"""Public name of our policies: `"cache_policy_module_path": "kvcascade.vllm_policies"` in vLLM."""

from __future__ import annotations

from .vllm.cpu_policies import (
    ArcPolicy,
    FifoPolicy,
    LirsPolicy,
    LruPolicy,
    PrefixPolicy,
    S3FifoPolicy,
    SievePolicy,
    SlruPolicy,
)

__all__ = [
    "ArcPolicy",
    "FifoPolicy",
    "LirsPolicy",
    "LruPolicy",
    "PrefixPolicy",
    "S3FifoPolicy",
    "SievePolicy",
    "SlruPolicy",
]
