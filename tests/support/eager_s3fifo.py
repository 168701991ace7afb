"""S3-FIFO with the warm-up rule of the library that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from kvcascade.tiers.policies.s3fifo import S3FifoOrder


class EagerS3FifoOrder(S3FifoOrder):
    """Until the first eviction, new blocks enter the main queue once the small one is full."""

    _has_evicted = False

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        super().insert(slots, tags)
        excess = len(self._small) - self._small_limit
        if excess > 0 and not self._has_evicted:
            newest = self._small.to_array()[-excess:].tolist()
            self._small.discard(newest)
            self._main.append(newest)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._has_evicted = True
        super().evicted(slots, tags)
