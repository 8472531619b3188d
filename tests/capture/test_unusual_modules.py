"""TorchScript children, lazy modules and shapes that depend on data: opaque, or refused by name."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.planner.plan import plan
from stagewright.profiler.measure.profile import profile
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import mean_of_squares, verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def scripted():
    return nn.ModuleDict({"script": torch.jit.script(Block())})


def jit_traced():
    return nn.ModuleDict({"script": torch.jit.trace(Block(), torch.randn(2, 8))})


class AroundScript(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.inner, self.last = Block(), make(), Block()

    def forward(self, x):
        return self.last(self.inner["script"](self.first(x)))


@pytest.mark.parametrize("make", [scripted, jit_traced])
def test_a_script_module_is_an_opaque_layer(make):
    torch.manual_seed(0)
    model, x = AroundScript(make), torch.randn(4, 8)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    found = profile(model, x[:2], options=ProfilingOptions(budget_s=0.05))
    why = {entry.layer.name: entry.layer.opaque for entry in found.layers if entry.layer.opaque}
    assert why == {"inner.script": "is a ScriptModule, which runs without Python"}
    made = plan(found, "2x8GB", PlanOptions(num_stages=2), num_microbatches=2)
    pipeline = Pipeline(model, made)
    pipeline(x).square().mean().backward()
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    report = verify(model, made, x, torch.zeros(4), mean_of_squares)
    assert report.worst < 1e-5
    assert "inner.script.linear.weight" in report.gradients


def test_a_script_module_alone_is_refused():
    with pytest.raises(InvalidInput, match="Block is a ScriptModule"):
        trace(torch.jit.script(Block()), torch.randn(2, 8))


def test_lazy_modules_are_to_be_initialised_first():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU())
    for refuses in (
        lambda: trace(model, torch.randn(2, 4)),
        lambda: profile(model, torch.randn(2, 4)),
    ):
        with pytest.raises(InvalidInput, match=r"\(0.weight, 0.bias, 1.weight ...\) have no shape"):
            refuses()
    model(torch.randn(2, 4))
    assert len(trace(model, torch.randn(2, 4)).layers) == 3


class Select(nn.Module):
    def forward(self, x):
        return x[x.sum(-1) > 0]


class Inside(nn.Module):
    """Selects samples by their values, in its own forward or a child's."""

    def __init__(self, select):
        super().__init__()
        self.first, self.last, self.select = Block(), Block(), select

    def forward(self, x):
        y = self.first(x)
        chosen = self.select(y) if self.select else y[y.sum(-1) > 0]
        return x + self.last(chosen).sum(0)


class Selective(nn.Module):
    """Computes some samples by other layers than the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = Block(), Block(), Block()

    def forward(self, x):
        y = self.first(x)
        chosen = y.sum(-1) > 0
        z = y.clone()
        z[chosen] = self.rare(y[chosen])
        return self.last(z)


class AtTheEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()

    def forward(self, x):
        y = self.first(x)
        return y[y.sum(-1) > 0]


@pytest.mark.parametrize("make", [lambda: Inside(Select()), lambda: Inside(None), AtTheEnd])
def test_a_shape_that_depends_on_data_crosses_no_cut(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, 8)
    captured = trace(model, x)
    assert captured.program.opaque
    assert captured.graph.outputs
    for cut in captured.cuts:
        if cut.boundary.legal:
            assert all(spec.shape[0] == 16 for spec in cut.boundary.tensors)


def selective():
    return nn.Sequential(Block(), Selective(), Block())


def test_boolean_indexing_runs_in_a_pipeline_as_planned():
    torch.manual_seed(0)
    model, eager, x = selective(), selective(), torch.randn(32, 8)
    eager.load_state_dict(model.state_dict())
    found = profile(model, x[:16], options=ProfilingOptions(budget_s=0.05))
    made = plan(found, "2x8GB", PlanOptions(num_stages=2), num_microbatches=2)
    ours, theirs = Pipeline(model, made)(x), eager(x)
    torch.testing.assert_close(ours, theirs)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    assert verify(selective(), made, x, torch.zeros(32), mean_of_squares).worst < 1e-5


def test_an_optimizer_that_steps_in_backward_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), Block())
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(InvalidInput, match=r"0\.weight has a hook on its accumulated gradient"):
        trace(model, torch.randn(2, 8))
