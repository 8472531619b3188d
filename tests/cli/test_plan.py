"""`plan` from files to files."""

import inspect
import json

import pytest

from stagewright.cli.plan import command
from stagewright.core.plan import Plan, PlanOptions


def test_table_on_stdout_and_the_way_on_on_stderr(run, profile_file):
    ran = run("plan", profile_file, "--devices", "2x1GiB", "-o", "plan.json")
    assert ran.code == 0, ran.stderr
    plan = Plan.read("plan.json")
    assert ran.stdout == f"{plan}\n"
    assert ran.stderr.splitlines() == [
        "wrote plan.json",
        "next: stagewright show plan.json --svg plan.svg",
    ]


def test_json_is_the_plan_and_nothing_else(run, profile_file, cluster_file):
    ran = run("plan", profile_file, "--devices", cluster_file, "--json", "--stages", "2")
    assert (ran.code, ran.stderr) == (0, "")
    plan = Plan.from_json(ran.stdout)
    assert sum(plan.balance) == 4
    assert plan.num_stages == 2


def test_options_reach_the_plan(run, profile_file):
    words = ["--microbatches", "4", "--schedule", "gpipe", "--optimizer", "sgd"]
    ran = run("plan", profile_file, "-d", "2xcpu", *words, "--json")
    options = Plan.from_json(ran.stdout).options
    assert options == PlanOptions(num_microbatches=4, schedule="gpipe", optimizer="sgd")


def test_defaults_are_those_of_the_library():
    names = {"microbatches": "num_microbatches", "stages": "num_stages"}
    parameters = inspect.signature(command).parameters
    for name in ("microbatches", "schedule", "stages", "optimizer", "memory_fraction"):
        default = PlanOptions.model_fields[names.get(name, name)].default
        assert parameters[name].default == default, name


def test_too_little_memory_is_infeasible(run, profile_file):
    ran = run("plan", profile_file, "-d", "2x0.000001GiB", "-o", "plan.json", "--json")
    assert (ran.code, ran.stdout) == (3, "")
    error = json.loads(ran.stderr)
    assert error["error"] == "Infeasible"
    assert error["constraint"] == "memory"
    assert error["required"] > error["available"]


def test_ways_out_are_told_with_their_step(run, profile_file):
    words = ["plan", profile_file, "-d", "1x12MiB", "--schedule", "gpipe", "--optimizer", "none"]
    ran = run(*words)
    assert ran.code == 3
    assert "it would fit with 4 devices: 114 ms a step, or num_microbatches=1: 30 ms a step of " \
        "0.125 times the samples, or schedule='1f1b': 240 ms a step" in ran.stderr  # fmt: skip
    ways_out = json.loads(run(*words, "--json").stderr)["ways_out"]
    assert {"text": "schedule='1f1b'", "step_time_s": 0.24} in ways_out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.json", "-d", "2xcpu"], "cannot read absent.json"),
        (["ladder.json", "-d", "many"], "cannot read devices 'many'"),
        (["ladder.json", "-d", "absent.json"], "cannot read absent.json"),
        (["cluster.json", "-d", "2xcpu"], "cluster.json is stagewright.cluster/1"),
        (["ladder.json", "-d", "ladder.json"], "expected stagewright.cluster/1"),
        (["ladder.json", "-d", "2xcpu", "--schedule", "fifo"], "/schedule"),
        (["ladder.json", "-d", "2xcpu", "-m", "0"], "/num_microbatches"),
        (["ladder.json", "-d", "2xcpu", "-o", "absent/plan.json"], "no folder absent"),
        (["ladder.json", "-d", "2xcpu", "-o", "."], "not a regular file"),
        (["text.json", "-d", "2xcpu"], "text.json is not JSON"),
        (["other.json", "-d", "2xcpu"], "other.json is JSON without a schema_version"),
        (["broken.json", "-d", "2xcpu"], "/layers: Field required"),
    ],
)
@pytest.mark.usefixtures("profile_file", "cluster_file")
def test_wrong_requests_are_usage_errors(run, tmp_path, words, said):
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text('{"schema_version": "stagewright.profile/1"}')
    before = set(tmp_path.iterdir())
    ran = run("plan", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert set(tmp_path.iterdir()) == before
