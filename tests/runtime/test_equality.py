"""Cut anywhere, a model computes what it computed: loss, gradients, buffers, names."""

import copy

import pytest
import torch
from torch import nn

from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.partition import boundary
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import verify
from tests.torch_models import call, make_batch, make_case, make_plan

NAMES = ["mlp", "resnet", "unet", "gpt2"]
EXACT = 1e-9


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_stages_handed_detached_tensors_equal_the_whole(name, num_stages):
    case = make_case(name)
    plan = make_plan(case, num_stages)
    batch, target = make_batch(case, plan)
    found = verify(case.model, plan, batch, target, case.loss_fn, dtype=torch.float64)
    assert found.missing == found.unknown == ()
    assert len(found.gradients) == len(list(case.model.parameters()))
    assert len(found.buffers) == len(list(case.model.buffers()))
    assert found.worst <= EXACT


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_losses_agree(name):
    case = make_case(name)
    plan = make_plan(case, 3)
    batch, target = make_batch(case, plan)
    assert verify(case.model, plan, batch, target, case.loss_fn).loss <= 1e-5


def test_every_legal_cut_of_a_net_with_long_skips():
    case = make_case("unet")
    whole = make_plan(case, 1, num_microbatches=2)
    batch, target = make_batch(case, whole)
    for first in range(1, len(whole.layer_names)):
        balance = [first, len(whole.layer_names) - first]
        plan = make_plan(case, 2, num_microbatches=2, balance=balance)
        found = verify(case.model, plan, batch, target, case.loss_fn, dtype=torch.float64)
        assert found.equal(EXACT), balance


def test_verify_notices_a_wrong_gradient(monkeypatch):
    monkeypatch.setattr(
        boundary._Enter,
        "backward",
        staticmethod(lambda ctx, *gradients: (gradients[0] * 1.001, None)),
    )
    case = make_case("mlp")
    plan = make_plan(case, 2)
    batch, target = make_batch(case, plan)
    found = verify(case.model, plan, batch, target, case.loss_fn, dtype=torch.float64)
    assert not found.equal(EXACT)
    assert found.worst == pytest.approx(1e-3, rel=0.1)


def step(model, batch, target, loss_fn):
    loss = loss_fn(call(model, batch), target)
    loss.backward()
    return loss.detach()


def microbatched_step(model, batch, target, loss_fn, count):
    total = 0.0
    pieces = (
        [
            dict(zip(batch, part, strict=True))
            for part in zip(*(v.chunk(count) for v in batch.values()), strict=True)
        ]
        if isinstance(batch, dict)
        else list(zip(*(value.chunk(count) for value in batch), strict=True))
    )
    for piece, wanted in zip(pieces, target.chunk(count), strict=True):
        loss = loss_fn(call(model, piece), wanted) / count
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu", "cpu", "cpu"]])
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_is_the_model(name, devices):
    case = make_case(name)
    whole = copy.deepcopy(case.model).double()
    plan = make_plan(case, 3)
    model = case.model.double()
    plan = plan.model_copy(
        update={
            "inputs": tuple(
                spec.model_copy(update={"dtype": "float64"}) if spec.dtype == "float32" else spec
                for spec in plan.inputs
            )
        }
    )
    pipeline = Pipeline(model, plan, devices=devices)
    assert list(pipeline.state_dict()) == list(whole.state_dict())
    assert [n for n, _ in pipeline.named_parameters()] == [n for n, _ in whole.named_parameters()]
    batch, target = make_batch(case, plan, dtype=torch.float64)
    ours = step(pipeline, batch, target, case.loss_fn)
    theirs = microbatched_step(whole, batch, target, case.loss_fn, plan.num_microbatches)
    assert float(ours) == pytest.approx(float(theirs), rel=EXACT)
    expected = dict(whole.named_parameters())
    for key, parameter in pipeline.named_parameters():
        assert relative_difference(parameter.grad, expected[key].grad) <= EXACT, key
    buffers = dict(whole.named_buffers())
    for key, buffer in pipeline.named_buffers():
        assert relative_difference(buffer, buffers[key]) <= EXACT, key


def test_pipeline_trains_like_the_model():
    case = make_case("mlp")
    plan = make_plan(case, 2)
    pipeline = Pipeline(case.model, plan)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=1e-2)
    batch, target = make_batch(case, plan)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(float(step(pipeline, batch, target, case.loss_fn)))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_pipeline_obeys_the_mode():
    case = make_case("resnet")
    pipeline = Pipeline(case.model, make_plan(case, 3))
    x = torch.randn(8, 3, 32, 32)
    pipeline(x)
    before = case.model.bn1.running_mean.clone()
    pipeline.eval()
    case_output = pipeline(x)
    assert torch.equal(case.model.bn1.running_mean, before)
    torch.testing.assert_close(case_output, case.model(x))
    assert not any(module.training for stage in pipeline.stages for module in stage.modules())


def test_pipeline_moves_as_a_module_does():
    case = make_case("mlp")
    pipeline = Pipeline(case.model, make_plan(case, 2)).double()
    assert all(parameter.dtype == torch.float64 for parameter in pipeline.parameters())
    assert pipeline(torch.randn(16, 64, dtype=torch.float64)).dtype == torch.float64


def test_sequential_models_take_any_batch():
    case = make_case("mlp")
    pipeline = Pipeline(case.model, make_plan(case, 2, num_microbatches=4))
    for size in (1, 3, 7, 16):
        x = torch.randn(size, 64)
        torch.testing.assert_close(pipeline(x), case.model(x))


def test_exported_models_say_which_batch_they_take():
    case = make_case("gpt2")
    pipeline = Pipeline(case.model, make_plan(case, 2, num_microbatches=4))
    with pytest.raises(InvalidInput, match="micro-batch size 2"):
        pipeline(input_ids=torch.zeros(7, 12, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="plan with 5 micro-batches"):
        pipeline(input_ids=torch.zeros(10, 12, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="unknown"):
        pipeline(tokens=torch.zeros(8, 12, dtype=torch.int64))


def test_unused_parameters_are_kept_by_a_stage():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.spare = nn.Parameter(torch.zeros(2))
            self.lonely = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.second(self.first(x))

    case = make_case("mlp")
    model = Spare()
    other = case.__class__("spare", case.spec, model, torch.randn(2, 4), case.loss_fn)
    plan = make_plan(other, 2, num_microbatches=2)
    stages = Pipeline(model, plan).stages
    held = [set(stage.state_dict()) for stage in stages]
    assert held[0] | held[1] == set(model.state_dict())
    assert "second.spare" in held[1]


def test_a_plan_for_another_model_is_refused():
    plan = make_plan(make_case("mlp"), 2)
    with pytest.raises(PlanMismatch, match="another model"):
        Pipeline(nn.Sequential(nn.Linear(64, 10)), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda"], ["cpu", "cuda", "cuda"]])
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_over_devices(name, devices):
    case = make_case(name)
    whole = copy.deepcopy(case.model)
    plan = make_plan(case, 3)
    batch, target = make_batch(case, plan)
    theirs = microbatched_step(whole, batch, target, case.loss_fn, plan.num_microbatches)
    pipeline = Pipeline(case.model, plan, devices=devices)
    loss = case.loss_fn(call(pipeline, batch), target.cuda())
    loss.backward()
    assert float(loss) == pytest.approx(float(theirs), rel=1e-3)
    assert list(pipeline.state_dict()) == list(whole.state_dict())
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    floor = 1e-3 * max(float(parameter.grad.norm()) for parameter in expected.values())
    for key, parameter in pipeline.named_parameters():
        gradient = parameter.grad.cpu()
        assert relative_difference(gradient, expected[key].grad, floor=floor) <= 1e-2, key
    for key, buffer in pipeline.named_buffers():
        assert relative_difference(buffer.cpu(), buffers[key]) <= 1e-3, key
