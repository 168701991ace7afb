"""Starting a node: what it gets, and what stays open if it cannot be started."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.children import environment

from kvcascade.errors import TierIOError
from kvcascade.handlers.node import node_child
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


def test_a_limit_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(TierIOError, match="no process can be started .*; raise the limit"):
        launch(NodeReady(), os.memfd_create("arena"), NODE_MODULE)


def test_a_deleted_working_directory_is_no_place_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interactive Python has "" in its path."""
    monkeypatch.setattr(sys, "path", ["", "lib", "/usr/lib/modules"])
    monkeypatch.chdir(tmp_path)
    there = node_child.environment()["PYTHONPATH"]
    assert there == f"{tmp_path}:{tmp_path}/lib:/usr/lib/modules"
    tmp_path.rmdir()
    assert node_child.environment()["PYTHONPATH"] == "/usr/lib/modules"


_PROBE = """
import os, sys
said = [os.readlink(f"/proc/self/fd/{number}") for number in (0, *sys.argv[1:3])]
with open(os.environ["SAID"], "w") as file:
    file.write(" ".join(said))
"""
_LAUNCH = """
import os, sys
from kvcascade.handlers.node.node_child import launch
from kvcascade.handlers.node.path_wire import NodeReady
sys.path.insert(0, sys.argv[1])
for closed in map(int, sys.argv[2:]):
    os.close(closed)
launch(NodeReady(), os.memfd_create("arena"), "probe").child.wait(30)
"""


@pytest.mark.parametrize("closed", [(), (0, 1), (0, 1, 2), (2,)])
def test_a_node_starts_without_standard_descriptors(tmp_path: Path, closed: tuple[int]) -> None:
    """A socket or an arena in their place was replaced in the node."""
    (tmp_path / "probe.py").write_text(_PROBE)
    command = [sys.executable, "-c", _LAUNCH, str(tmp_path), *map(str, closed)]
    subprocess.run(command, env=environment() | {"SAID": str(tmp_path / "said")}, check=True)
    standard, link, arena, *_ = (tmp_path / "said").read_text().split()
    assert standard == os.devnull
    assert link.startswith("socket:") and arena.startswith("/memfd:arena")


def test_a_node_may_open_as_many_files_as_the_system_lets_it() -> None:
    code = (
        "import resource; from kvcascade.handlers.node.child_start import allow_open_files; "
        "kind = resource.RLIMIT_NOFILE; hard = resource.getrlimit(kind)[1]; "
        "resource.setrlimit(kind, (100, hard)); allow_open_files(); "
        "assert hard > 100 and resource.getrlimit(kind) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
