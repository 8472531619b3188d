"""A pass is a forward and a backward over the layers: the gradients it makes are the model's."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.profiler.layers.first_run import first_run
from stagewright.profiler.layers.layer_run import layer_runs
from stagewright.profiler.layers.loss_layer import Loss
from stagewright.profiler.layers.trace_model import make_gradients
from stagewright.profiler.machine.clock import Clock, Mark
from stagewright.profiler.measure.timed_passes import Passes, Samples
from tests.torch_models import call, make_case

CPU = torch.device("cpu")


def passes_over(model, sample, loss_fn, target):
    """Everything ready for passes, gradients zero."""
    captured = trace(model, sample, check=False)
    runs = layer_runs(captured)
    num_layers = len(runs)
    if loss_fn is not None:
        runs.append(Loss(loss_fn, target, CPU).run(captured))
    make_gradients(runs)
    flat = list(sample.values()) if isinstance(sample, dict) else list(sample)
    inputs = dict(zip(captured.program.inputs, flat, strict=True))
    first = first_run(model, runs, inputs, num_layers, nullcontext)
    samples = [Samples() for _ in runs]
    passes = Passes(runs, first.values, Clock(CPU), nullcontext, samples)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return passes, samples


def target_of(case):
    if case.name == "gpt2":
        return case.sample["input_ids"]
    shape = {"mlp": (4,), "resnet": (2,), "unet": (2, 16, 16)}[case.name]
    return torch.zeros(shape, dtype=torch.long)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["mlp", "resnet", "unet", "gpt2"])
def test_gradients_of_a_pass_are_those_of_the_model(name, split):
    """Skips, tied weights, operations in place: all arrive where they do in one backward."""
    case = make_case(name)
    target = target_of(case)
    case.loss_fn(call(case.model, case.sample), target).backward()
    expected = {key: p.grad.clone() for key, p in case.model.named_parameters()}
    passes, samples = passes_over(case.model, case.sample, case.loss_fn, target)
    passes.run(range(len(samples)), split=split)
    for key, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-3, atol=1e-5)
    phases = {"backward_input", "backward_weight"} if split else {"backward"}
    for layer in samples:
        assert set(layer.device_s) == {"forward", *phases}
        assert all(len(found) == 1 for found in layer.device_s.values())


def test_group_norm_of_a_channels_last_input_is_measured_in_two_goes():
    """Its weights' gradients without its input's end the process on the CPU."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.ReLU())
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    model(x).sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    passes, samples = passes_over(model, (x,), lambda output, _: output.sum(), torch.zeros(2))
    passes.run(range(len(samples)), split=True)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-5)


def test_a_cold_pass_is_not_recorded():
    case = make_case("mlp")
    passes, samples = passes_over(case.model, case.sample, None, None)
    passes.run(range(len(samples)), keep=False)
    assert all(not layer.total_s() for layer in samples)


def test_some_layers_alone_run_on_what_they_really_receive():
    """The producers' values come from the first run; a layer in place works on a copy of them."""
    look = Mock()  # a list of what it saw would be state that layers may share

    class Look(nn.Module):
        def forward(self, x):
            look(x.detach().clone())
            return x.mul_(2)

    model = nn.Sequential(nn.Linear(4, 4), Look(), nn.Linear(4, 2))
    passes, samples = passes_over(model, (torch.randn(3, 4),), None, None)
    look.reset_mock()
    for chosen in ([1], [1, 2], [0, 1], [1]):
        passes.run(chosen)
    seen = [call.args[0] for call in look.call_args_list]
    assert len(seen) == 4
    assert all(torch.equal(value, seen[0]) for value in seen)
    assert [len(layer.total_s()) for layer in samples] == [1, 4, 1]


def test_what_takes_long_is_charged_to_its_layer_and_direction():
    """By operations counted instead of seconds: a clock that only moves when work is done."""

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, clock, forward_s, backward_s):
            ctx.clock, ctx.backward_s = clock, backward_s
            clock.now_s += forward_s
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.clock.now_s += ctx.backward_s
            return gradient * 2, None, None, None

    class Worker(nn.Module):
        def __init__(self, clock, forward_s, backward_s):
            super().__init__()
            self.clock, self.costs = clock, (forward_s, backward_s)
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return Work.apply(x * self.weight, self.clock, *self.costs)

    class Fake(Clock):
        now_s = 0.0

        def mark(self):
            return type(super().mark())(self.now_s)

    clock = Fake(CPU)
    model = nn.Sequential(Worker(clock, 1, 2), Worker(clock, 4, 8), Worker(clock, 16, 32))
    passes, samples = passes_over(model, (torch.randn(3, 4),), None, None)
    passes._clock = clock
    passes.run(range(3))
    assert [layer.device_s["forward"] for layer in samples] == [[1], [4], [16]]
    assert [layer.device_s["backward"] for layer in samples] == [[2], [8], [32]]
    passes.run(range(3), split=True)
    assert [layer.device_s["backward_input"] for layer in samples] == [[0], [8], [32]]
    assert [layer.device_s["backward_weight"] for layer in samples] == [[2], [8], [32]]


class Issuing(Clock):
    """A clock of a device that works on its own; issuing a layer's work takes the host 2 s."""

    def __init__(self):
        super().__init__(CPU)
        self.now_s, self.asked_s = 0.0, []

    def mark(self):
        return Mark(self.now_s)

    def head_start(self, seconds):
        self.asked_s.append(seconds)


class Issued(nn.Module):
    """A layer that is issued; if it ``waits``, then for the device, which is slow to wake up."""

    def __init__(self, clock, *, waits=False):
        super().__init__()

        def issue():
            clock.now_s += 2 + (1.4 * clock.asked_s[-1] if waits and clock.asked_s else 0)

        self.issue = issue

    def forward(self, x):
        self.issue()
        return x * 2


def issued_passes(clock, *layers):
    passes, samples = passes_over(nn.Sequential(*layers), (torch.randn(3, 4),), None, None)
    passes._clock = clock
    return passes, samples


def test_a_head_start_does_not_grow_where_the_host_waits_for_the_device():
    """It was as long as issuing had taken last time, head start included: 1, 2.4, 4.4 times..."""
    clock = Issuing()
    passes, samples = issued_passes(clock, nn.Linear(4, 4), Issued(clock, waits=True))
    for _ in range(5):
        passes.run([1])
    forwards_s = clock.asked_s[::2]
    assert forwards_s == [0, 2, 2, 2, 2]
    assert samples[1].dispatch_s["forward"] == pytest.approx([2, 4.8, 4.8, 4.8, 4.8])


def test_layers_of_a_class_share_their_head_start():
    """Of equal layers each pass takes another one, which had none: its time was of launching."""
    clock = Issuing()
    passes, samples = issued_passes(clock, Issued(clock), nn.Linear(4, 4))
    passes._samples = [samples[0], samples[0]]
    passes.run([0], keep=False)
    passes.run([1])
    assert clock.asked_s == [0, 0, 2, 0]


def test_a_phase_that_was_not_run_yet_has_a_head_start_too():
    """The pass that warms up takes gradients in two goes, so the first whole backward had none."""
    clock = Issuing()
    passes, _ = issued_passes(clock, nn.Linear(4, 4), Issued(clock))
    passes.run([1], split=True, keep=False)
    passes.run([1])
    assert clock.asked_s[-1] == 2
