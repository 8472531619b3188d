"""What a forward is seen to reach beyond its own module, and to keep from call to call."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace


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
