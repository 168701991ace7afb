"""What is installed elsewhere is the whole package, and nothing but the package."""

from __future__ import annotations

import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.project import FOLDERS, ROOT, module_files, python_files_outside_tests

CARRIED = ("kvcascade", *FOLDERS, "tests", "setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE")
OPTIONAL = ("README.md", "ARCHITECTURE.md", "FORMAT.md", "CHANGELOG.md", "Makefile", "docs", ".ci")

BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"

PROBE = """
import importlib.util, sys
from importlib import resources
import kvcascade, kvcascade.config, kvcascade.tiers.base, kvcascade.tools.__main__
assert kvcascade.__file__.startswith(sys.argv[1]), kvcascade.__file__
assert kvcascade.Backend is kvcascade.tiers.base.Backend
assert resources.files("kvcascade").joinpath("py.typed").is_file()
assert resources.files("kvcascade.tools").joinpath("requirements", "run.txt").is_file()
for name in ("tiers", "manager", "handlers", "tools", "tests"):
    assert importlib.util.find_spec(name) is None, name
assert importlib.util.find_spec("kvcascade.tools.dev") is None
assert kvcascade.tools.__main__.main(["demo"]) == kvcascade.tools.__main__.main(["bench"]) == 2
sys.exit(kvcascade.tools.__main__.main(["version"]))
"""


def setup_cfg() -> configparser.ConfigParser:
    """The package's metadata as written."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def product_files() -> dict[str, Path]:
    """Every module of the wheel: those of `tools/dev` stay in the repository."""
    everything = module_files()
    product = {n: p for n, p in everything.items() if not n.startswith("kvcascade/tools/dev/")}
    assert 0 < len(product) < len(everything)
    return product


def run(*command: str | Path, cwd: Path) -> str:
    """Run Python in `cwd` without this checkout on its path; returns what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_links(folder: str) -> None:
    link = ROOT / "kvcascade" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {Path(name).parent.as_posix() for name in product_files()}
    listed = setup_cfg()["options"]["packages"].split()
    assert sorted(folder.replace("/", ".") for folder in folders) == sorted(listed)
    everywhere = {Path(name).parent.as_posix() for name in module_files()}
    missing = {folder for folder in everywhere if f"{folder}/__init__.py" not in module_files()}
    assert not missing


def test_tests_import_this_checkout() -> None:
    for folder in FOLDERS:
        spec = importlib.util.find_spec(f"kvcascade.{folder}")
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).resolve() == ROOT / folder / "__init__.py"
    assert (ROOT / "kvcascade" / "py.typed").is_file()


def test_pins_are_exact_and_meet_the_metadata() -> None:
    pinned = set()
    for path in sorted((ROOT / "tools" / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement:
                assert "==" in requirement.partition(";")[0], f"{path.name}: {line} is not pinned"
                pinned.add(requirement.partition("==")[0].lower().replace("_", "-"))
    needed = setup_cfg()["options"]["install_requires"].split()
    assert {name.partition(">")[0] for name in needed} <= pinned


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("tree") / "kvcascade-copy"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".hypothesis")
    for name in (*CARRIED, *OPTIONAL):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
        elif source.is_file() or name in CARRIED:
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """The wheel of the checkout."""
    built = run("-c", BUILD.format(kind="wheel"), tree / "dist", cwd=tree).split()[-1]
    return tree / "dist" / built


@pytest.fixture(scope="module")
def sdist(tree: Path, wheel: Path) -> Path:
    """The source distribution of the checkout; after the wheel, which writes to the same folder."""
    built = run("-c", BUILD.format(kind="sdist"), tree / "dist", cwd=tree).split()[-1]
    return tree / "dist" / built


def install(package: Path, target: Path, cwd: Path) -> str:
    """Install a wheel or sdist into a folder of its own and use it from there."""
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--target", target, package, cwd=cwd)
    path = f"import sys; sys.path.insert(0, {str(target)!r})"
    return run("-P", "-c", f"{path}\n{PROBE}", target, cwd=cwd)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    data = {f"kvcascade/tools/requirements/{p.name}" for p in ROOT.glob("tools/requirements/*.txt")}
    assert inside == {*product_files(), *data, "kvcascade/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_holds_the_tests_too(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "tests/test_tidy.py", "setup.cfg", "LICENSE"} <= names
    sources = {path.relative_to(ROOT).as_posix() for path in module_files().values()}
    assert len(sources) == len(python_files_outside_tests())
    assert sources <= names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    assert "kvcascade 0." in install(wheel, tmp_path / "site", tmp_path)


def test_sdist_works_elsewhere(sdist: Path, tmp_path: Path) -> None:
    assert "kvcascade 0." in install(sdist, tmp_path / "site", tmp_path)
