"""`explain` says in a table or as JSON what `stagewright.explain` finds."""

import shlex

import pytest

from stagewright.core.plan.explanation import Explanation
from stagewright.core.plan.plan import Plan
from stagewright.planner.explain import explain


@pytest.fixture
def plan_file(run, profile_file, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", profile_file, "--devices", "2x1GiB", "-o", path).code == 0
    return path


def test_table_is_the_explanation(run, plan_file, profile_file, profile):
    ran = run("explain", plan_file, profile_file, "-d", "2x1GiB")
    assert ran.code == 0
    words = "--microbatches 16 --schedule 1f1b --max-replicas any --precision fp32 --reserves none"
    assert ran.stderr == f"next: stagewright plan {profile_file} -d 2x1GiB {words}\n"
    assert ran.stdout == f"{explain(Plan.read(plan_file), profile, '2x1GiB')}\n"
    assert "one more device" in ran.stdout
    assert "equal layers" in ran.stdout


def test_what_is_next_keeps_the_plan_s_other_options(run, profile_file):
    options = ["-m", "16", "--optimizer", "sgd", "--pin", "rung.0=0", "--no-cut-after", "rung.0"]
    assert run("plan", profile_file, "-d", "2x1GiB", *options, "-o", "plan.json").code == 0
    ran = run("explain", "plan.json", profile_file, "-d", "2x1GiB")
    words = shlex.split(ran.stderr.removeprefix("next: stagewright "))
    assert words[:4] == ["plan", str(profile_file), "-d", "2x1GiB"]
    again = Plan.from_json(run(*words, "--json").stdout).options
    assert again == Plan.read("plan.json").options.model_copy(update={"max_replicas": None})


def test_json_is_the_explanation(run, plan_file, profile_file):
    ran = run("explain", plan_file, profile_file, "-d", "2x1GiB", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = Explanation.model_validate_json(ran.stdout)
    assert found.step_time_s == Plan.read(plan_file).step_time_s


def test_a_plan_for_other_devices_is_refused(run, plan_file, profile_file):
    ran = run("explain", plan_file, profile_file, "-d", "2x2GiB")
    assert (ran.code, ran.stdout) == (2, "")
    assert "the plan is not valid" in ran.stderr


def test_arguments_in_the_wrong_order_are_named(run, plan_file, profile_file):
    ran = run("explain", profile_file, plan_file, "-d", "2x1GiB")
    assert ran.code == 2
    assert "expected stagewright.plan/1" in ran.stderr


def test_a_plan_of_a_measured_profile_needs_that_profile(run, plan_file):
    """The message spoke of an estimate in the cache, which there never was."""
    ran = run("explain", plan_file)
    assert (ran.code, ran.stdout) == (2, "")
    assert "was made from a profile of its own" in ran.stderr
    assert "estimate" not in ran.stderr
