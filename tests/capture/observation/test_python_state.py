"""State in plain Python: what changes it is called as written; capturing puts all of it back."""

import itertools
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.observation.preserve import preserve_model
from stagewright.capture.observation.python_state import get_generator_state, read_closure
from stagewright.core.errors import CaptureError


class Keeping(nn.Module):
    """Between two layers it does what it is told with what it keeps."""

    def __init__(self, kept, use):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept, self.use = kept, use

    def forward(self, x):
        return self.b(self.use(self, self.a(x)))


def counting_list(model, h):
    model.kept[0] += 1
    return h * 2 if model.kept[0] % 4 == 0 else h


def counting_nested(model, h):
    model.kept["counts"][0] += 1
    return h * 2 if model.kept["counts"][0] % 4 == 0 else h


def counting_object(model, h):
    model.kept.steps += 1
    return h * 2 if model.kept.steps % 4 == 0 else h


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("more", "steps")

    def __init__(self, steps):
        self.steps = steps


def cycling_nested(model, h):
    return h * next(model.kept["factors"][0])


def counting(model, h):
    model.kept += 1
    return h.detach() if model.kept > 3 else h


def drawing(model, h):
    return h * 2 if model.kept.random() < 0.2 else h


def drawing_older(model, h):
    return h * 2 if model.kept.random_sample() < 0.2 else h


def drawing_torch(model, h):
    return h * 2 if torch.rand((), generator=model.kept).item() < 0.2 else h


def cycling(model, h):
    return h * next(model.kept)


def training_later(model, h):
    model.kept[0] += 1
    model.a.requires_grad_(model.kept[0] > 2)
    return h


KINDS = {
    "number": (lambda: 0, counting),
    "list": (lambda: [0], counting_list),
    "nested": (lambda: {"counts": [0]}, counting_nested),
    "object": (lambda: SimpleNamespace(steps=0), counting_object),
    "slots": (lambda: Slotted(0), counting_object),
    "python": (lambda: random.Random(3), drawing),
    "numpy": (lambda: np.random.default_rng(3), drawing),
    "older numpy": (lambda: np.random.RandomState(3), drawing_older),
    "torch": (lambda: torch.Generator().manual_seed(3), drawing_torch),
    "iterator": (lambda: itertools.cycle([1.0, 1.0, 1.0, 3.0]), cycling),
    "nested iterator": (
        lambda: {"factors": [itertools.cycle([1.0, 1.0, 1.0, 3.0])]},
        cycling_nested,
    ),
    "training": (lambda: [0], training_later),
}


def six_steps(model, run):
    found = []
    for seed in range(6):
        torch.manual_seed(seed)
        model.zero_grad()
        output = run(torch.randn(3, 4))
        output.sum().backward()
        gradients = [p.grad.clone() if p.grad is not None else 0 for p in model.parameters()]
        found.append((output.detach(), gradients))
    return found


@pytest.mark.parametrize("inside", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("kind", KINDS)
def test_six_steps_are_equal_and_start_where_the_model_stood(kind, inside):
    make, use = KINDS[kind]

    def build():
        torch.manual_seed(0)
        return Keeping(make(), use)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.head = build(), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.child(x))

    def whole():
        return Parent() if inside else build()

    model, eager = whole(), whole()
    captured = trace(model, torch.randn(3, 4))
    by_itself = inside and kind != "training"  # parameters are not the module's own
    assert set(captured.program.opaque) == {"child" if by_itself else ""}
    piece = captured.segment(0, len(captured.layers))
    found = six_steps(model, lambda x: captured.unflatten_output(piece(x)))
    torch.testing.assert_close(found, six_steps(eager, eager))


def test_what_another_module_changes_leaves_the_whole_as_written():
    class Child(nn.Module):
        steps = 0

        def forward(self, x):
            return x * 2 if self.steps % 4 == 0 else x

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.child = nn.Linear(4, 4), Child()

        def forward(self, x):
            self.child.steps += 1
            return self.child(self.a(x))

    assert set(trace(Parent(), torch.randn(3, 4)).program.opaque) == {""}


def test_caches_made_once_are_traced():
    def caching(model, h):
        if model.kept["length"] is None:
            model.kept.update(length=4, table=torch.ones(4))
            model.size = 4
        return h * model.kept["table"]

    model = Keeping({"length": None}, caching)
    model.size = 0
    captured = trace(model, torch.randn(3, 4))
    assert captured.program.opaque == {}
    assert model.kept == {"length": None}


def test_an_iterator_that_cannot_be_put_back_is_not_used_up():
    model = Keeping((factor for factor in (1.0, 2.0)), cycling)
    with pytest.raises(CaptureError, match="cannot be copied"):
        trace(model, torch.randn(3, 4))
    assert next(model.kept) == 1.0


def test_an_iterator_in_a_tuple_is_not_used_up():
    model = Keeping({"factors": (itertools.count(1.0),)}, cycling_nested)
    with pytest.raises(CaptureError, match="in a tuple or set an iterator"):
        trace(model, torch.randn(3, 4))
    assert next(model.kept["factors"][0]) == 1.0


def test_slots_are_put_back_as_they_were_filled():
    model = nn.Linear(2, 2)
    model.kept = Slotted([1])
    with preserve_model(model):
        model.kept.steps.append(2)
        model.kept.steps, model.kept.more = [3], 4
    assert model.kept.steps == [1]
    assert not hasattr(model.kept, "more")


def test_containers_tensors_arrays_and_generators_are_put_back():
    model = nn.Linear(2, 2)
    model.kept = {
        "queue": deque([1, 2], maxlen=2),
        "ordered": OrderedDict(a=[1]),
        "object": SimpleNamespace(n=[1]),
        "tensor": torch.ones(2),
        "array": np.ones(2),
        "generators": [random.Random(1), torch.Generator(), np.random.default_rng(1)],
    }
    kept = model.kept
    states = [get_generator_state(generator) for generator in kept["generators"]]
    with preserve_model(model):
        kept["queue"].append(3)
        kept["ordered"]["a"].append(2)
        kept["ordered"]["b"] = 1
        kept["object"].n[0], kept["object"].more = 2, 3
        kept["tensor"].add_(1)
        kept["array"] += 1
        kept["generators"][0].random()
        torch.rand(1, generator=kept["generators"][1])
        kept["generators"][2].random()
    assert kept["queue"] == deque([1, 2])
    assert kept["ordered"] == {"a": [1]}
    assert vars(kept["object"]) == {"n": [1]}
    assert kept["tensor"].tolist() == [1, 1]
    assert kept["array"].tolist() == [1, 1]
    assert [get_generator_state(generator) for generator in kept["generators"]] == states


def test_a_variable_that_is_not_assigned_yet_is_not_in_a_closure():
    def enclose():
        def inner():
            return later

        before = read_closure(inner)
        later = 1
        return before, read_closure(inner)

    assert enclose() == ({}, {"later": 1})
