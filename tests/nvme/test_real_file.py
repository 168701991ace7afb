"""Transfers of a real file that leaves direct I/O."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcascade.tiers.nvme.disk.filesystem import open_read_only


@pytest.mark.parametrize(("failures", "can_read"), [(0, True), (1, True), (2, False)])
def test_a_read_that_lacked_alignment_is_tried_once_more(
    failures: int, can_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not in direct mode: another thread has left it since this one's call began."""
    (tmp_path / "file").write_bytes(b"block")
    file, real, left = open_read_only(tmp_path / "file"), os.preadv, [0] * failures

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if left:
            left.pop()
            raise OSError(errno.EINVAL, "not aligned")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    data = bytearray(5)
    if can_read:
        assert file.preadv([memoryview(data)], 0) == 5 and data == b"block"
    else:
        with pytest.raises(OSError, match="not aligned"):
            file.preadv([memoryview(data)], 0)
    file.close()
