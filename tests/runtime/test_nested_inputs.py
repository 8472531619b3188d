"""Models whose inputs are dicts, lists, data classes, None and numbers: as eager, or refused."""

import dataclasses
import typing

import numpy
import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.sample import CallStructure
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.planner.plan import plan
from stagewright.profiler.measure.profile import profile
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from stagewright.runtime.verify import join_samples, verify

ROWS, MICROBATCHES = 4, 2


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scales: list[torch.Tensor]
    is_scaled: bool = True


class Pair(typing.NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class OfDict(Blocks):
    def forward(self, batch):
        return self.run(batch["x"]) * batch["more"]["scale"]


class OfList(Blocks):
    def forward(self, tensors):
        return self.run(tensors[0]) * tensors[1]


class OfTuple(Blocks):
    def forward(self, pair):
        x, scale = pair
        return self.run(x) * scale


class OfData(Blocks):
    def forward(self, batch):
        y = self.run(batch.x)
        return y * batch.scales[0] if batch.is_scaled else y


class OfOutput(Blocks):
    def forward(self, output):
        return self.run(output.last_hidden_state) * output["pooler_output"]


class OfPair(Blocks):
    def forward(self, pair):
        return self.run(pair.x) * pair.scale


class WithOptions(Blocks):
    def forward(self, x, mask=None, factor=1.0, mode="plain"):
        y = self.run(x) * factor
        assert mode == "plain"
        return y if mask is None else y * mask


def draw(size, width=8):
    return torch.randn(size, width)


def output_of(size):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = outputs.BaseModelOutputWithPooling
    return made(last_hidden_state=draw(size), pooler_output=draw(size, 1))


FORMS = {
    "dict": (OfDict, lambda n: ({"x": draw(n), "more": {"scale": draw(n, 1)}},)),
    "dict alone": (OfDict, lambda n: {"x": draw(n), "more": {"scale": draw(n, 1)}}),
    "list": (OfList, lambda n: ([draw(n), draw(n, 1)],)),
    "list by keyword": (OfList, lambda n: {"tensors": [draw(n), draw(n, 1)]}),
    "tuple": (OfTuple, lambda n: ((draw(n), draw(n, 1)),)),
    "tuple alone": (OfTuple, lambda n: (draw(n), draw(n, 1))),
    "data class": (OfData, lambda n: Batch(draw(n), [draw(n, 1)])),
    "named tuple": (OfPair, lambda n: (Pair(draw(n), draw(n, 1)),)),
    "model output": (OfOutput, lambda n: (output_of(n),)),
    "model output by keyword": (OfOutput, lambda n: {"output": output_of(n)}),
    "None": (WithOptions, lambda n: (draw(n), None)),
    "numbers": (WithOptions, lambda n: {"x": draw(n), "factor": 0.5, "mode": "plain"}),
}


def planned(model, sample, **options):
    found = profile(model, sample, options=ProfilingOptions(budget_s=0.05))
    made = plan(found, "2x8GB", PlanOptions(num_stages=2, **options), num_microbatches=MICROBATCHES)
    return Plan.model_validate_json(made.model_dump_json())


def call(model, structure, batch):
    args, kwargs = structure.split_call(batch)
    return model(*args, **kwargs)


def square(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("form", FORMS)
def test_equal_to_eager_through_profile_plan_pipeline_and_verify(form):
    kind, sample = FORMS[form]
    torch.manual_seed(0)
    model, eager = kind(), kind()
    eager.load_state_dict(model.state_dict())
    made = planned(model, sample(ROWS))
    structure = CallStructure.from_json(made.input_structure)
    batch, target = sample(ROWS * MICROBATCHES), draw(ROWS * MICROBATCHES)
    pipeline = Pipeline(model, made)
    ours, theirs = call(pipeline, structure, batch), call(eager, structure, batch)
    torch.testing.assert_close(ours, theirs)
    square(ours, target).backward()
    square(theirs, target).backward()
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    assert verify(kind(), made, batch, target, square).worst < 1e-5


def test_a_smaller_batch_in_a_data_class_is_padded():
    model = OfData()
    made = planned(model, Batch(draw(ROWS), [draw(ROWS, 1)]))
    training = Training(Pipeline(model, made), loss_fn=square)
    training.train(False)
    batch, target = Batch(draw(5), [draw(5, 1)]), draw(5)
    output, loss = training.evaluate(batch, target=target, pad=True)
    torch.testing.assert_close(output, model(batch))
    torch.testing.assert_close(loss, square(model(batch), target))


@pytest.mark.parametrize(
    ("kind", "sample", "batch", "words"),
    [
        (OfDict, {"x": 8, "more": {"scale": 1}}, {"x": 8}, "is a dict of x, but .* of x, more"),
        (OfList, [8, 1], [8], "'tensors' is a list of 1, but .* a list of 2"),
        (OfData, Batch(8, [1]), Pair(8, 1), "is a Pair of 2, but .* a Batch"),
        (OfData, Batch(8, [1]), Batch(8, [1], False), "'batch_is_scaled' is False, but .* True"),
        (
            WithOptions,
            (8, None, 0.5),
            (8, None, 2.0),
            "'factor' is 2.0, but .* 0.5.* pass a tensor",
        ),
        (WithOptions, (8, None, 0.5), (8, 8, 0.5), "'mask' is a Tensor, but .* with None"),
        (WithOptions, (8, 8, 0.5), (8, None, 0.5), "'mask' is a NoneType, not a tensor"),
    ],
)
def test_another_form_than_captured_is_refused_by_name(kind, sample, batch, words):
    def filled(value, rows):
        if type(value) is int:
            return draw(rows, value)
        if isinstance(value, dict):
            return {key: filled(item, rows) for key, item in value.items()}
        if isinstance(value, Pair):
            return Pair(*(filled(item, rows) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(filled(item, rows) for item in value)
        if isinstance(value, Batch):
            return Batch(filled(value.x, rows), filled(value.scales, rows), value.is_scaled)
        return value

    structure = trace(kind(), filled(sample, 2), check=False).structure
    args, kwargs = structure.split_call(filled(batch, 2))
    with pytest.raises(InvalidInput, match=words):
        structure.flatten(args, kwargs)


def test_constants_may_be_of_a_class_of_numpys():
    """The very value of the capture was refused after the graph had been written and read."""
    sample = (draw(2), None, numpy.float64(0.5))
    structure = trace(WithOptions(), sample, check=False).structure
    structure = CallStructure.from_json(structure.to_json())
    args, kwargs = structure.split_call(sample)
    assert len(structure.flatten(args, kwargs)) == 1
    args, kwargs = structure.split_call((draw(2), None, numpy.float64(0.25)))
    with pytest.raises(InvalidInput, match=r"'factor' is .*0\.25"):
        structure.flatten(args, kwargs)


def test_what_cannot_be_part_of_a_sample_is_named():
    with pytest.raises(InvalidInput, match="dataclasses; 'batch_mask' is a set"):
        trace(OfDict(), {"x": draw(2), "mask": {1}})
    with pytest.raises(InvalidInput, match="0-dimensional"):
        trace(OfList(), ([draw(2), torch.tensor(1.0)],))


def test_a_class_that_is_not_imported_is_named():
    text = trace(OfData(), Batch(draw(2), [draw(2, 1)]), check=False).structure.to_json()
    structure = CallStructure.from_json(text.replace(":Batch", ":Elsewhere"))
    with pytest.raises(InvalidInput, match=r"captured with a Elsewhere of .*, which is not there"):
        structure.unflatten([draw(2), draw(2, 1)])


def test_tensors_of_one_name_are_told_apart():
    class Twice(nn.Module):
        def forward(self, a_x, a):
            return a_x + a["x"] + a["x "]

    structure = trace(
        Twice(), {"a_x": draw(2), "a": {"x": draw(2), "x ": draw(2)}}, check=False
    ).structure
    assert structure.names == ("a_x", "a_x_", "a_x__")


def test_samples_of_data_classes_are_joined():
    first, second = (Batch(draw(2), [draw(2, 1)]) for _ in range(2))
    joined = join_samples([first, second])
    torch.testing.assert_close(joined.x, torch.cat([first.x, second.x]))
    torch.testing.assert_close(joined.scales[0], torch.cat([first.scales[0], second.scales[0]]))
