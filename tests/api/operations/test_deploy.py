"""Files to run the service with: what they name in it has to be there under that name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from stagewright.api.auth.access import OPEN_PATHS
from stagewright.api.settings.load import configure
from stagewright.api.settings.names import setting_names
from stagewright.api.settings.settings import ServerSettings
from stagewright.cli.main import build_app
from tests.api.app_routes import routes

KINDS = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
SECRETS = {
    "stagewright-secrets": {"token", "session_key", "database_password"},
    "stagewright-tls": {"ca.pem", "api.pem", "scheduler.pem", "worker.pem"},
}
"""What the manifests' own words say to make; keys of each."""

MARGIN_S = 5
"""Between the end of the grace and being killed."""


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith("STAGEWRIGHT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def compose(repository):
    return yaml.safe_load((repository / "docker" / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def manifests(repository):
    files = sorted((repository / "deploy" / "kubernetes").glob("*.yaml"))
    return [item for file in files for item in yaml.safe_load_all(file.read_text())]


def of_kind(manifests, kind):
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def container(deployment):
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def unit(repository, name):
    """A systemd unit's settings, in order; a name may come again."""
    text = (repository / "deploy" / "systemd" / name).read_text()
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def settings_from(variables, monkeypatch, tmp_path):
    """The settings of a server with these variables, files of secrets being there."""
    (tmp_path / "secret").write_text("a-secret-of-tests")
    known = {setting.variable for setting in setting_names()} | {"STAGEWRIGHT_CONFIG"}
    for name, value in variables.items():
        assert name in known, f"{name} is no setting"
        is_secret = name.endswith(("TOKEN_FILE", "PASSWORD_FILE"))
        plain = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value))
        monkeypatch.setenv(name, str(tmp_path / "secret") if is_secret else plain)
    return configure().settings


def seconds(text):
    return int(re.fullmatch(r"(\d+)s?", str(text))[1])


def check_words(command, words):
    """That a command takes the options among these words."""
    known = {name for parameter in command.params for name in parameter.opts}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given
    assert given <= known, f"no {given - known}"


def worker_command():
    return get_command(build_app()).commands["worker"]


def test_the_compose_files_settings_are_settings(compose, monkeypatch, tmp_path):
    api = compose["services"]["api"]
    variables = api["environment"]
    settings = settings_from(variables, monkeypatch, tmp_path)
    assert settings.token == "a-secret-of-tests"
    assert settings.database == "postgresql://stagewright:a-secret-of-tests@database/stagewright"
    assert settings.scheduler == ServerSettings().scheduler
    end_s = settings.drain_delay_s + settings.grace_s + MARGIN_S
    assert seconds(api["stop_grace_period"]) >= end_s
    for name in ("STAGEWRIGHT_TOKEN_FILE", "STAGEWRIGHT_DATABASE_PASSWORD_FILE"):
        assert Path(variables[name]).name in api["secrets"]


def test_the_compose_file_builds_what_there_is_and_holds_no_secret(compose, repository):
    folder = repository / "docker"
    services = compose["services"]
    built = {service["image"] for service in services.values() if "build" in service}
    for name, service in services.items():
        assert service["image"] in built | {"postgres:15"}
        if "build" in service:
            context = folder / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
        if name != "database":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
    ignored = (repository / ".gitignore").read_text().split()
    for secret in compose["secrets"].values():
        assert set(secret) == {"file"}
        assert f"/docker/{Path(secret['file']).parent.name}/" in ignored
    assert "/docker/tls/" in ignored
    passwords = [key for service in services.values() for key in service.get("environment", {})
                 if re.search("PASSWORD|TOKEN", key) and not key.endswith("_FILE")]  # fmt: skip
    assert passwords == []
    assert services["api"]["ports"][0].startswith("127.0.0.1:")
    assert [name for name, service in services.items() if service.get("profiles") == ["gpu"]] == [
        "scheduler", "worker",
    ]  # fmt: skip


def test_the_compose_file_is_valid_to_its_own_tool(repository):
    tools = (["docker", "compose"], ["docker-compose"])
    found = next((tool for tool in tools if works([*tool, "version"])), None)
    if found is None:
        pytest.skip("neither docker's compose plugin nor docker-compose is installed")
    done = subprocess.run(
        [*found, "--file", repository / "docker" / "compose.yaml", "--profile", "gpu", "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nvidia" in done.stdout


def works(command):
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_whatever_asks_after_health_asks_a_route(make_client, manifests, repository):
    known = {path for method, path in routes(make_client().app) if method == "GET"} & OPEN_PATHS
    asked = re.findall(r"\{address\}(/\w+)", (repository / "docker/healthcheck.py").read_text())
    for deployment in of_kind(manifests, "Deployment").values():
        probes = [value for key, value in container(deployment).items() if key.endswith("Probe")]
        asked += [probe["httpGet"]["path"] for probe in probes if "httpGet" in probe]
    assert set(asked) == {"/healthz", "/readyz"}
    assert set(asked) <= known
    api = container(of_kind(manifests, "Deployment")["stagewright-api"])
    assert api["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert api["livenessProbe"]["httpGet"]["path"] == "/healthz", "it is not asked for a database"


def test_workers_and_schedulers_are_started_with_flags_they_have(compose, manifests, repository):
    deployments = of_kind(manifests, "Deployment")
    slurm = (repository / "deploy" / "slurm" / "worker.sbatch").read_text()
    (systemd,) = [value for key, value in unit(repository, "stagewright-worker.service")
                  if key == "ExecStart"]  # fmt: skip
    for words in (
        compose["services"]["worker"]["command"],
        container(deployments["stagewright-worker-h200"])["args"],
        systemd.split()[1:],
        slurm[slurm.index('" worker') + 1 :].split(),
    ):
        assert words[0] == "worker"
        check_words(worker_command(), words)

    from distributed.cli.dask_scheduler import main as scheduler

    for words in (
        compose["services"]["scheduler"]["command"],
        container(deployments["stagewright-scheduler"])["args"],
    ):
        check_words(scheduler, [word.replace("--no-dash", "--dash") for word in words])


def test_the_manifests_are_of_kinds_there_are(manifests):
    for item in manifests:
        assert item["apiVersion"] == KINDS[item["kind"]]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", item["metadata"]["name"])
        assert "data" in item if item["kind"] == "ConfigMap" else "spec" in item
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    assert len(names) == len(set(names))


def test_what_a_manifest_selects_is_there(manifests):
    deployments = of_kind(manifests, "Deployment")
    labels = {name: item["spec"]["template"]["metadata"]["labels"]
              for name, item in deployments.items()}  # fmt: skip
    ports = {name: {port["name"] for port in container(item).get("ports", ())}
             for name, item in deployments.items()}  # fmt: skip

    def selected(selector):
        found = {name for name, have in labels.items() if selector.items() <= have.items()}
        assert found, selector
        return found

    for name, item in deployments.items():
        assert selected(item["spec"]["selector"]["matchLabels"]) == {name}
    for service in of_kind(manifests, "Service").values():
        (name,) = selected(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[name]
    for policy in of_kind(manifests, "NetworkPolicy").values():
        chosen = selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"].get("ingress", ()):
            for source in rule["from"]:
                if "podSelector" in source:
                    selected(source["podSelector"]["matchLabels"])
            for port in rule.get("ports", ()):
                assert all(port["port"] in ports[name] for name in chosen)
    closed = of_kind(manifests, "NetworkPolicy")["stagewright-nobody"]["spec"]
    assert "ingress" not in closed
    assert selected(closed["podSelector"]["matchLabels"]) == set(deployments)


def test_pods_have_what_they_mount_and_no_rights(manifests):
    configs = of_kind(manifests, "ConfigMap")
    for item in of_kind(manifests, "Deployment").values():
        pod = item["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = [mount["name"] for mount in container(item)["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                keys = {entry["key"] for entry in volume["secret"].get("items", ())}
                assert keys <= SECRETS[volume["secret"]["secretName"]]
            elif "configMap" in volume:
                assert volume["configMap"]["name"] in configs
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(item)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container(item)["resources"]["limits"]
    worker = container(of_kind(manifests, "Deployment")["stagewright-worker-h200"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_secrets_the_manifests_want_are_said_to_be_made(repository):
    words = (repository / "deploy" / "kubernetes" / "api.yaml").read_text().partition("\napi")[0]
    for name, keys in SECRETS.items():
        assert f"secret generic {name}" in words
        assert all(key in words for key in keys)


def test_the_settings_of_the_manifests_are_settings(manifests, monkeypatch, tmp_path):
    deployment = of_kind(manifests, "Deployment")["stagewright-api"]
    api = container(deployment)
    text = of_kind(manifests, "ConfigMap")["stagewright-settings"]["data"]["settings.toml"]
    mounted = {mount["mountPath"] for mount in api["volumeMounts"]}
    for value in re.findall(r'= "(/[^"]+)"', text):
        assert str(Path(value).parent) in mounted
    (variable,) = api["env"]
    assert (variable["name"], variable["value"]) == (
        "STAGEWRIGHT_CONFIG", "/settings/settings.toml"
    )  # fmt: skip
    (tmp_path / "secret").write_text("a-secret-of-tests")
    here = text.replace("/secrets/token", str(tmp_path / "secret"))
    here = here.replace("/secrets/session_key", str(tmp_path / "secret"))
    here = here.replace("/secrets/database_password", str(tmp_path / "secret"))
    (tmp_path / "settings.toml").write_text(here)
    settings = settings_from(
        {"STAGEWRIGHT_CONFIG": tmp_path / "settings.toml"}, monkeypatch, tmp_path
    )
    ports = {port["name"]: port["containerPort"] for port in api["ports"]}
    assert settings.port == ports["http"]
    assert settings.metrics_listen == f"0.0.0.0:{ports['metrics']}"
    services = of_kind(manifests, "Service")
    assert re.fullmatch(r"tls://([\w-]+):8786", settings.scheduler)[1] in services
    end_s = settings.drain_delay_s + settings.grace_s + MARGIN_S
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= end_s
    assert settings.drain_delay_s > api["readinessProbe"]["periodSeconds"], "or nobody notices"


@pytest.mark.parametrize("name", ["stagewright.service", "stagewright-worker.service"])
def test_systemd_units_are_valid_and_start_commands_there_are(repository, tmp_path, name):
    entries = unit(repository, name)
    starts = [value.split() for key, value in entries if key == "ExecStart"]
    assert [words[1] in get_command(build_app()).commands for words in starts] == [True]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (repository / "deploy" / "systemd" / name).read_text()
    copy = tmp_path / name
    copy.write_text(text.replace("/opt/stagewright/bin/stagewright", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, name in done.stderr) == (0, False), done.stderr


def test_the_servers_unit_has_settings_and_outlasts_the_grace(repository, monkeypatch, tmp_path):
    entries = unit(repository, "stagewright.service")
    variables = dict(value.split("=", 1) for key, value in entries if key == "Environment")
    settings = settings_from(variables, monkeypatch, tmp_path)
    assert settings.host == "127.0.0.1", "a proxy with TLS stands in front"
    (stop_s,) = [int(value) for key, value in entries if key == "TimeoutStopSec"]
    assert stop_s >= settings.drain_delay_s + settings.grace_s + MARGIN_S
    credential, _, _ = dict(entries)["LoadCredential"].partition(":")
    assert variables["STAGEWRIGHT_TOKEN_FILE"] == f"%d/{credential}"


def test_the_slurm_script_is_one(repository):
    script = repository / "deploy" / "slurm" / "worker.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(["bash", script], capture_output=True, text=True, env={}, check=False)
    assert done.returncode != 0
    assert "SCHEDULER=tls://HOST:8786" in done.stderr


def test_extras_of_the_image_are_extras(repository):
    pyproject = tomllib.loads((repository / "pyproject.toml").read_text())
    extras = set(pyproject["project"]["optional-dependencies"])
    for name in ("Dockerfile", "install-api.sh", "worker.Dockerfile"):
        text = (repository / "docker" / name).read_text()
        (found,) = re.findall(r"(?:EXTRAS=|\{3:-|/src\[)([a-z,]+)", text)
        assert set(found.split(",")) <= extras
        assert ("torch" in found) is False
