"""Whatever a model does, its pieces do the same, or it is refused: never something else."""

import itertools

import pytest
import torch
from torch import Tensor

from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import CaptureError, PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import verify
from tests.runtime import odd_models
from tests.torch_models import Case, unmeasured_profile


def plan_with_every_cut(model, sample):
    """As many stages as there are legal cuts."""
    captured = trace(model, sample)
    graph = captured.graph
    case = Case("odd", None, model, sample, loss_of_anything)
    profile = unmeasured_profile(graph, case, captured.structure.to_json())
    edges = [0, *(b.after + 1 for b in graph.boundaries if b.legal), len(graph.layers)]
    balance = [last - first for first, last in itertools.pairwise(edges)]
    options = PlanOptions(num_microbatches=2, schedule="gpipe")
    return plan_from_balance(profile, Cluster.uniform(len(balance)), options, balance)


def loss_of_anything(output, target):
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    return sum(((t - target[:, :1]) ** 2).mean() for t in tensors)


@pytest.mark.parametrize("build", odd_models.EQUAL, ids=lambda build: build.__name__)
def test_pieces_compute_the_model(build):
    torch.manual_seed(0)
    model = build()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    assert plan.num_stages > 1 or build is odd_models.IndexAssignment
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    found = verify(model, plan, batch, target, loss_of_anything)
    tolerance = 2e-2 if build is odd_models.Autocast else 1e-5
    assert found.equal(tolerance), found


@pytest.mark.parametrize("build", odd_models.EQUAL, ids=lambda build: build.__name__)
def test_tracing_leaves_model_and_sample_alone(build):
    torch.manual_seed(0)
    model, sample = build(), torch.randn(4, 4)
    state = {
        key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()
    }
    before = sample.clone()
    trace(model, sample)
    assert torch.equal(sample, before)
    for key, value in model.state_dict(keep_vars=True).items():
        assert id(value) == state[key][0]
        assert torch.equal(value, state[key][1])


@pytest.mark.parametrize("build", odd_models.KEEP_THEIR_MODE, ids=lambda build: build.__name__)
def test_what_depends_on_the_mode_says_so(build):
    torch.manual_seed(0)
    model, sample = build(), torch.randn(4, 4)
    plan = plan_with_every_cut(model, sample)
    assert plan.fixed_mode
    pipeline = Pipeline(model, plan)
    with pytest.raises(PlanMismatch, match="cannot switch to evaluation"):
        pipeline.eval()
    with pytest.raises(PlanMismatch, match="cannot switch to evaluation"):
        Pipeline(model.eval(), plan)


@pytest.mark.parametrize("build", odd_models.OWN_EVALUATION, ids=lambda build: build.__name__)
def test_evaluation_is_the_models_own(build):
    torch.manual_seed(0)
    model, x = build(), torch.randn(8, 4)
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    assert plan.num_stages == (2 if build is odd_models.DropPath else 1)
    assert plan.fixed_mode == ()
    pipeline = Pipeline(model, plan)
    assert not torch.equal(pipeline(x), pipeline(x))
    pipeline.eval()
    torch.testing.assert_close(pipeline(x), model.eval()(x))
    pipeline.train()
    assert not torch.equal(pipeline(x), pipeline(x))


def test_a_graph_for_evaluation_moves_with_the_pipeline():
    torch.manual_seed(0)
    model, x = odd_models.DropPath(), torch.randn(8, 4, dtype=torch.float64)
    pipeline = Pipeline(model, plan_with_every_cut(model, torch.randn(4, 4)))
    pipeline.eval().double()
    torch.testing.assert_close(pipeline(x), model.eval()(x))


@pytest.mark.parametrize("build", odd_models.WHOLE, ids=lambda build: build.__name__)
def test_what_escapes_the_tracer_is_called_whole(build):
    torch.manual_seed(0)
    model, sample = build(), torch.randn(4, 4)
    graph = trace(model, sample).graph
    (layer,) = graph.layers
    assert layer.opaque
    assert any("into a submodule" in note for note in graph.notes)
    plan = plan_with_every_cut(model, sample)
    found = verify(model, plan, torch.randn(8, 4), torch.randn(8, 4), loss_of_anything)
    assert found.equal(1e-5), found
    pipeline = Pipeline(model, plan)
    assert set(pipeline.state_dict()) == set(model.state_dict())
    pipeline.eval()
    assert not model.training


@pytest.mark.parametrize("build", odd_models.REFUSED, ids=lambda build: build.__name__)
def test_what_capture_would_change_is_refused(build):
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="into a submodule"):
        trace(build(), torch.randn(4, 4))


def test_default_arguments_keep_their_values():
    class Detached(odd_models.Base):
        def forward(self, x, detach=True):
            h = self.a(x)
            return self.b(h.detach() if detach else h)

    captured = trace(Detached(), torch.randn(4, 4), mode="trace")
    assert not any(t.requires_grad for b in captured.graph.boundaries for t in b.tensors)


def test_a_straight_through_function_keeps_its_own_derivative():
    """Also when capture is called under ``no_grad``."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Quantised(odd_models.Base):
        def forward(self, x):
            return self.b(Round.apply(self.a(x)))

    torch.manual_seed(0)
    model = Quantised()
    with torch.no_grad():
        plan = plan_with_every_cut(model, torch.randn(4, 4))
    assert plan.num_stages == 2
    found = verify(model, plan, torch.randn(8, 4), torch.randn(8, 4), loss_of_anything)
    assert found.equal(1e-5), found
    assert found.gradients["a.weight"] < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_a_pipeline_starts_in_the_models_mode(training):
    class Dropping(odd_models.Base):
        def forward(self, x):
            return self.b(torch.nn.functional.dropout(self.a(x), 0.5, self.training))

    torch.manual_seed(0)
    model = Dropping()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    pipeline = Pipeline(model.train(training), plan)
    x = torch.randn(8, 4)
    assert torch.equal(pipeline(x), pipeline(x)) is not training
    if not training:
        torch.testing.assert_close(pipeline(x), model(x))


def test_buffers_stay_one_object_when_a_pipeline_moves():
    model = odd_models.AverageWithoutGradient()
    pipeline = Pipeline(model, plan_with_every_cut(model, torch.randn(4, 4)))
    pipeline.double()
    pipeline(torch.randn(8, 4, dtype=torch.float64))
    assert pipeline.seen.dtype == torch.float64
    assert pipeline.state_dict()["seen"].any()


def test_outputs_that_are_no_batch_are_refused():
    class States(odd_models.Base):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            return self.lstm(self.a(x).unsqueeze(1))[1][0]

    model = States()
    pipeline = Pipeline(model, plan_with_every_cut(model, torch.randn(4, 4)))
    with pytest.raises(Exception, match="must be the batch"):
        pipeline(torch.randn(8, 4))


def test_not_a_number_is_not_equal(monkeypatch):
    from stagewright.runtime.partition import boundary

    monkeypatch.setattr(
        boundary._Enter,
        "backward",
        staticmethod(lambda ctx, *gradients: (gradients[0] * float("nan"), None)),
    )
    model = odd_models.CalledAgain()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    found = verify(model, plan, torch.randn(8, 4), torch.randn(8, 4), loss_of_anything)
    assert not found.equal(1e9)
