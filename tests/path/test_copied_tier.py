"""A tier that was copied with holes (`rsync --sparse`) where its files have zeros.

A hole takes its room when it is written. A write to mapped memory has no error: the system ends the
process if the disk is full by then.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.path_rig import PathRig, RigNode
from support.sparse import has_holes, make_sparse

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import Committed


def copied(folder: Path, kind: str) -> tuple[PathRig, list[Path]]:
    """A closed tier with blocks 1 and 2 whose files of a kind have holes; these files."""
    rig = PathRig(real=RealFileSystem(), slots_per_segment=256, roots=(folder,))
    assert RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    rig.close()
    files = sorted(folder.rglob(kind))
    for file in files:
        make_sparse(file)
    return rig, list(filter(has_holes, files))


@pytest.mark.parametrize("kind", ["presence", "*.arr"])
def test_a_copied_tier_gets_its_room_when_it_is_opened(tmp_path: Path, kind: str) -> None:
    rig, files = copied(tmp_path, kind)
    assert files
    rig.start()
    assert RigNode(rig).held([1, 2]) == [1, 2]
    assert not list(filter(has_holes, files))
    rig.close()


@pytest.mark.parametrize("kind", ["presence", "*.arr"])
def test_no_file_with_holes_is_mapped_on_a_full_disk(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to the mapping would end the process. The order of eviction is kept in memory."""
    rig, files = copied(tmp_path, kind)
    before = [file.read_bytes() for file in files]

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        rig.start()
        node = RigNode(rig)
        if kind == "presence":
            assert node.refused
        else:
            assert node.held([1, 2]) == [1, 2]
            assert node.store([3]) == [Committed.OK]
            rig.close()
            assert [file.read_bytes() for file in files] == before
    rig.start()
    assert RigNode(rig).held([1, 2]) == [1, 2]
    rig.close()
