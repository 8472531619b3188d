"""What a forward is seen to reach beyond its own module, and to keep from call to call."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import verify
from tests.torch_models import Case, unmeasured_profile


class ReadsReference(nn.Module):
    """Called as written; reads the weight of an embedding that it only refers to."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def forward(self, x):
        x = x / 2 if float(x.detach().abs().amax()) > 1e6 else x
        return nn.functional.linear(x, self.reach())


class Reach:
    """A reference to a module or to its weight, which nn.Module does not see."""

    def __init__(self, embedding, kind):
        self.kept = [embedding.weight if kind == "tensor" else embedding]

    def __call__(self):
        (kept,) = self.kept
        return kept.weight if isinstance(kept, nn.Module) else kept


def referring(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.between = nn.Embedding(9, 4), nn.Linear(4, 4)
            tokens = self.tokens
            reach = (lambda: tokens.weight) if kind == "closure" else Reach(tokens, kind)
            self.head = ReadsReference(reach)

        def forward(self, ids):
            return self.head(torch.tanh(self.between(self.tokens(ids))))

    return Model()


@pytest.mark.parametrize("kind", ["module", "tensor", "closure"])
def test_a_weight_read_through_an_unregistered_reference_is_tied(kind):
    captured = trace(referring(kind), torch.randint(0, 9, (2, 3)))
    (tokens, *_) = captured.graph.parameters
    assert (tokens.names, tokens.layers) == (("tokens.weight",), (0, 2))
    assert [layer.opaque != "" for layer in captured.graph.layers] == [False, False, True]
    head = captured.segment(2, 3)
    assert head.get_parameter("tokens.weight") is captured.program.model.tokens.weight


class TakesWeight(nn.Module):
    """Called as written; is given the weight of an embedding, and may keep the embedding, too."""

    def __init__(self, *kept):
        super().__init__()
        self.kept = kept

    def forward(self, x, weight):
        x = x / 2 if float(x.detach().abs().amax()) > 1e6 else x
        return nn.functional.linear(x, weight)


class GivesWeight(nn.Module):
    """Passes the weight of its embedding to its head as an argument, or a view of it."""

    def __init__(self, *, is_kept=False):
        super().__init__()
        self.tokens, self.between = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head = TakesWeight(*[self.tokens] * is_kept)

    def forward(self, ids):
        return self.head(torch.tanh(self.between(self.tokens(ids))), self.tokens.weight)


class GivesView(GivesWeight):
    def forward(self, ids):
        return self.head(torch.tanh(self.between(self.tokens(ids))), self.tokens.weight.t())


@pytest.mark.parametrize("kind", [GivesWeight, GivesView])
def test_a_weight_given_as_an_argument_is_no_reference(kind):
    """It counted as one: refused on several devices, and left out of what ranks shard."""
    torch.manual_seed(0)
    model, ids = kind(), torch.randint(0, 4, (2, 3))
    captured = trace(model, ids)
    assert captured.program.references == {}
    assert captured.graph.layers[-1].opaque
    assert captured.graph.parameters[0].layers[-1] == 2
    plan, batch, target = plan_of(captured, [2, 1]), ids.repeat(2, 1), torch.zeros(4, 3, 4)
    assert verify(model, plan, batch, target, nn.functional.mse_loss).equal(1e-6)
    expected = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
    pipeline = Pipeline(model, plan, devices=["cpu", "cpu"])
    pipeline(batch).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_weight_that_is_given_and_kept_is_a_reference():
    captured = trace(GivesWeight(is_kept=True), torch.randint(0, 4, (2, 3)))
    assert list(captured.program.references.values()) == [{"tokens.weight": False}]


def plan_of(captured, balance):
    case = Case("given", None, captured.program.model, None, nn.functional.mse_loss)
    profile = unmeasured_profile(captured.graph, case, captured.structure.to_json())
    options = PlanOptions(num_microbatches=2)
    return plan_from_balance(profile, Cluster.uniform(len(balance)), options, balance)


class MovesAnother(nn.Module):
    """Called as written; counts in the buffer of a module that it only refers to."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        x = x / 2 if float(x.detach().abs().amax()) > 1e6 else x
        self.other[0].total.add_(1)
        return x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.ones(()))

    def forward(self, x):
        return self.linear(x) * self.total.clone()


def test_layers_that_share_a_buffer_by_reference_are_not_separated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled, self.between = Scaled(), nn.Linear(4, 4)
            self.moves, self.last = MovesAnother(self.scaled), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.moves(self.between(self.scaled(x))))

    graph = trace(Model(), torch.randn(2, 4)).graph
    reasons = [boundary.reason for boundary in graph.boundaries]
    assert reasons == ["buffer 'scaled.total' is updated on both sides"] * 2 + [""]


def test_state_that_a_layer_keeps_from_call_to_call_is_in_its_graph_and_recipe():
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))
    captured = trace(model, torch.randn(2, 4))
    assert [layer.stateful for layer in captured.graph.layers] == ["", "1.history", ""]
    recipe = captured.structure.recipe
    # A single forward could not tell a list that grows from a cache; the recipe says so.
    again = trace(model, torch.randn(2, 4), check=False, recipe=recipe)
    assert [layer.stateful for layer in again.graph.layers] == ["", "1.history", ""]


class Counting(nn.Module):
    """Divides by the number of calls, which it counts by a list."""

    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):
        self.history.append(1)
        return x / len(self.history)
