"""Optimizers of a rank's weights: groups by name, and which kinds ranks may use."""

from functools import partial

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.optimizer import make_optimizer

WEIGHTS = dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).named_parameters())


class Custom(torch.optim.Optimizer):
    """SGD with a factor on each update."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * self.factor(group, weight) * weight.grad)


class Lamb(Custom):
    def factor(self, group, weight):
        return weight.norm() / weight.grad.norm()


class Columns(Custom):
    def factor(self, group, weight):
        return weight.grad.abs().amax(0)


class Together(Custom):
    def factor(self, group, weight):
        return 1 / sum(float(each.grad.norm()) for each in group["params"])


class Noisy(Custom):
    def factor(self, group, weight):
        return 1 + torch.rand_like(weight)


def make(kind, groups=None, holds="", **options):
    return make_optimizer(kind, WEIGHTS, groups, options, names=[*WEIGHTS, "2.bias"], holds=holds)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SparseAdam, Noisy],
)
def test_what_treats_elements_by_themselves_is_taken(kind):
    for holds in ("", "other weights", "parts"):
        made = make(kind, holds=holds, lr=1e-7)
        assert [len(group["params"]) for group in made.param_groups] == [4]


@pytest.mark.parametrize(
    "kind", [Lamb, Columns, torch.optim.Adafactor, torch.optim.Muon, partial(Lamb)]
)
def test_what_looks_at_whole_weights_is_refused_for_parts(kind):
    make(Lamb, holds="other weights")
    with pytest.raises(InvalidInput, match="all its elements"):
        make(kind, holds="parts", lr=1e-7)


def test_what_looks_at_other_weights_is_refused_for_stages():
    make(Together)
    for holds in ("other weights", "parts"):
        with pytest.raises(InvalidInput, match="of other weights"):
            make(Together, holds=holds)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, partial(torch.optim.LBFGS, lr=1)])
def test_what_needs_a_closure_is_refused(kind):
    with pytest.raises(InvalidInput, match="no closure"):
        make(kind)


def test_a_trial_leaves_random_numbers_alone():
    torch.manual_seed(3)
    make(torch.optim.SGD, holds="parts")
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert drawn == torch.rand(())


def test_groups_are_made_by_name():
    made = make(
        torch.optim.AdamW,
        [{"params": ["*.bias"], "weight_decay": 0.0}, {"params": "1.weight", "lr": 1.0}],
        lr=0.5,
        weight_decay=0.1,
    )
    found = [(group["weight_decay"], group["lr"], group["params"]) for group in made.param_groups]
    assert [each[:2] for each in found] == [(0.0, 0.5), (0.1, 1.0), (0.1, 0.5)]
    assert [[weight.shape for weight in each[2]] for each in found] == [
        [(4,), (4,)], [(4, 4)], [(4, 4)],
    ]  # fmt: skip


def test_a_group_of_another_rank_s_weights_is_empty_and_a_name_of_none_is_refused():
    made = make(torch.optim.SGD, [{"params": ["2.bias"]}, {"params": [WEIGHTS["0.bias"]]}])
    assert [len(group["params"]) for group in made.param_groups] == [0, 1, 3]
    with pytest.raises(InvalidInput, match=r"no parameter of the model is named '\*\.gamma'"):
        make(torch.optim.SGD, [{"params": ["*.gamma"]}])
