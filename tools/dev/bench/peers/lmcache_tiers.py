"""LMCache's memory and disk tiers without an engine, in a process of LMCache's own environment.

That environment lacks kvcascade, so this file is run by its path and imports nothing of it. Its
arguments are the options of the disk tier as JSON, the file that stands in for the device's memory,
the bytes of a block and the number of blocks. Each line of standard input is a JSON object: `do`
("store" or "ask") and `keys`, one in hexadecimal digits for each block. The answer is a line of
JSON: the numbers of the `blocks` that were written or loaded.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_manager import StorageManager

LIMIT_S = 60.0
"""Longest time until all blocks are written, or one block is loaded, in seconds."""
GIB = 1 << 30
MEMORY_FACTOR = 1.5
"""Size of the memory tier as a multiple of all blocks; it evicts from 0.8 of its size on."""


class Written(L2AdapterListener):  # type: ignore[misc]
    """Counts the blocks that are on disk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._keys: set[ObjectKey] = set()

    def on_l2_keys_stored(self, keys: Sequence[ObjectKey], sizes: Sequence[int]) -> None:
        """Note these blocks."""
        with self._changed:
            self._keys.update(keys)
            self._changed.notify_all()

    def on_l2_keys_accessed(self, keys: Sequence[ObjectKey]) -> None:
        """Ignore reads."""

    def on_l2_keys_deleted(self, keys: Sequence[ObjectKey]) -> None:
        """Ignore deletions."""

    def wait_for(self, keys: Sequence[ObjectKey]) -> None:
        """Return as soon as all are on disk, and after `LIMIT_S` at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: self._keys.issuperset(keys), LIMIT_S)


class Tiers:
    """LMCache's tiers over one folder, and the memory that stands in for the device's."""

    def __init__(self, adapter: str, device: str, block_bytes: int, blocks: int) -> None:
        total_gib = max(1.0, MEMORY_FACTOR * block_bytes * blocks / GIB)
        memory = ["--l1-size-gb", str(total_gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        disk = ["--l2-store-policy", "skip_l1", "--l2-adapter", adapter]
        self._manager = StorageManager(parse_args([*memory, *disk]))
        self._written = Written()
        self._manager.register_l2_listener(self._written)
        size = block_bytes * blocks
        whole = torch.from_file(device, shared=True, size=size, dtype=torch.uint8)
        self._device = whole.view(blocks, block_bytes)
        self._layout = MemoryLayoutDesc([torch.Size([block_bytes])], [torch.uint8])

    def store(self, keys: Sequence[ObjectKey]) -> list[int]:
        """Copy blocks that LMCache takes, and wait until they are on disk; return their numbers."""
        found = self._manager.reserve_write(list(keys), self._layout)
        numbers = [number for number, key in enumerate(keys) if key in found]
        for number in numbers:
            found[keys[number]].tensor.copy_(self._device[number])
        self._manager.finish_write(list(found))
        self._written.wait_for(list(found))
        return numbers

    def ask(self, keys: Sequence[ObjectKey]) -> list[int]:
        """Ask for each block by a request of its own; return the numbers of those loaded."""
        handles = [self._manager.submit_prefetch_task(self._wish(key)) for key in keys]
        came = []
        for number, (key, handle) in enumerate(zip(keys, handles, strict=True)):
            self._manager.wait_prefetch_status(handle, LIMIT_S)
            result = self._manager.query_prefetch_status(handle)
            if result is None or not result.hit_cells[0].popcount():
                continue
            with self._manager.read_prefetched_results([key]) as objects:
                if objects is not None:
                    self._device[number].copy_(objects[0].tensor)
                    came.append(number)
            self._manager.finish_read_prefetched([key])
        return came

    def close(self) -> None:
        """Close the tiers."""
        self._manager.close()

    def _wish(self, key: ObjectKey) -> PrefetchTaskSpec:
        return PrefetchTaskSpec([GroupedObjectKeys([key], 0, self._layout)])


def object_key(digits: str) -> ObjectKey:
    """Return LMCache's key of a block, which says nothing about the weights of a model."""
    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return ObjectKey(bytes.fromhex(digits), "bench/model", rank)


def main(adapter: str, device: str, block_bytes: str, blocks: str) -> None:
    """Answer each line of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # its log goes to standard output
    tiers = Tiers(adapter, device, int(block_bytes), int(blocks))
    print(json.dumps({"open": True}), file=answers)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        keys = [object_key(digits) for digits in asked["keys"]]
        numbers = tiers.store(keys) if asked["do"] == "store" else tiers.ask(keys)
        print(json.dumps({"blocks": numbers}), file=answers)
    tiers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
