"""Evaluation of a batch with fewer samples than the plan's, as the last of a data set has."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.padding import pad_samples, split_partial_target, trim_padding
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from tests.torch_models import Case, make_case, make_plan

pytestmark = pytest.mark.distributed


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Residual(nn.Module):
    """Captured at one batch size, as all that is no nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        return {"logits": self.last(self.norm(x).relu() + x)}


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return (self.inner(x) + x).mean()


def planned(model):
    case = Case("own", make_case("mlp").spec, model, (torch.rand(4, 4),), None)
    return make_plan(case, 1, num_microbatches=3)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output["logits"], target)


def trained(whole):
    """A model and its plan for 12 samples; ``whole`` of them, in one process or in one of many."""
    torch.manual_seed(0)
    model = Residual()
    plan = planned(model)
    if whole:
        return model, Training(Pipeline(model, plan), loss_fn=loss_fn)
    return model, Training(DistributedPipeline(model, plan, loss_fn=loss_fn))


@pytest.mark.parametrize("in_one_process", [False, True])
@pytest.mark.parametrize("samples", [1, 6, 11])
def test_a_smaller_batch_has_the_unsplit_model_s_output_and_loss(alone, samples, in_one_process):
    model, training = trained(in_one_process)
    training.train(False)
    x, target = torch.rand(samples, 4), torch.randint(0, 3, (samples,))
    output, loss = training.evaluate(x, target=target, pad=True)
    with torch.no_grad():
        expected = model.eval()(x)
    torch.testing.assert_close(output["logits"], expected["logits"])
    torch.testing.assert_close(loss, loss_fn(expected, target))
    training.close()


def test_without_pad_the_error_says_both_sizes_and_the_ways_out(alone):
    _, training = trained(False)
    with pytest.raises(InvalidInput, match=r"\(11, 4\).*\(12, 4\).*drop_last=True.*pad=True"):
        training.evaluate(torch.rand(11, 4))
    training.close()
    _, training = trained(True)
    with pytest.raises(InvalidInput, match=r"batch of 11 .* size 4 .*drop_last=True.*unsplit"):
        training.evaluate(torch.rand(11, 4))


@pytest.mark.parametrize("in_one_process", [False, True])
def test_training_mode_is_refused(alone, in_one_process):
    """What is filled in would be in the batch's statistics."""
    _, training = trained(in_one_process)
    with pytest.raises(InvalidInput, match=r"train\(False\) first"):
        training.evaluate(torch.rand(11, 4), pad=True)
    training.close()


def test_what_cannot_be_filled_up_is_refused(alone):
    _, training = trained(False)
    training.train(False)
    with pytest.raises(InvalidInput, match=r"\(13, 4\) cannot be padded to 12"):
        training.evaluate(torch.rand(13, 4), pad=True)
    with pytest.raises(InvalidInput, match="have 5 and 6 samples"):
        training.evaluate(torch.rand(5, 4), target=torch.zeros(6), pad=True)
    with pytest.raises(InvalidInput, match="needs the batch or its target"):
        training.evaluate(pad=True)
    training.close()


def test_an_output_of_all_samples_together_is_refused(alone):
    """It would count the samples that were filled in."""
    model = Mean()
    pipeline = DistributedPipeline(model, planned(model), loss_fn=None)
    pipeline.train(False)
    with pytest.raises(InvalidInput, match="combines all 12 samples, of which 2"):
        pipeline.evaluate(torch.rand(10, 4), pad=True)
    pipeline.close()


def test_precision_is_checked_as_shapes_are(alone):
    """It was torch's error about the two matrices of a product."""
    _, training = trained(False)
    with pytest.raises(InvalidInput, match=r"'x' has the dtype float64, but .* pass float32"):
        training.step(torch.rand(12, 4, dtype=torch.double), target=torch.zeros(12).long())
    training.close()


def test_filling_up_and_cutting_off():
    x = torch.tensor([1.0, 2.0])
    assert pad_samples(x, 4).tolist() == [1, 2, 2, 2]
    assert trim_padding(pad_samples(x, 4), 4, 2).tolist() == [1, 2]
    split = split_partial_target({"a": torch.arange(3), "b": "constant"}, 3, 2)
    assert split[2] is None
    assert [(part.target["a"].tolist(), part.samples, part.of) for part in split[:2]] == [
        ([0, 1], 2, 3),
        ([2], 1, 3),
    ]
