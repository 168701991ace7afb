"""A function of a test's, run in a process of its own that has a small file system to fill up.

    def test_something(tmp_path):
        on_small_disk(fill_it, tmp_path)

The file system is a `tmpfs` in a mount namespace of the process: no rights are needed where the
system lets users make namespaces, nobody else sees it, and it is gone with the process. Where the
system does not, the test is skipped. Other file systems need root, and an image beside the
folder.

`python -m support.small_disk FILE FUNCTION FOLDER` is the process itself.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .children import environment

SIZE_BYTES = 8 << 20
PAGE = 4096
TIMEOUT_S = 300
Words = tuple[str, ...]
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o mode=0700,size="$1" none "$2" || exit; shift; shift; exec "$@"'
IMAGE_BYTES = {"btrfs": 128 << 20, "xfs": 300 << 20}
"""About the smallest ones."""
_AS_ROOT = ("unshare", "--mount", "sh", "-c")
_MOUNT_IMAGE = """truncate -s "$1" "$2.image" && mkfs.KIND -qf "$2.image" || exit
mount -o loop "$2.image" "$2" && chmod 0700 "$2" || exit; shift; shift; exec "$@\""""


def on_small_disk(
    function: Callable[[Path], None], folder: Path, size_bytes: int = SIZE_BYTES
) -> None:
    """Call `function(folder)` where `folder` is a file system of `size_bytes`."""
    if not _can_mount(folder, _UNSHARE, _MOUNT, SIZE_BYTES):
        pytest.skip("this system lets no user make a mount namespace (unshare --user --mount)")
    _call_on(function, folder, _UNSHARE, _MOUNT, size_bytes)


def on_small_image(kind: str, function: Callable[[Path], None], folder: Path) -> None:
    """Call `function(folder)` where `folder` is a file system of a kind of `IMAGE_BYTES`."""
    mount, size_bytes = _MOUNT_IMAGE.replace("KIND", kind), IMAGE_BYTES[kind]
    if not _can_mount(folder, _AS_ROOT, mount, size_bytes):
        pytest.skip(f"no {kind} can be made and mounted here")
    _call_on(function, folder, _AS_ROOT, mount, size_bytes)


def _call_on(
    function: Callable[[Path], None], folder: Path, unshare: Words, mount: str, size_bytes: int
) -> None:
    source = function.__code__.co_filename
    call = (sys.executable, "-m", "support.small_disk", source, function.__name__, str(folder))
    command = (*unshare, mount, "sh", str(size_bytes), str(folder), *call)
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def free_bytes(path: Path) -> int:
    """What is free on the file system."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class Filler:
    """Somebody else's file."""

    def __init__(self, folder: Path, leave_bytes: int = 0) -> None:
        """It takes all but `leave_bytes` of what is free."""
        self._path = folder / "somebody-else"
        with self._path.open("wb", buffering=0) as file:
            while free_bytes(folder) - leave_bytes >= PAGE:  # others may take room meanwhile
                file.write(bytes(PAGE))

    def remove(self) -> None:
        """The space is free again."""
        self._path.unlink()


def _can_mount(folder: Path, unshare: Words, mount: str, size_bytes: int) -> bool:
    command = (*unshare, mount, "sh", str(size_bytes), str(folder), "true")
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    runpy.run_path(sys.argv[1])[sys.argv[2]](Path(sys.argv[3]))
