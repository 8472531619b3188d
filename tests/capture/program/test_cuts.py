"""Where a cut is legal, and why not."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import capture, trace
from tests.runtime import odd_models


def reasons(model, sample):
    return [boundary.reason for boundary in capture(model, sample).boundaries]


def test_plain_chains_can_be_cut_anywhere():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    assert reasons(model, torch.randn(2, 3)) == ["", ""]


def test_a_boundary_must_consist_of_tensors():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x + 1

    class Join(nn.Module):
        def forward(self, pair):
            return pair[0] * pair[1]

    (reason,) = reasons(nn.Sequential(Pair(), Join()), torch.randn(2, 3))
    assert "only tensors can be sent" in reason


class Shift(nn.Module):
    def forward(self, x):
        return x + 1


def test_views_changed_in_place_behind_a_cut_are_not_separated():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), Shift(), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x) * 1
            view = y.view(-1)
            z = self.second(y)
            view.add_(1)  # y changes with it
            return self.third(z) + y

    found = reasons(Aliased(), torch.randn(2, 4))
    assert "changed in place later" in found[0]


def test_a_batch_norm_called_twice_stays_in_one_stage():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return self.norm(self.fc(self.norm(x)))

    found = reasons(Twice(), torch.randn(3, 4))
    assert len(found) == 2
    assert all("is updated on both sides" in reason for reason in found)


def test_memory_of_a_buffer_that_moves_does_not_cross_a_cut():
    """The next micro-batch's update would be read by this one's later layers."""
    captured = capture(odd_models.AverageWithoutGradient(), torch.randn(4, 4))
    after_update, after_use = captured.boundaries
    assert not after_update.legal
    assert "memory of buffer 'seen'" in after_update.reason
    assert after_use.legal


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def share_data(model):
    model[2].weight.data = model[0].weight.data


def share_part(model):
    model[2].bias.data = model[0].weight.data[1]


def view_weight(model):
    model[2].register_buffer("seen", model[0].weight.detach()[:, :1])
    model[2].register_forward_hook(lambda module, _, output: output + module.seen.sum())


def flatten(model):
    """Weights beside each other in one storage, as fused optimizers keep them."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.data = part.view_as(parameter)


@pytest.mark.parametrize("share", [share_data, share_part, view_weight])
def test_no_cut_divides_tensors_over_one_memory(share):
    """Each stage trained memory of its own: 97 % off after three steps."""
    model = chain()
    share(model)
    cuts = trace(model, torch.randn(2, 4)).cuts
    assert [cut.boundary.legal for cut in cuts] == [False] * 2 + [True] * 2
    assert "'0.weight' and '2." in cuts[0].boundary.reason
    assert "over one memory" in cuts[0].boundary.reason


def test_weights_beside_each_other_in_one_storage_may_be_cut_apart():
    model = chain()
    flatten(model)
    assert all(cut.boundary.legal for cut in trace(model, torch.randn(2, 4)).cuts)
