"""Skip connections, in a pipeline and outside of one."""

import copy

import pytest
import torch
from torch import nn

from stagewright.torchgpipe import GPipe
from stagewright.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from stagewright.torchgpipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker

MODES = ["always", "except_last", "never"]


@skippable(stash=["foo"])
class Stash(nn.Module):
    """Stashes twice its input."""

    def forward(self, x):
        yield stash("foo", x * 2)
        return x + 1


@skippable(pop=["foo"])
class Pop(nn.Module):
    def forward(self, x):
        foo = yield pop("foo")
        return x * foo


@skippable(stash=["far", "near"])
class StashTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        yield stash("far", y)
        yield stash("near", y.tanh())
        return x, y.relu()


@skippable(pop=["near"])
class PopNear(nn.Module):
    def forward(self, pair):
        x, y = pair
        return x * (yield pop("near")) + y


@skippable(pop=["far"])
class PopFar(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + (yield pop("far"))


@pytest.fixture(autouse=True)
def tracker():
    with use_skip_tracker(SkipTracker()):
        yield current_skip_tracker()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(StashTwo(), PopNear(), nn.Linear(3, 3), nn.Dropout(0.0), PopFar())


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("kinds", [["cuda", "cpu", "cuda"], ["cpu", "cuda", "cpu"], ["cuda"] * 3])
def test_between_devices(kinds, checkpoint):
    module = layers().double()
    model = GPipe(copy.deepcopy(module), [1, 2, 2], devices=kinds, chunks=3, checkpoint=checkpoint)
    x = torch.rand(8, 3, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for _ in range(3):  # streams that do not wait for each other are wrong only now and then
        module(x).pow(2).sum().backward()
        model(y).pow(2).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_a_pipeline_with_skips_is_the_module(balance, checkpoint):
    module = layers().double()
    model = GPipe(
        copy.deepcopy(module), balance, devices=["cpu"] * 5, chunks=3, checkpoint=checkpoint
    )
    x = torch.rand(8, 3, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = module(x), model(y)
    expected.pow(2).sum().backward()
    found.pow(2).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(y.grad, x.grad)
    for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("checkpoint", MODES)
def test_none_is_passed_on(checkpoint):
    @skippable(stash=["none"])
    class StashNone(nn.Module):
        def forward(self, x):
            yield stash("none", None)
            return x

    @skippable(pop=["none"])
    class PopNone(nn.Module):
        def forward(self, x):
            assert (yield pop("none")) is None
            return x

    model = GPipe(nn.Sequential(StashNone(), PopNone()), [1, 1], devices=["cpu"] * 2, chunks=5,
                  checkpoint=checkpoint)  # fmt: skip
    x = torch.rand(10, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(10))


def test_nested_layers_skip_across_partitions():
    module = nn.Sequential(nn.Sequential(Stash(), nn.Identity()), nn.Sequential(Pop()))
    x = torch.rand(4)
    expected = module(x)
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    assert torch.equal(model(x), expected)


def test_state_dict_names():
    model = GPipe(layers(), [2, 3], devices=["cpu"] * 2)
    assert next(iter(model.state_dict())) == "partitions.0.0.module.linear.weight"


def test_skips_in_the_pipeline_stay_apart_from_those_outside(tracker):
    GPipe(nn.Sequential(Stash(), Pop()), [1, 1], devices=["cpu"] * 2)(torch.rand(2))
    assert tracker.tensors == {}


def test_without_a_pipeline(tracker):
    first, second = Stash(), Pop()
    x = first(torch.tensor(20))
    assert list(tracker.tensors) == [(None, "foo")]
    assert second(x).item() == 21 * 40
    assert tracker.tensors == {}
    with pytest.raises(RuntimeError, match="'foo' has not been stashed"):
        second(x)


def test_what_is_declared_is_done_and_what_is_done_is_declared():
    def make(body, **declared):
        @skippable(**declared)
        class Layer(nn.Module):
            forward = body

        return Layer()

    def nothing(self, x):
        return x

    def stashes(self, x):
        yield stash("foo", x)
        return x

    def pops(self, x):
        return (yield pop("foo"))

    def pops_twice(self, x):
        yield pop("foo")
        return (yield pop("foo"))

    def yields_else(self, x):
        yield x
        return x

    x = torch.rand(1)
    for layer, message in (
        (make(nothing, stash=["foo"]), "'foo' must be stashed but have not"),
        (make(stashes), "'foo' has not been declared as stashable"),
        (make(pops), "'foo' has not been declared as poppable"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer(x)
    for body, error in ((nothing, "must be popped but have not"), (pops_twice, "popped already")):
        Stash()(x)
        with pytest.raises(RuntimeError, match=error):
            make(body, pop=["foo"])(x)
    with pytest.raises(TypeError, match="not a command from @skippable"):
        make(yields_else)(x)


def test_how_a_layer_prints():
    assert repr(PopFar()) == (
        "@skippable(PopFar(\n  (linear): Linear(in_features=3, out_features=3, bias=True)\n))"
    )
    assert Stash.__name__ == "Stash"
    assert Stash.__doc__ == "Stashes twice its input."


def test_namespaces():
    one, other = Namespace(), Namespace()
    assert one != other
    assert copy.copy(one) == one
    assert copy.copy(one) is not one
    assert hash(copy.deepcopy(one)) == hash(one)
    assert (one < other) != (other < one)
    model = nn.Sequential(
        Stash().isolate(one), Stash().isolate(other), Pop().isolate(other), Pop().isolate(one)
    )
    verify_skippables(model)
    x = torch.rand(4)
    expected = model(x)
    assert torch.equal(GPipe(model, [1, 2, 1], devices=["cpu"] * 3, chunks=2)(x), expected)
    layer = StashTwo().isolate(one, only=["far"]).isolate(other, only=["near"])
    assert layer.stashable() == [(one, "far"), (other, "near")]


@pytest.mark.parametrize(
    ("kinds", "messages"),
    [
        ([Stash], ["no module declared 'foo' as poppable but stashed"]),
        ([Pop], ["'0' declared 'foo' as poppable but it was not stashed"]),
        ([Pop, Stash], ["'0' declared 'foo' as poppable but it", "no module declared 'foo'"]),
        ([Stash, Stash, Pop], ["'1' redeclared 'foo' as stashable but not isolated"]),
        ([Stash, Pop, Pop], ["'2' redeclared 'foo' as poppable but not isolated"]),
        ([Stash, Pop, Stash, Pop], ["'2' redeclared 'foo' as st", "'3' redeclared 'foo' as po"]),
        (
            [skippable(stash=["foo"], pop=["foo"])(nn.Identity)],
            ["'0' declared 'foo' both as stashable and as poppable"],
        ),
    ],
)
def test_pairs_that_do_not_match(kinds, messages):
    module = nn.Sequential(*[kind() for kind in kinds])
    for check in (verify_skippables, lambda m: GPipe(m, [len(m)], devices=["cpu"])):
        with pytest.raises(TypeError, match="pairs of stash and pop do not match") as caught:
            check(module)
        for message in messages:
            assert message in str(caught.value)
        assert str(caught.value).count("\n* ") == len(messages)
