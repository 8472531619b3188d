"""A model that is changed after its pipeline was built is followed, or refused by name."""

import operator
import sys
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.pipeline import Pipeline
from tests.torch_models import Case, traced_profile


class Cache:
    """A plain object that forward writes to."""

    def __init__(self):
        self.length = None


class Annealed(nn.Module):
    """Divides by a temperature; one of its layers runs as written."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(4, 4), Gate(), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.temperature, self.settings, self.cache = 2.0, {"power": [2, 3]}, Cache()
        self.table, self.sizes = torch.ones(4), {"width": numpy.array([3.0, 1.0])}
        self.history, self.step = [], 0
        self.box = [1.0]
        self.scaled, self.boxed = partial(scale, factor=1.0), enclose(self.box)
        self.maps, self.evaluated, self.rates, self.depth = [], 0, [1.0], 0

    def begin(self, step):
        self.step = step

    def forward(self, x):
        if not self.training:
            x = read_offset(self) + self.shift() * x * self.rates[-1] + self.depth
            self.maps.append(x)
            self.rates.append(self.rates[-1])
            self.evaluated += 1
            self.depth += 0
        self.cache.length = x.shape[-1]
        x = torch.tanh(self.first(x) / self.temperature) * self.scale * self.table * self.gain
        x = self.boxed(self.scaled(x / float(self.sizes["width"][0]) * SHARPNESS))
        return self.head(self.gate(x)) ** self.settings["power"][0]

    def shift(self):
        return getattr(self, "slope", 1.0)


def read_offset(model):
    return getattr(model, "offset", 0.0)


SHARPNESS = 1.0
temperature = 1.0  # a script's variable, named like an attribute that forward reads


def scale(x, factor):
    return x * factor


def enclose(box):
    return lambda x: x * box[0]


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return x * (-self.factor if float(x.detach().sum()) > 0 else self.factor)


@pytest.fixture
def built():
    torch.manual_seed(0)
    model = Annealed()
    profile = traced_profile(Case("own", None, model, torch.ones(2, 4), mse_loss))
    balance = [1, len(profile.layers) - 1]
    options = PlanOptions(num_microbatches=2)
    plan = plan_from_balance(profile, Cluster.uniform(2), options, balance)
    return model, Pipeline(model, plan)


def check_equal(model, pipeline):
    batch = torch.randn(4, 4)
    expected = torch.cat([model(part) for part in batch.chunk(2)])
    torch.testing.assert_close(pipeline(batch), expected)


FOLLOWED = {
    "a buffer, in place": lambda model: model.scale.mul_(3),
    "a plain tensor, in place": lambda model: model.table.mul_(3),
    "a weight, in place": lambda model: model.first.weight.data.mul_(3),
    "loaded weights": lambda model: model.load_state_dict(Annealed().state_dict()),
    "an attribute of a layer called as written": lambda model: setattr(model.gate, "factor", 3.0),
    "frozen weights": lambda model: model.first.requires_grad_(False),
    "a hook of a leaf": lambda model: model.head.register_forward_hook(lambda *_: torch.ones(2, 4)),
    "what forward itself changes": lambda model: model(torch.ones(2, 4)),
    "a list that forward only adds to": lambda model: model.maps.append(model.scale),
    "a number that forward only counts": lambda model: setattr(model, "evaluated", 3),
    "a number that forward never reads": lambda model: setattr(model, "epoch", 3),
    "a number that a method only assigns": lambda model: model.begin(3),
    "a list that forward never reads": lambda model: model.history.append(model.first),
    "what another program keeps there": lambda model: setattr(model, "optimizer", Cache()),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed(name, built):
    model, pipeline = built
    check_equal(model, pipeline)
    FOLLOWED[name](model)
    check_equal(model, pipeline)


REFUSED = {
    "'temperature' was 2.0, now it is 0.5": lambda model: setattr(model, "temperature", 0.5),
    r"'settings\.power' was a list, now it is another": lambda model: model.settings.update(
        power=[1, 3]
    ),
    r"'settings\.power\.0' was 2, now it is 1": lambda model: operator.setitem(
        model.settings["power"], 0, 1
    ),
    "'head' was a Linear, now it is another Linear": lambda model: setattr(
        model, "head", nn.Linear(4, 4)
    ),
    "'head' was a Linear, now it is a Sequential": lambda model: setattr(
        model, "head", nn.Sequential(model.head)
    ),
    "'adapter' was missing, now it is a Linear": lambda model: setattr(
        model, "adapter", nn.Linear(4, 4)
    ),
    "'first' was a Linear, now it is a Parametrized": lambda model: (
        nn.utils.parametrizations.weight_norm(model.first)
    ),
    r"'first\.weight' was a tensor, now it is another": lambda model: model.load_state_dict(
        Annealed().state_dict(), assign=True
    ),
    "'scale' was a tensor, now it is another": lambda model: setattr(
        model, "scale", torch.full((4,), 3.0)
    ),
    "'table' was a tensor, now it is another": lambda model: setattr(
        model, "table", torch.full((4,), 3.0)
    ),
    "'slope' was missing, now it is 2.0": lambda model: setattr(model, "slope", 2.0),
    r"'rates\.1' was missing, now it is 2.0": lambda model: model.rates.append(2.0),
    "'maps' was a list, now it is another list": lambda model: setattr(model, "maps", []),
    "'depth' was 0, now it is 1": lambda model: setattr(model, "depth", 1),
    "'offset' was missing, now it is 2.0": lambda model: setattr(model, "offset", 2.0),
    r"'scaled\.factor' was 1.0, now it is 2.0": lambda model: model.scaled.keywords.update(
        factor=2.0
    ),
    r"\.0' was 1.0, now it is 3.0": lambda model: operator.setitem(model.box, 0, 3.0),
    "'forward' was missing": lambda model: setattr(model, "forward", lambda x: x),
    r"'sizes\.width' was an array of shape \(2,\), now it is .* with other values": (
        lambda model: operator.imul(model.sizes["width"], 3)
    ),
    "the model itself was given a hook": lambda model: model.register_forward_hook(print),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_change_that_stages_would_miss_is_refused(words, built):
    """An annealed temperature stayed what it was, and a new head was not used."""
    model, pipeline = built
    REFUSED[words](model)
    with pytest.raises(PlanMismatch, match=words):
        pipeline(torch.randn(4, 4))


def test_an_attribute_or_forward_changed_on_a_class_is_refused(built, monkeypatch):
    model, pipeline = built
    with monkeypatch.context() as patch:
        patch.setattr(Annealed, "gain", 0.5)
        with pytest.raises(PlanMismatch, match=r"'Annealed\.gain' was 1.0, now it is 0.5"):
            pipeline(torch.randn(4, 4))
    check_equal(model, pipeline)
    monkeypatch.setattr(Annealed, "forward", lambda self, x: self.head(x))
    with pytest.raises(PlanMismatch, match=r"'Annealed\.forward' was a function"):
        pipeline(torch.randn(4, 4))


def test_a_global_number_that_is_changed_is_refused(built, monkeypatch):
    """A schedule over the epochs that a global variable holds stayed at its first value."""
    _, pipeline = built
    monkeypatch.setattr(sys.modules[__name__], "SHARPNESS", 0.5)
    with pytest.raises(PlanMismatch, match=r"SHARPNESS' was 1.0, now it is 0.5"):
        pipeline(torch.randn(4, 4))


def test_a_global_named_like_an_attribute_may_change(built, monkeypatch):
    model, pipeline = built
    monkeypatch.setattr(sys.modules[__name__], "temperature", 3.0)
    check_equal(model, pipeline)


def test_a_child_replaced_on_the_pipeline_is_refused(built):
    """The optimizer was given the new head, and the stages went on with the old one."""
    _, pipeline = built
    pipeline.head = nn.Linear(4, 4)
    with pytest.raises(PlanMismatch, match="'head' was replaced on this pipeline"):
        pipeline(torch.randn(4, 4))


class Noisy(nn.Module):
    """Functional dropout in a block of its own, which has no leaf module for it."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), NoisyBlock()

    def forward(self, x):
        return self.block(self.first(x))


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


def test_modes_are_the_models_from_step_to_step():
    """A block in evaluation mode went on with its functional dropout."""
    model = Noisy()
    profile = traced_profile(Case("own", None, model, torch.ones(2, 4), mse_loss))
    options = PlanOptions(num_microbatches=2)
    plan = plan_from_balance(profile, Cluster.uniform(2), options, [1, len(profile.layers) - 1])
    pipeline, x = Pipeline(model, plan), torch.randn(4, 4)
    model.block.eval()
    check_equal(model, pipeline)
    pipeline.train()
    assert model.block.training
    assert not torch.equal(pipeline(x), pipeline(x))
    pipeline.eval()
    assert not any(module.training for module in model.modules())
    check_equal(model, pipeline)
    model.train()
    with pytest.raises(PlanMismatch, match="call train"):
        pipeline(x)


def test_a_pipeline_that_is_moved_knows_its_new_buffers(built):
    model, pipeline = built
    pipeline.double()
    batch = torch.randn(4, 4, dtype=torch.float64)
    pipeline(batch).sum().backward()
    model.scale = torch.ones(4, dtype=torch.float64)
    with pytest.raises(PlanMismatch, match="'scale' was a tensor"):
        pipeline(batch)
