"""The files of docs/deploy are right: by the tools made for them, and against each other."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkers import checker, passes
from support.project import ROOT

from kvcascade.config.schema import CascadeConfig, parse
from kvcascade.tiers.policies import known_names

DEPLOY = ROOT / "docs" / "deploy"
CHART = DEPLOY / "helm"
KV = DEPLOY / "kv.json"
PROGRAM = "/etc/kvcascade/kv.json"
SHUTDOWN_S = 30


def settings(text: str) -> CascadeConfig:
    """Read a `--kv-transfer-config` as the engine does."""
    transfer = json.loads(text)
    assert transfer["kv_connector"] == "OffloadingConnector" and transfer["kv_role"] == "kv_both"
    return parse(transfer["kv_connector_extra_config"], known_names())


def instruction(name: str) -> list[str]:
    """Return the texts of one kind of instruction of the Dockerfile, lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.M)


@pytest.fixture
def vllm(tmp_path: Path) -> dict[str, str]:
    """Environment in which the program `vllm` prints its arguments as JSON."""
    program = tmp_path / "vllm"
    program.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def started(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the arguments that `vllm` gets."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments: list[str] = json.loads(done.stdout)
    return arguments


def gib(quantity: str) -> int:
    """Return a quantity in GiB; docker's GB are GiB, too."""
    return int(re.sub(r"(GiB|Gi|GB)$", "", quantity))


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return found


def chart_objects(*options: str) -> dict[str, Any]:
    """Return the objects of the chart by kind."""
    text = passes("helm", "template", "demo", CHART, *options)
    return {found["kind"]: found for found in yaml.safe_load_all(text) if found}


class TestTools:
    def test_dockerfile(self) -> None:
        passes("hadolint", DEPLOY / "Dockerfile")

    def test_compose(self) -> None:
        passes("dclint", DEPLOY / "compose.yml")

    def test_chart(self) -> None:
        passes("helm", "lint", "--strict", CHART)

    def test_objects_of_the_chart(self, tmp_path: Path) -> None:
        objects = tmp_path / "objects.yaml"
        objects.write_text(passes("helm", "template", "demo", CHART))
        passes("kubernetes-validate", "--strict", objects)

    @pytest.mark.parametrize("name", ["vllm.service", "kvcascade-store.service"])
    def test_unit(self, name: str) -> None:
        assert not passes("systemd-analyze", "verify", DEPLOY / "systemd" / name).strip()

    def test_workflows(self) -> None:
        passes(
            "check-jsonschema",
            *("--builtin-schema", "vendor.github-workflows"),
            *(ROOT / ".github" / "workflows").glob("*.yml"),
        )

    def test_workflows_by_their_own_linter(self) -> None:
        passes("actionlint", *(ROOT / ".github" / "workflows").glob("*.yml"))


class TestImage:
    def test_it_is_on_the_pinned_vllm(self) -> None:
        (version,) = re.findall(r"^VLLM_VERSION=(\S+)$", "\n".join(instruction("ARG")), re.M)
        assert f"vllm=={version}\n" in (ROOT / "tools/requirements/cuda.txt").read_text()
        assert "vllm/vllm-openai:v${VLLM_VERSION}" in instruction("FROM")

    def test_it_starts_the_server_with_the_configuration(self, vllm: dict[str, str]) -> None:
        (entry,) = instruction("ENTRYPOINT")
        command = [part.replace(PROGRAM, str(KV)) for part in json.loads(entry)]
        arguments = started(
            [*command, "a model", "--port", "1"], {**vllm, "SHUTDOWN_TIMEOUT_S": "7"}
        )
        assert arguments[:4] == ["serve", "a model", "--port", "1"]
        assert arguments[4:7] == ["--shutdown-timeout", "7", "--kv-transfer-config"]
        assert Path("/kv") in settings(arguments[7]).nvme[0].path

    def test_only_what_a_wheel_is_made_of_is_sent(self) -> None:
        lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        kept = {line[1:] for line in lines if line.startswith("!")}
        assert "*" in lines and all((ROOT / name).exists() for name in kept)
        build = {"kvcascade", "tiers", "manager", "handlers", "tools", "setup.cfg", "README.md"}
        assert build <= kept

    def test_the_health_check_is_a_program(self) -> None:
        (check,) = instruction("HEALTHCHECK")
        program, flag, code = json.loads(check.partition("CMD ")[2])
        assert (program, flag) == ("python3", "-c")
        compile(code, "HEALTHCHECK", "exec")
        assert "/health" in code


class TestCompose:
    def test_every_file_that_is_mounted_exists(self) -> None:
        mounts = [
            text.split(":")[0]
            for service in compose()["services"].values()
            for text in service.get("volumes", ())
            if text.startswith(".")
        ]
        assert len(mounts) == 6
        assert all((DEPLOY / mount).is_file() for mount in mounts)

    def test_memory_holds_the_tier_and_time_the_flush(self) -> None:
        service = compose()["services"]["vllm"]
        (environment,) = instruction("ENV")
        assert f"SHUTDOWN_TIMEOUT_S={SHUTDOWN_S}" in environment.split()
        assert service["stop_grace_period"] == "1m" and SHUTDOWN_S < 60
        capacity = str(settings(KV.read_text()).cpu.capacity)
        assert gib(service["shm_size"].upper()) > gib(capacity)

    def test_prometheus_asks_the_server_and_reads_the_alerts(self) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (scrape,) = config["scrape_configs"]
        assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
        assert "vllm" in compose()["services"] and config["rule_files"] == ["alerts.yml"]


class TestChart:
    def test_volumes_and_times(self) -> None:
        objects = chart_objects("--set", "shutdownTimeoutSeconds=100", "--set", "cache.cpuGiB=10")
        pod = objects["StatefulSet"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["enableServiceLinks"] is False, "a service named vllm would set VLLM_PORT"
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert pod["terminationGracePeriodSeconds"] > int(environment["SHUTDOWN_TIMEOUT_S"]) == 100
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        shm = volumes["shm"]["emptyDir"]
        assert shm["medium"] == "Memory" and gib(shm["sizeLimit"]) > 10
        assert gib(container["resources"]["limits"]["memory"]) > gib(shm["sizeLimit"])
        assert {each["mountPath"] for each in container["volumeMounts"]} == {
            *("/dev/shm", "/kv", "/etc/kvcascade")
        }
        config = settings(objects["ConfigMap"]["data"]["kv.json"])
        assert str(config.cpu.capacity) == "10GiB" and Path("/kv") in config.nvme[0].path
        assert "PodMonitor" not in objects

    def test_a_monitor_is_made_on_demand(self) -> None:
        objects = chart_objects("--set", "podMonitor=true")
        labels = objects["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
        wanted = objects["PodMonitor"]["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= labels.items()

    def test_the_pod_may_run_as_the_owner_of_the_folder(self) -> None:
        def context(*options: str) -> Any:
            objects = chart_objects(*options)
            return objects["StatefulSet"]["spec"]["template"]["spec"].get("securityContext")

        assert context() is None
        page = (DEPLOY / "README.md").read_text()
        (user,) = re.findall(r"`--set (podSecurityContext.runAsUser=\d+)`", page)
        assert context("--set", user) == {"runAsUser": 2000}, "a user of vLLM's image"
        assert "`chown -R 2000`" in page

    def test_every_value_is_in_the_schema_and_is_used(self) -> None:
        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        assert values["podSecurityContext"] == {}
        assert values.keys() == schema["properties"].keys() - {"global"}
        templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
        assert values.keys() == set(re.findall(r"\.Values\.(\w+)", templates))

    def test_wrong_values_are_refused(self) -> None:
        done = subprocess.run(
            [checker("helm"), "template", "demo", CHART, "--set", "cache.cpuGB=10"],
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and "cpuGB" in done.stderr


def test_the_unit_starts_the_server_and_waits_for_the_flush(vllm: dict[str, str]) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / "vllm.service")
    service = unit["Service"]
    shell, flag, code = shlex.split(service["ExecStart"])
    code = code.replace(PROGRAM, str(KV)).replace("/opt/vllm/bin/", "")
    environment = {**vllm, "MODEL": "m", "VLLM_ARGS": "--port 1 --seed 2"}
    arguments = started([shell, flag, code], environment)
    assert arguments[:4] == ["serve", "m", "--shutdown-timeout", str(SHUTDOWN_S)]
    assert arguments[-4:] == ["--port", "1", "--seed", "2"]
    assert int(service["TimeoutStopSec"]) > SHUTDOWN_S
    assert service["LimitMEMLOCK"] == "infinity"
