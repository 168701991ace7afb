"""Starting a node that cannot be started: nothing stays open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvcascade.errors import TierIOError
from kvcascade.handlers.node.node_child import launch
from kvcascade.handlers.node.path.path_client import NODE_MODULE
from kvcascade.handlers.node.path_wire import NodeReady


@pytest.mark.parametrize(
    ("module", "name"), [(socket, "socketpair"), (subprocess, "Popen")], ids=["socket", "process"]
)
def test_a_failed_start_leaves_nothing_open(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, name, fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TierIOError, match="starting the process"):
        launch(NodeReady(), os.memfd_create("arena"), NODE_MODULE)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_node_may_open_as_many_files_as_the_system_lets_it() -> None:
    code = (
        "import resource; from kvcascade.handlers.node.child_start import allow_open_files; "
        "kind = resource.RLIMIT_NOFILE; hard = resource.getrlimit(kind)[1]; "
        "resource.setrlimit(kind, (100, hard)); allow_open_files(); "
        "assert hard > 100 and resource.getrlimit(kind) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
