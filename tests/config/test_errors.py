"""Messages about faults of the system name the remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvcascade.errors import ErrorKind, from_os_error


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (errno.ENOSPC, ErrorKind.NO_SPACE, "free some, or inodes, or lower the capacity"),
        (errno.EFBIG, ErrorKind.NO_SPACE, "ulimit -f"),
        (errno.EMFILE, ErrorKind.IO, "ulimit -n"),
        (errno.EACCES, ErrorKind.IO, "permissions"),
        (errno.EPERM, ErrorKind.IO, "chmod -R go-w"),
        (errno.EPERM, ErrorKind.IO, "chattr -i"),
        (errno.ELOOP, ErrorKind.IO, "check the path"),
        (errno.ENOENT, ErrorKind.IO, "check the path"),
        (errno.EOVERFLOW, ErrorKind.IO, "check the path"),
        (errno.EIO, ErrorKind.IO, "check the device"),
    ],
)
def test_each_fault_names_its_remedy(code: int, kind: ErrorKind, remedy: str) -> None:
    error = from_os_error(OSError(code, "as the system says"), "writing")
    assert error.kind is kind and remedy in str(error) and "while writing" in str(error)
    assert "Errno" not in str(error)


def test_a_link_is_named_and_what_lies_beyond_a_loop_of_links_is_none(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, remedy in ((loop, f"replace the link {loop} by"), (loop / "file", "check the path")):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        except OSError as error:
            assert error.errno == errno.ELOOP and remedy in str(from_os_error(error, "reading"))
        else:
            raise AssertionError("a loop was opened")
