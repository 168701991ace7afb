"""Tools beside a tier on threads and beside `kvcascade store`, as beside engines with processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.cache_rig import call, least_size
from support.path_cache import engine_on, folder_in

import kvcascade
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tools.commands.store.serve_path import Rival, StoreEnd, parts_of, serve

BLOCKS = 20
BLOCK_BYTES = 64 << 10
SIZES: dict[str, Any] = {"capacity": "256MiB", "min_free": 0}


def tools_work(root: Path, state: NodeState) -> None:
    """Every command that changes or reads blocks, while an engine on a thread uses them."""
    engine, file = engine_on(root), root.parent / "blocks.safetensors"
    try:
        assert engine.state is state
        engine.store(range(BLOCKS))
        seen = call("inspect", root, "--json").one
        assert (seen["state"], seen["blocks"]) == ("live", BLOCKS)
        assert call("verify", root, "--json").one["ok"] == BLOCKS
        (shown,) = call("top", root, "--once", "--json").document["tiers"]
        assert shown["blocks"] == BLOCKS
        remove = ("gc", root, "-n", seen["name"], "--remove-namespace")
        assert call(*remove).code != 0, "it is in use"
        assert call("export", root, file, "--json").document["blocks"] == BLOCKS
        removed = call("gc", root, "--max-size", least_size(folder_in(root)), "--json")
        assert removed.one["blocks_removed"] == BLOCKS
        engine.until(lambda: not engine.holds(range(BLOCKS)))
        assert call("import", root, file, "--json").document["imported"] == BLOCKS
        assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
        engine.store([50])
    finally:
        engine.close()


def test_tools_beside_a_writer_on_a_thread(tmp_path: Path) -> None:
    tools_work(tmp_path / "kv", NodeState.LEADING)


def test_tools_beside_the_service(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()

    def pause(seconds: float) -> None:
        tools_work(root, NodeState.FOLLOWING)
        raise KeyboardInterrupt

    parts = parts_of([root], {"capacity": "64MiB", "min_free": 0, "segment_size": "32KiB"}, {})
    assert serve(parts, rival=Rival.REFUSED, pause=pause) is StoreEnd.STOPPED


def test_a_cache_whose_segments_the_capacity_does_not_hold_says_so(tmp_path: Path) -> None:
    """Its blocks are sound: with the former capacity they are found again."""
    root, row = tmp_path / "kv", np.zeros(BLOCK_BYTES, np.uint8)
    with kvcascade.open(root, namespace="big", block_bytes=BLOCK_BYTES, **SIZES) as cache:
        cache.put([b"block"], [row])

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    parts = parts_of([root], {"capacity": "1MiB", "min_free": 0}, {})
    assert serve(parts, rival=Rival.REFUSED, pause=stop) is StoreEnd.STOPPED
    told = "cannot be used: capacity 1048576 holds no segment"
    name = call("inspect", root, "--json").one["name"]
    for words in (
        ["inspect", root],
        ["verify", root],
        ["gc", root, "--max-size", "1MiB"],
        ["export", root, tmp_path / "file"],
    ):
        answer = call(*words)
        assert answer.code != 0 and told in " ".join((answer.out + answer.err).split()), answer
        assert "format version" not in answer.out + answer.err
    assert call("inspect", root, "--json").one["name"] == name
    with kvcascade.open(root, namespace="big", block_bytes=BLOCK_BYTES, **SIZES) as cache:
        assert cache.exists([b"block"]) == [True]
