"""Any interval of layers runs alone, with the model's own parameters under their own names."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import PlanMismatch
from tests.torch_models import call, make_case

NAMES = ["mlp", "resnet", "unet", "gpt2"]


@pytest.mark.parametrize("name", NAMES)
def test_layers_one_after_the_other_are_the_model(name):
    case = make_case(name)
    captured = trace(case.model, case.sample)
    flat = tuple(case.sample.values()) if isinstance(case.sample, dict) else case.sample
    values = flat
    with torch.no_grad():
        for layer in range(len(captured.layers)):
            values = captured.segment(layer, layer + 1)(*values)
        output = captured.unflatten_output(values)
        expected = call(case.model, case.sample)
    found = output.logits if name == "gpt2" else output
    wanted = expected.logits if name == "gpt2" else expected
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_segments_hold_the_models_own_parameters(name):
    case = make_case(name)
    captured = trace(case.model, case.sample)
    theirs = dict(case.model.named_parameters(remove_duplicate=False))
    held = {}
    for layer in range(len(captured.layers)):
        held |= dict(captured.segment(layer, layer + 1).named_parameters())
    assert set(held) == set(theirs)
    assert all(held[key] is theirs[key] for key in held)


def test_a_tied_weight_keeps_the_name_its_module_knows_it_by():
    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.weight

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Projection(), Projection()
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    captured = trace(Tied(), torch.randn(2, 4))
    assert list(captured.segment(0, 1).state_dict()) == ["first.weight"]
    assert list(captured.segment(1, 2).state_dict()) == ["second.weight"]


def test_buffers_stay_persistent_or_not():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("passing", torch.ones(3), persistent=False)
            self.plain = torch.full((3,), 2.0)

        def forward(self, x):
            return x * self.kept + self.passing * self.plain

    model = Scaled()
    segment = trace(model, torch.randn(2, 3)).segment(0, 1)
    assert list(segment.state_dict()) == ["kept"]
    assert {name for name, _ in segment.named_buffers()} == {"kept", "passing"}
    assert (
        segment.to(torch.float64)(torch.ones(1, 3, dtype=torch.float64))[0].dtype == torch.float64
    )


class Attentive(nn.Module):
    """Dropout as a module, as a function, and inside attention."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = nn.functional.dropout(self.drop(self.fc(x)), 0.5, self.training)
        return nn.functional.scaled_dot_product_attention(
            h, h, h, dropout_p=0.5 if self.training else 0.0
        )


def test_dropout_follows_the_mode():
    torch.manual_seed(0)
    model = Attentive()
    x = torch.randn(2, 5, 8)
    segment = trace(model, x).segment(0, 2)
    assert not torch.equal(segment(x)[0], segment(x)[0])
    segment.eval()
    model.eval()
    torch.testing.assert_close(segment(x)[0], model(x))


def test_a_recurrent_net_is_called_whole_and_follows_the_mode():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.fc = nn.LSTM(4, 4, 2, dropout=0.5), nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 2, 4)
    captured = trace(model, x)
    segment = captured.segment(0, len(captured.layers))
    assert not torch.equal(segment(x)[0], segment(x)[0])
    segment.eval()
    torch.testing.assert_close(segment(x)[0], model.eval()(x))


def test_what_cannot_follow_the_mode_says_so():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = nn.functional.alpha_dropout(self.fc(x), 0.5, self.training)
            return (y, x) if self.training else y

    captured = trace(Auxiliary(), torch.randn(3, 4))
    segment = captured.segment(0, len(captured.layers))
    with pytest.raises(PlanMismatch, match="alpha_dropout"):
        segment.eval()
    assert any("alpha_dropout" in note for note in captured.graph.notes)


def test_evaluation_has_a_graph_of_its_own_where_forward_looks_at_the_mode():
    class Centred(nn.Module):
        """Batch statistics by hand, in the model's own forward."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            h = self.a(x)
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                return self.b(h - h.mean(0))
            return self.b(h - self.mean)

    torch.manual_seed(0)
    model, x = Centred(), torch.randn(3, 4)
    captured = trace(model, x)
    assert captured.graph.fixed_mode == ()
    assert captured.evaluation is not None
    pieces = [captured.segment(0, 1), captured.segment(1, 2)]
    for mode in (True, False, True):
        for piece in pieces:
            piece.train(mode)
        model.train(mode)
        before = model.mean.clone()
        found = pieces[1](*pieces[0](x))[0]
        model.mean.copy_(before)
        torch.testing.assert_close(found, model(x))
        assert torch.equal(model.mean, before) is not mode


def test_a_module_frozen_while_the_model_trains_stays_frozen():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.fc(x))

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    captured = trace(Detector().train(), torch.randn(3, 4))
    segment = captured.segment(0, len(captured.layers))
    segment.eval()
    segment.train()
    assert segment.fc.training
    assert not segment.norm.training


def test_modules_made_for_a_segment_keep_the_captured_mode():
    """The gate switches a segment to evaluation, and shares its dropout with every other."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.dropout(self.fc(x), 0.5, self.training)

    captured = trace(Dropping(), torch.randn(3, 4))
    assert all(module.training for module in captured.segment(0, 1).modules())


def test_a_causal_mask_becomes_the_fast_path_and_others_stay():
    class Masked(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.blocked = mask

        def forward(self, x):
            h = self.fc(x)
            mask = torch.arange(5)[:, None] >= torch.arange(5)[None] - self.blocked
            return nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)

    def causal_flags(shift):
        captured = trace(Masked(shift), torch.randn(2, 5, 8))
        attention = torch.ops.aten.scaled_dot_product_attention.default
        return [
            n.kwargs.get("is_causal") for n in captured.program.graph.nodes if n.target is attention
        ]

    assert causal_flags(0) == [True]
    assert causal_flags(1) == [None]
