"""Programs from Debian's packages, unpacked below the cache folder of the user, not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

LIMIT_S = 300
"""Longest time of one command, such as the download of all packages."""


def cache_folder() -> Path:
    """The folder for programs that tests download; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcascade-tests"


@cache
def unpacked(name: str, *packages: str) -> Path:
    """The folder with packages, and with what they need and this system lacks.

    The test is skipped where they cannot be had.
    """
    folder = cache_folder()
    if not (folder / name).is_dir():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            pytest.skip(f"{name} is not installed, and this is not Debian")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            _unpack(Path(made), packages)
            try:
                (Path(made) / "root").rename(folder / name)
            except OSError:  # another test process was faster
                assert (folder / name).is_dir()
    return folder / name


def libraries(root: Path) -> str:
    """The value of LD_LIBRARY_PATH for programs in an unpacked folder."""
    found = {path.parent for lib in ("lib", "usr/lib") for path in root.glob(f"{lib}/**/lib*.so.*")}
    return os.pathsep.join(map(str, sorted(found)))


def _unpack(folder: Path, packages: Sequence[str]) -> None:
    """Unpack packages into the subfolder "root"."""
    names = _needed(packages)
    if not names:
        _run("apt-get", "update")  # the list of packages may be old or missing
        names = _needed(packages)
    download = ("apt-get", "-o", "APT::Sandbox::User=root", "download", *names)
    if not names or _run(*download, folder=folder) is None:
        pytest.skip(f"{', '.join(packages)}: not installed, and apt-get cannot download them")
    for package in folder.glob("*.deb"):
        assert _run("dpkg", "-x", str(package), str(folder / "root")) is not None


def _needed(packages: Sequence[str]) -> list[str]:
    """The packages that an installation would bring; none if apt does not know them."""
    said = _run("apt-get", "-s", "install", "--no-install-recommends", *packages) or ""
    return [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]


def _run(*command: str, folder: Path | None = None) -> str | None:
    """Return the output of a command; None if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return done.stdout
