"""Models run in another precision than they were captured in: equal to the model, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stagewright import InferencePipeline, Pipeline
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.partition.cut import cut_for_plan
from stagewright.runtime.training import Training
from tests.runtime.test_odd_models import plan_with_every_cut


class Normed(nn.Module):
    """A layer whose forward looks at a dtype."""

    def __init__(self, looks):
        super().__init__()
        self.layer, self.looks = nn.Linear(8, 8), looks

    def forward(self, x):
        h = self.layer(x)
        if self.looks == "branch" and h.dtype is torch.bfloat16:
            h = h.clamp(-0.1, 0.1)
        if self.looks == "constant":
            h = h + 100 * torch.tensor(torch.finfo(h.dtype).eps)
        if self.looks == "region":
            with torch.no_grad():
                scale = h.sum() if h.dtype is torch.bfloat16 else h.mean()
            h = h * scale
        if self.looks == "no conversion":
            return x + h
        least = torch.finfo(h.dtype).eps if self.looks == "limits" else 1e-3
        # As many normalisations do, with a conversion there and back.
        return x + (h.float() / (h.float().norm(dim=-1, keepdim=True) + least)).to(h.dtype)


class Chain(nn.Module):
    def __init__(self, looks):
        super().__init__()
        self.blocks = nn.ModuleList(Normed(looks) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build(looks):
    torch.manual_seed(0)
    model = Chain(looks)
    return copy.deepcopy(model), Pipeline(model, plan_with_every_cut(model, torch.randn(4, 8)))


@pytest.mark.parametrize("looks", ["branch", "limits", "constant", "region"])
def test_what_forward_derived_from_a_dtype_does_not_outlive_it(looks):
    """Branches and limits of the captured precision stayed, without a word."""
    _, pipeline = build(looks)
    x = torch.randn(8, 8)
    pipeline(x)
    words = r"under autocast to bfloat16 now, .*was captured, now there is .*torch\.autocast"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanMismatch, match=words):
        pipeline(x)
    pipeline.bfloat16()
    with pytest.raises(PlanMismatch, match="weights of bfloat16, inputs of bfloat16 and without"):
        pipeline(x.bfloat16())


def test_digits_that_the_capture_dropped_are_missed():
    """Captured in bfloat16, a model kept its conversions to it in float32."""
    torch.manual_seed(0)
    model = Chain("neither").bfloat16()
    plan = plan_with_every_cut(model, torch.randn(4, 8).bfloat16())
    pipeline = Pipeline(model, plan)
    words = r"conversion of %\d+ to bfloat16 was captured, now there is .* to float32"
    with pytest.raises(PlanMismatch, match=words):
        pipeline.float()(torch.randn(8, 8))


def test_a_model_that_looks_at_no_dtype_may_be_converted_and_autocast():
    whole, pipeline = build("neither")
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pipeline(x), whole(x), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(pipeline(x), whole(x), rtol=1e-2, atol=1e-2)
    whole, pipeline = build("no conversion")
    torch.testing.assert_close(pipeline.double()(x.double()), whole.double()(x.double()))


class Masked(nn.Module):
    """Attention whose mask may be added, or say where to look."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask):
        scores = x @ self.layer(x).mT
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(mask[:, None], -1e9)
        else:
            scores = scores + mask[:, None]
        return x + scores.softmax(-1) @ x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Masked(), Masked()

    def forward(self, x, mask):
        return self.second(self.first(x, mask), mask)


def test_inputs_of_another_dtype_are_refused():
    """A mask of booleans was added where one of numbers had been captured."""
    model = Attention()
    sample = torch.randn(4, 5, 8), torch.zeros(4, 5)
    plan = plan_with_every_cut(model, sample)
    x, mask = torch.randn(8, 5, 8), torch.zeros(8, 5, dtype=torch.bool)
    words = r"'mask' has the dtype bool, but the model was captured with float32.*pass float32"
    pipeline = Pipeline(model, plan)
    with pytest.raises(InvalidInput, match=words):
        pipeline(x, mask)
    with pytest.raises(InvalidInput, match=words):
        Training(pipeline, loss_fn=mse_loss).step(x, mask, target=x)
    pipeline(x, mask.float())
    with InferencePipeline(model, plan) as inference, pytest.raises(InvalidInput, match=words):
        inference.submit(x, mask)


class Scaled(nn.Module):
    """A chain whose root holds a buffer itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.1))

    def forward(self, x):
        return self.second(self.first(x) * self.scale)


def test_a_converted_pipeline_leaves_its_model_whole():
    """The root's own buffers stayed as they were, beside weights of the new dtype."""
    model = Scaled()
    pipeline = Pipeline(model, plan_with_every_cut(model, torch.randn(4, 8))).double()
    x = torch.randn(8, 8).double()
    assert model.scale is dict(pipeline.named_buffers())["scale"]
    torch.testing.assert_close(pipeline(x), model(x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_on_the_cpu_sends_the_dtypes_planned_for_a_gpu(device):
    """Autocast keeps LayerNorm in bfloat16 on the CPU, and CUDA's in float32: step 1 failed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_with_every_cut(model, torch.randn(4, 8))
        assert [sent_dtypes(cut) for cut in plan.boundaries] == [["bfloat16"]] * 2
        on_gpu = tuple(
            cut.model_copy(
                update={
                    "tensors": tuple(
                        each.model_copy(update={"dtype": "float32"}) for each in cut.tensors
                    )
                }
            )
            for cut in plan.boundaries[1:]
        )
        planned = plan.model_copy(update={"boundaries": (plan.boundaries[0], *on_gpu)})
        pieces = cut_for_plan(model, planned, device=torch.device(device))
    found = [sent_dtypes(each.boundary) for each in pieces.captured.cuts]
    assert found[:2] == [["bfloat16"], ["bfloat16" if device == "cpu" else "float32"]]


def sent_dtypes(boundary):
    return [tensor.dtype for tensor in boundary.tensors]
