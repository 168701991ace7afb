"""Files that a public forge reads: workflows, forms for issues, and how to cite the project."""

from __future__ import annotations

import json
import logging
import logging.config
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.project import ROOT

from kvcascade.tools.dev.versions import RELEASES, Proof

FORGE = ROOT / ".github"
FORMS = sorted(path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
KINDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = load(FORGE / "workflows" / "ci.yml")["jobs"]
    return found


def test_the_matrix_is_every_version_that_is_run() -> None:
    run = [release.version for release in RELEASES if release.proof is Proof.ENGINE]
    assert jobs()["vllm"]["strategy"]["matrix"]["version"] == run


def test_the_matrix_is_every_python_of_the_metadata() -> None:
    listed = re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.M)
    assert jobs()["quick"]["strategy"]["matrix"]["python"] == listed


def test_jobs_end_and_call_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, job in jobs().items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            called = re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
            assert set(called) <= targets


def test_the_job_that_runs_all_tests_has_the_history_that_upgrades_are_tested_with() -> None:
    steps = jobs()["test"]["steps"]
    assert steps[0]["with"]["fetch-depth"] == 0 and steps[-1]["run"] == "make test"


@pytest.mark.parametrize("job", ["quick", "test"])
def test_jobs_install_the_tools_without_which_tests_skip(job: str) -> None:
    commands = "\n".join(step.get("run", "") for step in jobs()[job]["steps"])
    assert "install --yes prometheus" in commands and "dclint" in commands
    assert "pip install '.[checks]'" in commands


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_forms_have_what_the_forge_asks_for(form: Path) -> None:
    found = load(form)
    assert found["name"] and found["description"]
    names = [part["id"] for part in found["body"] if part["type"] != "markdown"]
    assert names and len(set(names)) == len(names)
    for part in found["body"]:
        assert part["type"] in KINDS
        assert part["attributes"].get("label" if part["type"] != "markdown" else "value")


def test_there_are_three_forms() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature", "measurement"]


def test_the_citation_has_what_the_format_asks_for() -> None:
    found = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert found["type"] == "software" and found["license"] == "Apache-2.0"


def test_vllm_logs_json_with_the_configuration_in_the_docs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((ROOT / "docs" / "deploy" / "logging.json").read_text())
    (name,) = config["loggers"]
    logger = logging.getLogger(name)
    before = logger.handlers, logger.level, logger.propagate
    try:
        logging.config.dictConfig(config)
        logger.info("started in %d s", 3)
    finally:
        logger.handlers, logger.level, logger.propagate = before
    assert json.loads(capsys.readouterr().out)["message"] == "started in 3 s"
