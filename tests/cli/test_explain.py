"""`explain` says in a table or as JSON what `stagewright.explain` finds."""

import pytest

from stagewright.core.explanation import Explanation
from stagewright.core.plan import Plan
from stagewright.planner.explain import explain


@pytest.fixture
def plan_file(run, profile_file, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", profile_file, "--devices", "2x1GiB", "-o", path).code == 0
    return path


def test_table_is_the_explanation(run, plan_file, profile_file, profile):
    ran = run("explain", plan_file, profile_file, "-d", "2x1GiB")
    assert ran.code == 0
    assert ran.stderr == (
        f"next: stagewright plan {profile_file} -d 2x1GiB --max-replicas any, with the plan's "
        "other options\n"
    )
    assert ran.stdout == f"{explain(Plan.read(plan_file), profile, '2x1GiB')}\n"
    assert "one more device" in ran.stdout
    assert "equal layers" in ran.stdout


def test_json_is_the_explanation(run, plan_file, profile_file):
    ran = run("explain", plan_file, profile_file, "-d", "2x1GiB", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = Explanation.model_validate_json(ran.stdout)
    assert found.step_time_s == Plan.read(plan_file).step_time_s


def test_a_plan_for_other_devices_is_refused(run, plan_file, profile_file):
    ran = run("explain", plan_file, profile_file, "-d", "2x2GiB")
    assert (ran.code, ran.stdout) == (2, "")
    assert "the plan does not hold" in ran.stderr


def test_arguments_in_the_wrong_order_are_named(run, plan_file, profile_file):
    ran = run("explain", profile_file, plan_file, "-d", "2x1GiB")
    assert ran.code == 2
    assert "expected stagewright.plan/1" in ran.stderr
