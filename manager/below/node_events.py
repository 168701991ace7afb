"""Events of one tier behind a node, for routers that follow them.

The writer of the path reports the blocks that it stored and removed for any engine. Blocks that the
tier held before are listed in batches, in the order of keys, one batch a step. A block that is
stored meanwhile is reported once. If its key comes after the last listed key, the list will have
it; otherwise it is an event of its own. That is exact, because lists and changes arrive in one
stream.

What was not taken is kept by block. A block that was stored and removed meanwhile is not named. So
an engine that takes no events keeps at most two entries for each block of the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ...tiers.base import BlockHash
from ...tiers.nvme.path.path_messages import KeysListed, ListKeys
from ..base import BlockEvent

LISTED_BLOCKS = 512
"""Most blocks of one batch. An engine publishes one batch a step."""
TAKEN_BLOCKS = 4096
"""Most blocks of the events that are taken at a time. An idle engine takes none for hours, while
other engines change the tier."""


class NodeEvents:
    """Events that were not taken yet. Used under the manager's lock."""

    def __init__(self, name: str, medium: str, *, is_wanted: bool) -> None:
        """Without `is_wanted` there are no events."""
        self._name = name
        self._medium = medium
        self._is_wanted = is_wanted
        self._changed: dict[bytes, bool] = {}
        """Blocks that were stored or removed, in order. True: the block was removed."""
        self.listed_to: bytes | None = b"" if is_wanted else None
        """Last key of the list that was named; None once all are."""
        self._is_asking = True
        """True while no question may be sent: one is under way, or no writer serves the node."""

    def joined(self) -> None:
        """Note a new connection to a writer. A question under way is lost."""
        self._is_asking = False

    def question(self) -> ListKeys | None:
        """Return the question that is due once earlier events were taken; the caller sends it."""
        if self._is_asking or self.listed_to is None or self._changed:
            return None
        self._is_asking = True
        return ListKeys(self.listed_to, LISTED_BLOCKS)

    def listed(self, message: KeysListed) -> None:
        """Name blocks that the tier held; an answer that was asked for twice counts once."""
        if message.after != self.listed_to:
            return
        self._is_asking = False
        self.listed_to = message.keys[-1] if message.keys else None
        self.emit(cast(list[BlockHash], message.keys), removed=False)

    def changed(self, keys: Sequence[bytes], *, removed: bool) -> None:
        """Name blocks that the writer stored or removed, except those that the list will have."""
        if self._is_wanted:
            last = self.listed_to
            named = keys if last is None else [key for key in keys if key <= last]
            self.emit(cast(Sequence[BlockHash], named), removed=removed)

    def emit(self, keys: Sequence[BlockHash], *, removed: bool) -> None:
        """Add an event for these blocks, if events are wanted."""
        changed = self._changed
        for key in keys if self._is_wanted else ():
            if changed.get(key, removed) is removed:
                changed[key] = removed
            else:  # routers know the block as it is again
                del changed[key]

    def take(self) -> list[BlockEvent]:
        """Return events of up to `TAKEN_BLOCKS` blocks; of more, the last ones come first."""
        changed = self._changed
        if not changed:
            return []
        if len(changed) <= TAKEN_BLOCKS:
            taken = list(changed.items())
            changed.clear()
        else:
            taken = [changed.popitem() for _ in range(TAKEN_BLOCKS)]
        return [
            BlockEvent(cast(tuple[BlockHash, ...], keys), self._medium, removed, self._name)
            for removed in (True, False)
            if (keys := tuple(key for key, was_removed in taken if was_removed is removed))
        ]

    def end_list(self) -> None:
        """Note a reset: nothing is left that was stored before."""
        self.listed_to = None

    def clear(self) -> None:
        """Forget what was not taken, because this engine reset the tier."""
        self.end_list()
        self._changed.clear()
