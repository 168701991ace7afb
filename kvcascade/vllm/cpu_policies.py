"""Our eviction policies for vLLM's own CPU manager.

    "eviction_policy": "S3FifoPolicy", "cache_policy_module_path": "kvcascade.vllm_policies"

For users who keep vLLM's manager (`CPUOffloadingSpec`, `TieringOffloadingSpec`). vLLM keeps the
statuses of chunks. Victims are chosen by the same eviction orders as in the cascade. Scheduler
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, ClassVar, cast

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from ..manager.request import Request
from ..tiers.base import BlockHash
from ..tiers.policies import ORDERS, EvictionOrder, order_class
from ..tiers.policies.ordered import tag_of
from .generation import KEY_POSITIONS, chunk_slot

PUBLIC_MODULE = "kvcascade.vllm_policies"
"""Name of the module that users and vLLM import these classes from."""


def _tags(keys: Iterable[OffloadKey]) -> list[int]:
    return [tag_of(BlockHash(key)) for key in keys]


class _OrderPolicy(CachePolicy):
    """Adapter from one of our eviction orders to vLLM's policy interface."""

    order_name: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = order_class(self.order_name)(cache_capacity)
        self._chunks: dict[OffloadKey, Any] = {}
        self._key_at: list[OffloadKey | None] = [None] * cache_capacity

    def get(self, key: OffloadKey) -> Any:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: Any, req_context: object = None) -> None:
        slot = chunk_slot(chunk)
        self._chunks[key] = chunk
        self._key_at[slot] = key
        self._order.insert([slot], _tags([key]))

    def remove(self, key: OffloadKey) -> None:
        slot = self._forget(key)
        self._order.remove([slot])

    def touch(self, keys: Iterable[OffloadKey], req_context: object = None) -> None:
        self._order.touch(self._slots(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: object = None) -> None:
        self._order.expect(_tags(keys))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: object = None,
    ) -> None:
        request = Request(positions=getattr(req_context, KEY_POSITIONS, {}))
        hashes = [BlockHash(key) for group in key_groups for key in group]
        keys = cast(list[OffloadKey], request.in_prompt_order(hashes))
        if self._order.wants_chains and keys:
            self._order.chain(self._slots(keys)[::-1], len(keys))
            return
        used = [key for key in keys if key in insertion_only_keys or key in reused_keys]
        # The order gets the tails before the heads, as in `RequestEnds.end`.
        for new, run in groupby(reversed(used), insertion_only_keys.__contains__):
            (self._order.settle if new else self._order.touch)(self._slots([*run][::-1]))

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, Any]] | None:
        def may_leave(slot: int) -> bool:
            key = self._key_at[slot]
            return key is not None and key not in protected and self._chunks[key].ref_cnt == 0

        slots = self._order.victims(n, may_leave)
        if len(slots) < n:
            return None
        keys = [key for slot in slots if (key := self._key_at[slot]) is not None]
        self._order.evicted(slots, _tags(keys))
        evicted = [(key, self._chunks[key]) for key in keys]
        for key in keys:
            self._forget(key)
        return evicted

    def clear(self) -> None:
        self._order.clear()
        self._chunks.clear()
        self._key_at = [None] * len(self._key_at)

    def _forget(self, key: OffloadKey) -> int:
        slot = chunk_slot(self._chunks.pop(key))
        self._key_at[slot] = None
        return slot

    def _slots(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the slots of the keys that are present, in reverse order of the keys."""
        found = [chunk_slot(chunk) for key in keys if (chunk := self._chunks.get(key)) is not None]
        found.reverse()
        return found


def _policy(order_name: str, order: type[EvictionOrder]) -> type[_OrderPolicy]:
    name = order.__name__.removesuffix("Order") + "Policy"
    return type(name, (_OrderPolicy,), {"order_name": order_name, "__module__": PUBLIC_MODULE})


POLICIES: dict[str, type[CachePolicy]] = {
    policy.__name__: policy for policy in map(_policy, ORDERS, ORDERS.values())
}
"""All built-in orders as policies of vLLM, by class name: `LruOrder` gives `LruPolicy`."""
