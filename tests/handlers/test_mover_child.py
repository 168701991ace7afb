"""Starting a mover that cannot be started: nothing stays open."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for

from kvcascade.errors import TierIOError
from kvcascade.handlers.node.mover_child import launch
from kvcascade.handlers.node.mover_wire import Setup
from kvcascade.tiers.nvme.attach import attachment_of


@pytest.mark.parametrize(
    ("module", "name"), [(socket, "socketpair"), (subprocess, "Popen")], ids=["socket", "process"]
)
def test_a_failed_start_leaves_nothing_open(
    module: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    rig = Rig(config_for([tmp_path]))
    setup = Setup(attachment_of(rig.tier), 0, 4096, 1, 1, True)
    monkeypatch.setattr(module, name, fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TierIOError, match="starting the process"):
        launch(setup, os.memfd_create("arena"))
    assert set(os.listdir("/proc/self/fd")) == before
    rig.close()
