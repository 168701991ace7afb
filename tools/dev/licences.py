"""List the packages that an installation brings along, with their licences.

    python -m kvcascade.tools.dev.licences    print the table of docs/licences.md

Read from the metadata of the installed packages. vLLM and torch are not among them: whoever runs an
engine has chosen them already.
"""

from __future__ import annotations

import configparser
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageMetadata, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"
_CLASSIFIER = "License :: OSI Approved :: "
_SHORT = {
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "OpenLDAP Public License v2.8": "OLDAP-2.8",
    "The OpenLDAP Public License": "OLDAP-2.8",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
}
"""Names in metadata without an SPDX expression, and what they are called here."""


def required() -> list[str]:
    """Return the requirements of the package as written in `setup.cfg`."""
    parser = configparser.ConfigParser()
    parser.read(SETUP)
    return parser["options"]["install_requires"].split()


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that these requirements bring, by normalized name.

    Raises `PackageNotFoundError` if one is not installed.
    """
    found: dict[str, Distribution] = {}
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or not _applies(requirement):
            continue
        found[name] = distribution(requirement.name)
        todo += [Requirement(text) for text in found[name].requires or ()]
    return dict(sorted(found.items()))


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def licence(package: Distribution) -> str:
    """Return the licence of a package; "unknown" if its metadata does not say."""
    about = package.metadata
    if "License-Expression" in about:
        return about["License-Expression"]
    classifiers = about.get_all("Classifier") or []
    names = [text.removeprefix(_CLASSIFIER) for text in classifiers if _CLASSIFIER in text]
    text = " OR ".join(names) or _first_line(about)
    return _SHORT.get(text, text) or "unknown"


def _first_line(about: PackageMetadata) -> str:
    return about["License"].strip().partition("\n")[0] if "License" in about else ""


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| package | licence | needed by kvcascade itself |", "|---|---|---|"]
    direct = {canonicalize_name(Requirement(text).name) for text in required()}
    for name, package in closure(required()).items():
        lines.append(f"| {name} | {licence(package)} | {'yes' if name in direct else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    sys.exit(0)
