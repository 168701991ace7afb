"""Bytes written, read from the outside of a real tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.opening import open_nvme_tier
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tools.dev.demo.disk import written_bytes


def test_no_namespace(tmp_path: Path) -> None:
    assert written_bytes(tmp_path) == written_bytes(tmp_path / "missing") == 0


def test_what_the_index_counts(tmp_path: Path) -> None:
    config = NvmeTierConfig((tmp_path,), 1 << 20, 4096, NamespaceKey("one"))
    with ThreadPoolExecutor(1) as executor:
        open_nvme_tier(config, executor).close()
    assert written_bytes(tmp_path) == 0
    (index,) = tmp_path.glob("*/index")
    with lmdb.open(str(index), max_dbs=4) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(write=True, db=meta) as transaction:
            transaction.put(b"totals", (3 * 4096).to_bytes(8, "little") + bytes(8))
    assert written_bytes(tmp_path) == 3 * 4096
