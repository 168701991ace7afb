"""What is installed elsewhere is the whole package, and nothing but the package."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.checkers import checker
from support.project import FOLDERS, ROOT, module_files, python_files_outside_tests

import kvcascade
from kvcascade.tools.dev import licences

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
for name in ("tiers", "manager", "handlers", "tools", "tests"):
    assert importlib.util.find_spec(name) is None, name
assert importlib.util.find_spec("kvcascade.tools.dev") is None
assert kvcascade.tools.__main__.main(["demo"]) == kvcascade.tools.__main__.main(["bench"]) == 2
sys.exit(kvcascade.tools.__main__.main(["version"]))
"""


BARE = """
import sys
sys.path[:0] = sys.argv[1:3]
sys.argv = ["kvcascade", *sys.argv[3:]]
from kvcascade.tools.__main__ import main
sys.exit(main())
"""
"""Runs the command line from two folders, and otherwise the standard library alone."""
PLACES_OF_THE_VERSION = {
    "CITATION.cff": r"(?m)^version: (\S+)$",
    "docs/deploy/helm/Chart.yaml": r'(?m)^appVersion: "(\S+)"$',
    "docs/deploy/helm/values.yaml": r'(?m)^  tag: "(\S+)"$',
}
"""Files that must repeat the version, since other tools read them."""


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


def test_every_extra_that_is_named_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *product_files().values()]
    named = {name for p in pages for name in re.findall(r"kvcascade\[([a-z0-9]+)\]", p.read_text())}
    assert {"s3", "valkey", "encryption"} <= named <= {*setup_cfg()["options.extras_require"]}


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
    assert inside == {*product_files(), "kvcascade/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_holds_the_tests_too(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "tests/test_tidy.py", "setup.cfg", "LICENSE"} <= names
    assert {f"tools/requirements/{p.name}" for p in ROOT.glob("tools/requirements/*.txt")} <= names
    sources = {path.relative_to(ROOT).as_posix() for path in module_files().values()}
    assert len(sources) == len(python_files_outside_tests())
    assert sources <= names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    assert "kvcascade 0." in install(wheel, tmp_path / "site", tmp_path)


def test_sdist_works_elsewhere(sdist: Path, tmp_path: Path) -> None:
    assert "kvcascade 0." in install(sdist, tmp_path / "site", tmp_path)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Python with the wheel and with the packages that it requires, and with no others."""
    site = tmp_path_factory.mktemp("bare") / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", site, wheel, cwd=site.parent)
    needed = site.parent / "needed"
    needed.mkdir()
    for package in licences.closure(licences.required()).values():
        tops = {path.parts[0] for path in package.files or () if path.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (needed / top).exists():
                (needed / top).symlink_to(Path(str(package.locate_file(top))))
    return ["-I", "-S", "-c", BARE, str(site), str(needed)]


def test_the_command_line_needs_what_the_metadata_names_and_nothing_else(
    bare: list[str], tmp_path: Path
) -> None:
    assert f"kvcascade {kvcascade.__version__}" in run(*bare, "version", cwd=tmp_path)
    listed = run(*bare, "--help", cwd=tmp_path)
    assert all(command in listed for command in ("inspect", "verify", "check", "replay"))
    config = {"tiers": [{"type": "cpu", "capacity": "64MiB"}]}
    (tmp_path / "kv.json").write_text(json.dumps(config))
    shape = ("--kv-bytes-per-token", "65536")
    assert "cpu" in run(*bare, "check", "kv.json", *shape, cwd=tmp_path)


def test_the_version_is_written_once() -> None:
    assert setup_cfg()["metadata"]["version"] == "attr: kvcascade.__version__"
    for name, pattern in PLACES_OF_THE_VERSION.items():
        (found,) = re.findall(pattern, (ROOT / name).read_text())
        assert found == kvcascade.__version__, name
    assert f"\n## {kvcascade.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_metadata_finds_readers(wheel: Path) -> None:
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/METADATA")]
    about = message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert about["License-Expression"] == "Apache-2.0" and about["Author"]
    assert "kv-cache" in about["Keywords"].split(",")
    topics = [text for text in about.get_all("Classifier") or () if text.startswith("Topic ::")]
    assert "Topic :: Scientific/Engineering :: Artificial Intelligence" in topics
    required = [text for text in about.get_all("Requires-Dist") or () if "extra ==" not in text]
    assert sorted(required) == sorted(licences.required())


def test_an_index_takes_both_files(wheel: Path, sdist: Path) -> None:
    twine = checker("twine")
    done = subprocess.run(
        [twine, "check", "--strict", str(wheel), str(sdist)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_uv_installs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    uv = checker("uv")
    target = tmp_path / "site"
    options = ("--no-deps", "--no-index", "--offline", "--no-config", "--python", sys.executable)
    done = subprocess.run(
        [uv, "pip", "install", *options, "--target", str(target), str(wheel)],
        capture_output=True,
        text=True,
        env={**os.environ, "UV_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    path = f"import sys; sys.path.insert(0, {str(target)!r})"
    assert "kvcascade 0." in run("-P", "-c", f"{path}\n{PROBE}", target, cwd=tmp_path)


def test_licences_of_what_an_installation_brings_are_listed() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    marked = f"<!-- begin: python -m {licences.__name__} -->\n{licences.table()}\n<!-- end -->"
    assert marked in page, "run the command in the page"
    assert "unknown" not in licences.table()
    assert {canonicalize_name(name) for name in licences.closure(["numpy"])} == {"numpy"}
