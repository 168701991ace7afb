"""The parts of a cascade in this process, for tests that look inside: top first.

Also the order of eviction in a path that nobody has open.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.demotion import Demoter
from kvcascade.manager.first_tier import FirstTier
from kvcascade.manager.promotion.claim_queue import ClaimQueue
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.lmdb_block_table import open_block_table
from kvcascade.tiers.nvme.path.presence_file import boot_id
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import homes_under, open_home
from kvcascade.tiers.nvme.path.writer.namespace.namespace_start import (
    StartMeans,
    open_namespace_writer,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_writer import NamespaceWriter
from kvcascade.tiers.nvme.path.writer.path_options import load_record


def demoters(manager: CascadingOffloadingManager) -> list[Demoter]:
    """The manager's demoter."""
    return [manager._demoter]


def first_tier(manager: CascadingOffloadingManager) -> FirstTier:
    """The first tier."""
    return manager._core.top


def claims_of(manager: CascadingOffloadingManager) -> ClaimQueue:
    """The waiting claims."""
    return manager._claims


def coldest_in(root: Path) -> list[bytes]:
    """The blocks of the only namespace of a path in order of eviction; nobody has it open."""
    fs = RealFileSystem()
    record, (name,) = load_record(fs, root), homes_under(fs, root)
    assert record is not None
    home = open_home(fs, [root], name, record.options)
    assert home is not None
    means = StartMeans(fs, time.time, open_block_table, boot_id())
    namespace = open_namespace_writer(means, home, is_durable=False)
    try:
        return order_of_eviction(namespace)
    finally:
        namespace.close()


def order_of_eviction(namespace: NamespaceWriter) -> list[bytes]:
    """The blocks of an open namespace in order of eviction."""
    used = namespace.space.used
    key_at = {entry.slot: key for key, entry in namespace.table.keys_after(b"", used)}
    return [key_at[slot] for slot in namespace.recency.victims(used) if slot in key_at]
