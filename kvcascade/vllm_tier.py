"""Public name of the secondary tier: `"module_path": "kvcascade.vllm_tier"` in vLLM's tiering."""

from __future__ import annotations

from .vllm.secondary_tier import KVCascadeTier

__all__ = ["KVCascadeTier"]
