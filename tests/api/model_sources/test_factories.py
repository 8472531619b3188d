"""Registered models: the name and arguments come from the request, what is imported never does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.api.model_sources import measure
from stagewright.api.model_sources.factories import read_factories
from stagewright.api.model_sources.measure import MeasuringSetup, measure_confined
from stagewright.api.sandbox.bubblewrap import find_sandbox
from stagewright.api.settings.settings import ServerSettings
from stagewright.core.errors import InvalidInput, MeasurementError, Refused
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import FactoryCall, MeasureRequest
from stagewright.profiler.factory_worker import measure_factory
from stagewright.profiler.measure_worker import measure_here

CORP = """
from torch import nn

def ranker(num_layers=1, width=8):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

def broken():
    raise RuntimeError("no licence")
"""

REGISTERED = """
plain = "corp_models.ranking:ranker"

[ranker]
import = "corp_models.ranking:ranker"
path = ["FOLDER"]
description = "The ranking model."

[ranker.arguments]
required = ["num_layers"]

[ranker.arguments.properties]
num_layers = { type = "integer", minimum = 1, maximum = 48 }
width = { enum = [8, 16] }
"""

SAMPLE = {"inputs": {"input": {"shape": [4, 8]}}}


@pytest.fixture
def factories_file(tmp_path) -> Path:
    package = tmp_path / "models" / "corp_models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ranking.py").write_text(CORP)
    file = tmp_path / "factories.toml"
    file.write_text(REGISTERED.replace("FOLDER", str(package.parent)))
    return file


@pytest.fixture
def setup(factories_file) -> MeasuringSetup:
    return MeasuringSetup.from_settings(
        ServerSettings(token=None, factories_file=factories_file, sandbox="off")
    )


def asking(name: str = "ranker", **arguments: object) -> MeasureRequest:
    call = FactoryCall.model_validate({"name": name, "arguments": arguments})
    return MeasureRequest.model_validate(
        {"factory": call, "sample": SAMPLE, "profiling": {"budget_s": 0.05}}
    )


def test_what_is_registered_is_listed_without_what_it_imports(make_client, factories_file):
    answer = make_client(factories_file=factories_file).get("/v1/capabilities")
    plain, ranker = answer.json()["factories"]
    assert plain["name"] == "plain"
    assert plain["arguments_schema"] == {"type": "object", "additionalProperties": False}
    assert ranker["description"] == "The ranking model."
    assert ranker["arguments_schema"]["properties"]["num_layers"]["maximum"] == 48
    (tier,) = (tier for tier in answer.json()["models"] if tier["name"] == "factory")
    assert tier["available"]
    assert tier["runs_code"] == "the administrator's"
    assert "corp_models" not in answer.text


def test_off_until_something_is_registered(client):
    (tier,) = (
        tier
        for tier in client.get("/v1/capabilities").json()["models"]
        if tier["name"] == "factory"
    )
    assert not tier["available"]
    body = {"factory": {"name": "os.system"}, "sample": SAMPLE, "cluster": "2xcpu"}
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["pointer"] == "/factory/name"
    assert "it has: none" in error["detail"]


REFUSED = [
    ({"name": "nonesuch"}, "/factory/name", "it has: plain, ranker"),
    ({"name": "corp_models.ranking:ranker"}, "/factory/name", "match"),
    ({"name": "../ranker"}, "/factory/name", "match"),
    ({"name": "ranker", "import": "os:system"}, "/factory/import", "unknown field"),
    ({"name": "ranker", "arguments": {}}, "/factory/arguments", "'num_layers' is a required"),
    ({"name": "ranker", "arguments": {"num_layers": 49}}, "/factory/arguments/num_layers", "49"),
    ({"name": "ranker", "arguments": {"num_layers": True}}, "/factory/arguments/num_layers", "typ"),
    (
        {"name": "ranker", "arguments": {"num_layers": 1, "__class__": 1}},
        "/factory/arguments",
        "Additional properties",
    ),
    ({"name": "plain", "arguments": {"width": 8}}, "/factory/arguments", "Additional properties"),
    (
        {"name": "ranker", "arguments": {"num_layers": 1, "width": "x" * 70_000}},
        "/factory/arguments",
        "over 65536 bytes",
    ),
]


@pytest.mark.parametrize(("factory", "pointer", "words"), REFUSED)
def test_what_does_not_fit_its_registration_is_refused(
    make_client, factories_file, factory, pointer, words
):
    client = make_client(factories_file=factories_file)
    for path, further in (("/v1/plans", {"cluster": "2xcpu"}), ("/v1/profile-jobs", {})):
        response = client.post(path, json={"factory": factory, "sample": SAMPLE, **further})
        assert response.status_code == 422, response.text
        error = response.json()["errors"][0]
        assert error["pointer"] == pointer
        assert words in error["detail"]


def test_it_is_built_and_measured(setup):
    """In this process; `test_it_is_measured_in_the_sandbox` has the same child in its sandbox."""
    target = {"ranker": setup.factories["ranker"].target}
    allowed = argparse.Namespace(factory=target, path=list(setup.factories["ranker"].path))
    before = [*sys.path]
    try:
        profile = measure_factory(asking(num_layers=3), allowed)
        allowed.factory = {"ranker": "corp_models.ranking:broken"}
        with pytest.raises(MeasurementError, match="'ranker' raised RuntimeError: no licence"):
            measure_factory(asking(), allowed)
        allowed.factory = {"ranker": "corp_models.nonesuch:ranker"}
        with pytest.raises(MeasurementError, match="ModuleNotFoundError"):
            measure_factory(asking(), allowed)
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.startswith("corp_models")]:
            del sys.modules[name]
    assert [entry.layer.name for entry in profile.layers] == ["0", "1", "2"]


def test_it_is_measured_in_the_sandbox(setup):
    try:
        find_sandbox()
    except Refused as error:
        pytest.skip(f"no sandbox can be had here: {error}")
    profile = measure_confined(asking(num_layers=2), replace(setup, sandbox="required"))
    assert [entry.layer.name for entry in profile.layers] == ["0", "1"]


def test_what_the_child_answers_instead_of_a_profile_is_the_factorys_fault(setup, monkeypatch):
    monkeypatch.setattr(measure, "FACTORY_COMMAND", (sys.executable, "-c", "print('{}')"))
    with pytest.raises(MeasurementError, match="ended its process before it was measured"):
        measure_confined(asking(num_layers=2), setup)


def test_the_child_runs_only_what_its_command_line_allows():
    allowed = argparse.Namespace(factory={}, path=[])
    with pytest.raises(InvalidInput, match="not allowed to run"):
        measure_factory(asking(), allowed)
    with pytest.raises(InvalidInput, match="by a service that registers it") as caught:
        measure_here(asking())
    assert caught.value.field == "/factory"


def test_a_factory_that_makes_no_module_is_refused():
    allowed = argparse.Namespace(factory={"ranker": "builtins:dict"}, path=[])
    with pytest.raises(InvalidInput, match=r"returned a dict, not an nn\.Module"):
        measure_factory(asking(), allowed)
    allowed.factory = {"ranker": "sys:exit"}
    with pytest.raises(MeasurementError, match="raised SystemExit"):
        measure_factory(asking(), allowed)


def test_code_is_refused(client):
    code = {"source": "raise AssertionError('ran')", "entry": "build"}
    for path, further in (("/v1/plans", {"cluster": "2xcpu"}), ("/v1/profile-jobs", {})):
        response = client.post(path, json={"code": code, "sample": SAMPLE, **further})
        assert response.status_code == 422, response.text
        (error,) = response.json()["errors"]
        assert error["pointer"] == "/code"
    assert "code" not in {tier["name"] for tier in client.get("/v1/capabilities").json()["models"]}


def test_what_is_imported_stands_on_the_childs_command_line(setup, monkeypatch, profile):
    """A stand-in for the child answers with the arguments it was started with."""
    program = (
        "import json, sys\n"
        f"profile = json.loads({Profile.model_validate(profile).to_json()!r})\n"
        "profile['notes'] = [*sys.argv[1:], sys.stdin.read()]\n"
        "json.dump(profile, sys.stdout)"
    )
    monkeypatch.setattr(measure, "FACTORY_COMMAND", (sys.executable, "-c", program))
    *words, request = measure_confined(asking(num_layers=2), setup).notes
    folder = setup.factories["ranker"].path[0]
    assert words == ["--factory", "ranker=corp_models.ranking:ranker", "--path", folder]
    assert "corp_models" not in request
    with pytest.raises(InvalidInput, match="49 is greater than the maximum"):
        measure_confined(asking(num_layers=49), setup)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranker = ", "cannot be read"),
        ('ranker = "corp_models.ranking"', "import: String should match"),
        ('ranker = "os;import x:y"', "import: String should match"),
        ('"../x" = "a:b"', "name: String should match"),
        ('[ranker]\nimport = "a:b"\nkwargs = 1', "kwargs: Extra inputs"),
        ('[ranker]\nimport = "a:b"\narguments = {type = "objekt"}', "are not a JSON Schema"),
    ],
)
def test_a_registration_that_does_not_fit_stops_the_server(tmp_path, text, words):
    file = tmp_path / "factories.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        read_factories(file)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_factories(tmp_path / "nonesuch.toml")


def test_what_goes_with_a_registered_model_is_said(make_client, factories_file):
    client = make_client(factories_file=factories_file)
    body = {"factory": {"name": "plain"}, "cluster": "2xcpu"}
    for further, pointer, words in (
        ({}, "/sample", "measured with a sample"),
        ({"sample": SAMPLE, "estimate": {}}, "/estimate", "measured, not estimated"),
    ):
        response = client.post("/v1/plans", json={**body, **further})
        (error,) = response.json()["errors"]
        assert error["pointer"] == pointer
        assert words in error["detail"]
