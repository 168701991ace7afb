"""Messages about faults of the system name the remedy."""

from __future__ import annotations

import errno

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
        (errno.ELOOP, ErrorKind.IO, "replace the link"),
        (errno.ENOENT, ErrorKind.IO, "check the path"),
        (errno.EOVERFLOW, ErrorKind.IO, "check the path"),
        (errno.EIO, ErrorKind.IO, "check the device"),
    ],
)
def test_each_fault_names_its_remedy(code: int, kind: ErrorKind, remedy: str) -> None:
    error = from_os_error(OSError(code, "as the system says"), "writing")
    assert error.kind is kind and remedy in str(error) and "while writing" in str(error)
    assert "Errno" not in str(error)
