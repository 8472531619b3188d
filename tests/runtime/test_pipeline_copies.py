"""Copies of a `Pipeline`: deepcopy, pickle, averaged models; and its signature."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stagewright.runtime.pipeline import Pipeline
from tests.torch_models import Case, make_case, make_plan

BATCH = (8, 4)


class Net(nn.Module):
    """Layers with running statistics, dropout, and a weight and a buffer at the root."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, rows):
        return self.second(self.first(rows) * self.scale + self.shift)


def build(**options):
    torch.manual_seed(0)
    model = Net()
    case = Case("net", make_case("mlp").spec, model, torch.rand(2, 4), None)
    plan = make_plan(case, 2, num_microbatches=4)
    return Pipeline(model, plan, **options)


def pickled(pipeline):
    return pickle.loads(pickle.dumps(pipeline))


def saved(pipeline):
    file = io.BytesIO()
    torch.save(pipeline, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, pickled, saved]


def take_step(pipeline, x):
    """One step of plain gradient descent; the output before it."""
    torch.manual_seed(1)
    output = pipeline(x)
    if pipeline.training:
        pipeline.zero_grad()
        output.square().mean().backward()
        with torch.no_grad():
            for parameter in pipeline.parameters():
                parameter -= 0.1 * parameter.grad
    return output.detach()


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"devices": ["cpu", "cpu"], "checkpoint": "always"},
        {"chunks": 4, "keyed_dropout": 3, "batch_statistics": "deferred"},
    ],
)
def test_a_copy_trains_like_the_original_and_apart_from_it(copied, options):
    x = torch.rand(*BATCH)
    original = build(**options)
    take_step(original, x)
    other = copied(original)
    assert other.steps == original.steps == 1
    before = {name: value.clone() for name, value in other.state_dict().items()}
    expected = [take_step(original, x) for _ in range(2)]
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name
    found = [take_step(other, x) for _ in range(2)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for (name, ours), theirs in zip(
        other.state_dict().items(), original.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_keeps_modes_and_dtype(copied):
    original = build().eval()
    original.second.train()
    original.double()
    other = copied(original)
    assert not other.training
    assert [m.training for m in other.modules()] == [m.training for m in original.modules()]
    x = torch.rand(*BATCH, dtype=torch.double)
    torch.manual_seed(1)
    expected = original(x)
    torch.manual_seed(1)
    assert torch.equal(other(x), expected)
    assert {tensor.dtype for tensor in other.state_dict().values()} == {torch.double, torch.int64}
    # The copy goes on between the modes like the original.
    assert torch.equal(take_step(other.train(), x), take_step(original.train(), x))


def test_copying_draws_no_random_numbers():
    original = build()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    copy.deepcopy(original)
    assert torch.equal(torch.rand(3), expected)


def test_weights_shared_with_something_copied_along_stay_shared():
    original = build()
    pair = copy.deepcopy({"pipeline": original, "weight": original.scale})
    assert pair["weight"] is pair["pipeline"].scale is not original.scale


def test_an_averaged_model_averages_the_weights():
    pipeline = build()
    averaged = AveragedModel(pipeline)
    sums = {name: torch.zeros_like(value) for name, value in pipeline.named_parameters()}
    for _ in range(3):
        take_step(pipeline, torch.rand(*BATCH))
        averaged.update_parameters(pipeline)
        for name, value in pipeline.named_parameters():
            sums[name] += value.detach() / 3
    for name, value in averaged.module.named_parameters():
        torch.testing.assert_close(value, sums[name])
    # The averaged weights are those that run.
    x = torch.rand(*BATCH)
    unsplit = Net()
    unsplit.load_state_dict(averaged.module.state_dict())
    torch.testing.assert_close(averaged.eval()(x), unsplit.eval()(x))


def test_the_signature_is_that_of_the_model():
    pipeline = build()
    assert str(inspect.signature(pipeline.forward)) == "(rows)"
    x = torch.rand(*BATCH)
    pipeline.eval()
    assert torch.equal(pipeline(rows=x), pipeline(x))
    assert str(inspect.signature(copy.deepcopy(pipeline).forward)) == "(rows)"
