"""Losses that modules keep as attributes, once traced away: 0.04 for a loss instead of 3.63."""

import copy
import json
import re

import pytest
import torch
from torch import nn

import stagewright
from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.engine.aux_losses import AuxLoss, AuxLossReader
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from stagewright.runtime.verify import verify
from tests.runtime.aux_losses_worker import (
    ROWS,
    WEIGHT,
    WIDTH,
    Experts,
    Net,
    loss_fn,
    make_data,
    make_net,
    plan_of,
    unsplit,
)
from tests.runtime.forked import MANNERS, run_as_on_nccl, run_worker

DECLARED = {"*.aux": WEIGHT}
EXACT = 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "gpipe"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_ranks_compute_what_the_model_computes(schedule, recompute):
    model = make_net()
    plan = plan_of(model, [2, 3], schedule=schedule, recompute=recompute)
    x, target = make_data()
    model(x)  # leaves tensors with a graph, which deepcopy refuses
    assert verify(model, plan, x, target, loss_fn, aux_losses=DECLARED).equal(EXACT)
    other = verify(model, plan, x, target, loss_fn, aux_losses={"*.aux": 0})
    assert other.equal(EXACT)
    assert "blocks.0.router.weight" in other.gradients


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_one_process_computes_what_the_model_computes(checkpoint, devices):
    model = make_net()
    whole = copy.deepcopy(model)
    expected = unsplit(whole)
    pipeline = Pipeline(
        model, plan_of(model, [2, 3]), checkpoint=checkpoint, devices=devices, aux_losses=DECLARED
    )
    training = Training(pipeline, loss_fn=loss_fn)
    x, target = make_data()
    assert float(training.step(x, target=target)) == pytest.approx(expected, rel=EXACT)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=EXACT, atol=EXACT)
    assert all(not block.aux.requires_grad for block in model.blocks)  # no graph outlives a step
    _, alone = training.evaluate(x, target=target)
    assert float(alone) == pytest.approx(float(loss_fn(whole(x), target).detach()))
    training.train(False)
    training.evaluate(x)
    assert float(pipeline.aux_loss) == 0


def test_an_attribute_declared_as_no_loss_is_left_as_it_is():
    model = make_net()
    declared = {"blocks.0.aux": 1, "*.aux": 0}
    pipeline = Pipeline(model, plan_of(model, [2, 3]), checkpoint="never", aux_losses=declared)
    x, target = make_data()
    Training(pipeline, loss_fn=loss_fn).step(x, target=target)
    assert [block.aux.requires_grad for block in model.blocks] == [False, True, True, True]


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("replicas", "recompute", "strategy"),
    [([2, 1], "always", None), ([1, 2], "never", "fully_shard"), ([1, 2], "always", "ddp")],
)
def test_processes_compute_what_the_model_computes(
    forking_executable, replicas, recompute, strategy
):
    variant = {
        "balance": [2, 3], "replicas": replicas, "recompute": recompute, "strategy": strategy
    }  # fmt: skip
    words = json.dumps(variant)
    found = run_as_on_nccl(
        forking_executable, "tests.runtime.aux_losses_worker", "3", words, timeout_s=100
    )
    lines = [json.loads(line) for line in found.splitlines()]
    assert len(lines) == 3
    assert max(line["worst"] for line in lines) <= EXACT
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert len(losses) == replicas[-1]
    assert max(losses) <= EXACT
    assert max(abs(line["alone"]) for line in lines if line["alone"] is not None) <= EXACT


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("manners", ["gloo", "as on NCCL"])
def test_a_loss_that_is_nan_on_another_stage_than_the_last_is_refused(
    forking_executable, monkeypatch, tmp_path, manners
):
    """It reaches no other stage: neither outputs nor gradients that are sent hold it."""
    if manners == "as on NCCL":  # where the other rank would wait for ever
        monkeypatch.setenv(MANNERS, str(tmp_path))
    variant = {"balance": [2, 3], "is_poisoned": True}
    found = run_worker(
        forking_executable, "tests.runtime.aux_losses_worker", "2", json.dumps(variant),
        timeout_s=100,
    )  # fmt: skip
    lines = [json.loads(line) for line in found.splitlines()]
    assert len(lines) == 2
    assert all(
        "the loss of micro-batch 0, on stage 0, is infinite or NaN" in line["error"]
        for line in lines
    )


def test_what_is_not_declared_is_refused_and_noted():
    model = make_net()
    captured = trace(model, torch.randn(ROWS, WIDTH).double())
    assert captured.program.losses == tuple(f"blocks.{index}.aux" for index in range(4))
    assert "leaves a number with a gradient in blocks.0.aux" in str(captured.report())
    with pytest.raises(InvalidInput, match=r"blocks\.0\.aux.*pass aux_losses=\['\*\.aux'\],"):
        Pipeline(model, plan_of(model, [2, 3]))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (["*.balance"], "matches no attribute"),
        ("*.aux", r"pass a list: \['\*\.aux'\]"),
        ({"*.aux": float("nan")}, "pass a finite weight"),
        (["blocks.0.aux"], r"in blocks\.1\.aux, blocks\.2\.aux, blocks\.3\.aux, as auxiliary"),
    ],
)
def test_declarations_are_checked(declared, words):
    model = make_net()
    with pytest.raises(InvalidInput, match=words):
        Pipeline(model, plan_of(model, [2, 3]), aux_losses=declared)


class Counting(Experts):
    """Leaves the number of samples of each expert, for other code to read."""

    def forward(self, x):
        self.load = self.router(x).argmax(-1).bincount(minlength=3)
        return super().forward(x)


def test_other_tensors_left_in_attributes_are_set_by_a_pipeline_too():
    model = make_net()
    model.blocks[1] = Counting().double()
    captured = trace(model, torch.randn(ROWS, WIDTH).double())
    assert captured.program.opaque["blocks.1"].startswith("leaves a tensor in 'blocks.1.")
    Pipeline(model, plan_of(model, [2, 3]), aux_losses=DECLARED)(make_data()[0])
    assert int(model.blocks[1].load.sum()) == ROWS


class Sometimes(Experts):
    """Sets its loss in every other step."""

    def forward(self, x):
        old, self.turns = self.aux, not getattr(self, "turns", False)
        y = super().forward(x)
        if not self.turns:
            self.aux = old
        return y


def test_a_loss_that_is_missing_is_refused_in_the_step():
    model = make_net()
    model.blocks[2] = Sometimes().double()
    pipeline = Pipeline(model, plan_of(model, [2, 3]), aux_losses=DECLARED)
    with pytest.raises(InvalidInput, match=r"'blocks\.2\.aux' was not set in this forward"):
        pipeline(make_data()[0])


@pytest.mark.parametrize(
    ("value", "words"), [(torch.ones(6), r"has shape \(6,\)"), ([torch.ones(())], "is a list")]
)
def test_a_loss_that_is_no_single_number_is_refused(value, words):
    model = nn.Sequential(Experts())
    reader = AuxLossReader(model, [AuxLoss("0", "aux", 1.0)])
    with pytest.raises(InvalidInput, match=rf"'0\.aux' {words}"):
        reader.run(lambda: setattr(model[0], "aux", value))


class OfTheRoot(Net):
    def forward(self, x):
        y = super().forward(x)
        self.total = y.square().mean()
        return y


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.experts(torch.relu(self.experts(x))))


def test_losses_that_a_pipeline_cannot_read_are_refused():
    torch.manual_seed(0)
    root = OfTheRoot().double()
    plan = plan_of(root, [2, 3])
    with pytest.raises(InvalidInput, match="'total' is set by the model's own forward"):
        Pipeline(root, plan, aux_losses=["*.aux", "total"])
    Pipeline(root, plan, aux_losses={"*.aux": 1, "total": 0})
    with pytest.raises(InvalidInput, match=r"pass aux_losses=\['total', '\*\.aux'\],"):
        Pipeline(root, plan)
    twice = CalledTwice().double()
    layers = len(trace(twice, torch.randn(ROWS, WIDTH).double()).layers)
    with pytest.raises(InvalidInput, match=r"called on several stages \(0, 1\)"):
        Pipeline(twice, plan_of(twice, [1, layers - 1]), aux_losses=["*.aux"])


def test_plans_that_trace_losses_away_are_refused():
    model = make_net()
    plan = plan_of(model, [2, 3])
    recipe = json.loads(json.loads(plan.input_structure)["recipe"])
    recipe["opaque"] = {}
    old = json.dumps(json.loads(plan.input_structure) | {"recipe": json.dumps(recipe)})
    with pytest.raises(PlanMismatch, match=r"'blocks\.0' apart.*auxiliary loss 'aux'; profile"):
        Pipeline(model, plan.model_copy(update={"input_structure": old}), aux_losses=["*.aux"])


def test_the_example_of_the_docs(repository):
    page = (repository / "docs" / "guides" / "running.md").read_text(encoding="utf-8")
    section = page.split("## Losses that modules keep")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    model = make_net()
    whole = copy.deepcopy(model)
    x, target = make_data()
    found = {
        "stagewright": stagewright, "plan": plan_of(model, [2, 3]), "model": model,
        "loss_fn": loss_fn, "batch": x, "target": target,
    }  # fmt: skip
    exec(code, found)
    assert float(found["loss"]) == pytest.approx(unsplit(whole, 0.01), rel=EXACT)


def test_a_copy_of_a_pipeline_declares_the_same_losses():
    model = make_net()
    original = Pipeline(model, plan_of(model, [2, 3]), aux_losses=DECLARED)
    batch, _ = make_data()
    other = copy.deepcopy(original)
    original(batch)
    other(batch)
    assert other.aux_loss.item() == original.aux_loss.item() != 0
