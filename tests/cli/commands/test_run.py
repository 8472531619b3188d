"""``run`` and ``demo``: training from a plan, beside the unsplit model."""

import json
from dataclasses import replace

import pytest

from stagewright.cli.commands import demo as demo_requests
from stagewright.cli.main import main
from stagewright.cli.support import launch_ranks
from stagewright.cli.support import launch_ranks as launch
from stagewright.cli.support.run_report import RunReport
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import plan
from stagewright.profiler.links import launch_local as local
from tests.torch_models import make_case, make_plan, traced_profile

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture
def trained_once(monkeypatch):
    """Whichever way a plan is trained, it is so once; later commands are given the same."""
    train, kept = launch.train, {}

    def train_once(plan, *, whole=False, **asked):
        if whole not in kept:
            kept[whole] = train(plan, whole=whole, **asked)
        return kept[whole]

    monkeypatch.setattr(launch, "train", train_once)


def test_a_planned_uneven_replication_is_run_from_its_file_compared_and_drawn(
    run, tmp_path, trained_once, forked_python
):
    """The commands of the documents start everything anew, in `tests/docs`."""
    profile = traced_profile(make_case("unet"))
    options = PlanOptions(num_stages=2, max_replicas=2, num_microbatches=4, recompute="always")
    made = plan(profile, Cluster.uniform(3), options)
    assert sorted(stage.replicas for stage in made.stages) == [1, 2]
    path, trace, svg = (tmp_path / name for name in ("plan.json", "trace.json", "step.svg"))
    made.write(path)
    words = ("run", path, "--compare", "--trace", trace, "--svg", svg)
    done = run(*words)
    assert done.code == 0, done.stderr
    assert "largest difference" in done.stderr
    processes = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert processes == {0, 1, 2, 3}
    assert "measured" in svg.read_text()
    found = json.loads(run(*words, "--json").stdout)
    assert len(found["split_losses"]) == len(found["whole_losses"]) == 3
    assert found["split_losses"][0] != found["split_losses"][-1]
    assert found["loss_difference"] <= 1e-5
    assert found["measured_step_s"] > 0


def test_a_model_of_ones_own_is_run_as_it_is_verified(run, tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(OWN_NET)
    monkeypatch.chdir(tmp_path)
    named = ("own_net:build", "--sample", "own_net:sample")
    graded = ("--loss", "own_net:loss", "--target", "own_net:target")
    assert run("profile", *named, "-o", "profile.json").code == 0
    planned = run(
        "plan", "profile.json", "-d", "2xCPU", "--stages", 2, "--microbatches", 4, "-o", "p.json"
    )
    assert planned.code == 0, planned.stderr
    # The loss is of the targets given, and batches differ from step to step.
    for words in (named, (*named, *graded)):
        done = run("run", "p.json", *words, "--compare", "--json")
        assert done.code == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["loss_difference"] <= 1e-5
        assert len(set(found["split_losses"])) == 3
        assert (min(found["split_losses"]) > 90) == (words is not named)


def test_a_machine_without_memory_for_the_processes_is_refused(run, tmp_path, monkeypatch):
    """It trained until the system ended it."""
    made = make_plan(make_case("unet"), 2)
    needed = []
    check = launch_ranks.check_memory
    monkeypatch.setattr(
        launch_ranks, "check_memory", lambda size, *told: needed.append(size) or check(size, *told)
    )
    launch_ranks.check_training_memory(made)
    (required,) = needed
    monkeypatch.setattr(launch_ranks, "free_memory_bytes", lambda: required)
    launch_ranks.check_training_memory(made)
    monkeypatch.setattr(launch_ranks, "free_memory_bytes", lambda: required - 1)
    made.write(tmp_path / "plan.json")
    refused = run("run", tmp_path / "plan.json")
    assert refused.code == 3
    assert "training takes 2 processes here, each with a copy of the model's" in refused.stderr
    assert "run the plan where there is more" in refused.stderr


OWN_NET = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

def sample():
    return torch.randn(4, 16)

def target():
    return torch.full((4, 16), 10.0)

def loss(output, target):
    return ((output - target) ** 2).mean()
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "stagewright run PLAN package.module:function --sample package.module:function"),
        (("net:build",), "name both the model and its sample: MODEL --sample"),
        (("net:build", "--sample", "net:sample", "--loss", "net:loss"), "given together"),
    ],
)
def test_run_needs_a_model_it_can_build(tmp_path, capsys, words, said):
    path = tmp_path / "plan.json"
    make_plan(make_case("mlp"), 2).model_copy(update={"spec": None}).write(path)
    assert main(["run", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_run_refuses_what_processes_do_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "_run", lambda command: pytest.fail("a process was started"))
    path = tmp_path / "plan.json"
    made = make_plan(make_case("mlp"), 2)
    order = tuple(reversed(range(len(made.layer_names))))
    made.model_copy(update={"layer_order": order}).write(path)
    assert main(["run", str(path)]) == 2
    found = capsys.readouterr()
    assert "--order given" in found.err
    assert "training" not in found.err


def comparison(split_losses):
    return RunReport("Net", (1, 1), 1.0, 1.0, (1.0,), split_losses, (2.0, 1.0), 1.0)


def test_a_loss_that_differs_is_an_error():
    comparison((2.0, 1.0 + 9e-6)).check()
    with pytest.raises(PlanMismatch, match="losses differ"):
        comparison((2.0, 1.0 + 2e-5)).check()
    with pytest.raises(PlanMismatch):
        comparison((float("nan"), 1.0)).check()


def test_a_prediction_far_off_is_remarked_upon():
    assert not replace(comparison((2.0, 1.0)), predicted_step_s=0.76).remarks()
    (remark,) = replace(comparison((2.0, 1.0)), predicted_step_s=0.74).remarks()
    assert "-26%" in remark


SMALL = {
    "model": {"family": "unet", "config": {"width": 4, "depth": 2}},
    "sample": {
        "inputs": {"x": {"shape": [1, 3, 32, 32]}},
        "target": {"shape": [1, 32, 32], "dtype": "int64", "fill": "randint", "high": 2},
    },
}


def test_demo_goes_the_whole_way(tmp_path, monkeypatch, capsys, forked_python):
    """Service, request, measurement, plan, picture, two processes, comparison: on a small model.

    The link between the processes is measured in `tests/profiler/links`.
    """
    monkeypatch.setattr(local, "measure_local_links", lambda ranks: Cluster.uniform(ranks))
    monkeypatch.setattr(demo_requests, "MODELS", {"small": SMALL})
    monkeypatch.setattr(demo_requests, "PROFILING", {**demo_requests.PROFILING, "budget_s": 0.1})
    assert main(["demo", "--models", "small", "-o", str(tmp_path / "out")]) == 0
    found = capsys.readouterr()
    heading, _, row = found.out.splitlines()
    assert heading.split()[:2] == ["model", "stages"]
    assert row.startswith("UNet")
    assert "proof:" in found.err
    plan = Plan.read(tmp_path / "out" / "small.plan.json")
    assert plan.num_stages == 2
    assert (tmp_path / "out" / "small.svg").read_text().startswith("<svg")


def test_demo_knows_its_models(capsys, tmp_path):
    assert main(["demo", "--models", "gpt9", "-o", str(tmp_path)]) == 2
    assert "gpt2, resnet50" in capsys.readouterr().err
