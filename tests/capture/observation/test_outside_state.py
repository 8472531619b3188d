"""Counters outside the model are found before they act, and the model is not cut."""

import contextvars
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.observation.outside_state import find_changes, read_outside_state
from stagewright.capture.observation.python_state import read_content

CALLS = 0
HERE = threading.local()
HERE.calls = 0
THERE = threading.local()
STATISTICS, WARNED = {}, False
CALLS_VARIABLE = contextvars.ContextVar("calls", default=0)


class Late(nn.Module):
    """Computes something else after many calls."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x) * (3 if self.count() > 1000 else 1))

    def count(self):
        return 0


class InGlobal(Late):
    def count(self):
        global CALLS
        CALLS += 1
        return CALLS


class InClass(Late):
    calls = 0

    def count(self):
        type(self).calls += 1
        return self.calls


class InThread(Late):
    def count(self):
        HERE.calls += 1
        return HERE.calls


class InContext(Late):
    def count(self):
        CALLS_VARIABLE.set(CALLS_VARIABLE.get() + 1)
        return CALLS_VARIABLE.get()


def in_closure():
    calls = 0

    class InClosure(Late):
        def count(self):
            nonlocal calls
            calls += 1
            return calls

    return InClosure()


def make_counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


class InFunction(Late):
    def __init__(self):
        super().__init__()
        self.count = make_counter()


class InBytes(Late):
    def __init__(self):
        super().__init__()
        self.calls = bytearray(1)

    def count(self):
        self.calls[0] += 1
        return self.calls[0]


class Cold(Late):
    """Its count is in no place before the first call."""

    def count(self):
        STATISTICS["calls"] = STATISTICS.get("calls", 0) + 1
        return STATISTICS["calls"]


class ColdThread(Late):
    def count(self):
        THERE.calls = getattr(THERE, "calls", 0) + 1
        return THERE.calls


COUNT = make_counter()


class ByHelper(Late):
    def count(self):
        return COUNT()


class Warns(Late):
    """Sets flags and fills a cache in its first call."""

    warned = False
    cache: ClassVar[dict[int, float]] = {}

    def count(self):
        global WARNED
        WARNED = True
        type(self).warned = True
        self.cache.setdefault(1, 1.0)
        return 0


class Branch(nn.Module):
    """Branches on its data, and is therefore called as written."""

    def forward(self, x):
        return x if float(x.detach().sum()) < 1e9 else x * 2


def beside_a_branch(model):
    return nn.Sequential(nn.Linear(4, 4), Branch(), model)


@pytest.mark.parametrize(
    "kind",
    [InGlobal, InClass, InThread, InContext, in_closure, Cold, ColdThread, ByHelper],
)
@pytest.mark.parametrize("wrap", [lambda model: model, beside_a_branch])
def test_a_model_that_counts_outside_itself_is_not_cut(kind, wrap):
    (layer,) = trace(wrap(kind()), torch.rand(2, 4)).graph.layers
    assert "changes a variable outside the model" in layer.opaque
    assert layer.stateful


@pytest.mark.parametrize("kind", [InFunction, InBytes])
def test_a_counter_held_by_an_attribute_makes_its_module_opaque(kind):
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    layers = {layer.name: layer for layer in trace(model, torch.rand(2, 4)).graph.layers}
    assert [name for name, layer in layers.items() if layer.stateful] == ["1"]
    assert "keeps from call to call" in layers["1"].opaque


def test_a_capture_leaves_bytes_as_they_were():
    model = InBytes()
    trace(model, torch.rand(2, 4))
    assert model.calls == bytearray(1)


def test_a_context_variable_that_holds_itself_is_read():
    holds_itself = contextvars.ContextVar("holds_itself")
    holds_itself.set([holds_itself])
    assert read_content(holds_itself) == read_content(holds_itself)


def test_a_model_that_does_not_count_is_cut():
    assert len(trace(Late(), torch.rand(2, 4)).graph.layers) > 1


def test_what_is_set_once_is_no_counter():
    """A plan made where it was set already was refused by ranks, where it was not."""
    first, second = (trace(Warns(), torch.rand(2, 4)).graph for _ in range(2))
    assert WARNED
    assert len(first.layers) == len(second.layers) > 1


def test_variables_of_one_name_are_told_apart():
    idle, busy = (make_class(step) for step in (0, 1))
    for model in (nn.Sequential(idle(), busy()), nn.Sequential(busy(), idle())):
        assert trace(model, torch.rand(2, 4)).graph.layers[0].stateful


def make_class(step):
    class Made(Late):
        calls = 0

        def count(self):
            type(self).calls += step
            return self.calls

    return Made


def test_what_changes_is_found_by_name():
    model = nn.Sequential(InGlobal(), InClass(), InThread(), InContext(), in_closure())
    before = read_outside_state(model)
    assert find_changes(before, read_outside_state(model)) == {}
    model(torch.rand(2, 4))
    names = {
        name.removeprefix(f"{__name__}.")
        for name in find_changes(before, read_outside_state(model))
    }
    assert names == {
        "CALLS",
        "InClass.calls",
        "HERE",
        "CALLS_VARIABLE",
        "in_closure.<locals>.InClosure.count.calls",
    }
