"""Tools beside a tier on threads and beside `kvcascade store`, as beside engines with processes."""

from __future__ import annotations

from pathlib import Path

from support.cache_rig import call, least_size
from support.path_cache import engine_on, folder_in

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tools.commands.store.serve_path import Rival, StoreEnd, parts_of, serve

BLOCKS = 20


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
