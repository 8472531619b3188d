"""Layers share a class if, and only if, they do the same on inputs of the same kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.capture.capture import trace
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.layers.cost_classes import cost_classes, members_of
from stagewright.profiler.layers.layer_run import layer_runs
from stagewright.profiler.measure.profile import profile
from tests.torch_models import make_case

QUICK = ProfilingOptions(budget_s=0.001, num_threads=1)


def classes_of(model, sample):
    captured = trace(model, sample, check=False)
    return cost_classes(captured, layer_runs(captured))


def of_children(*children, sample=None):
    """Classes of the children of an ``nn.Sequential``."""
    return classes_of(nn.Sequential(*children), torch.randn(2, 8) if sample is None else sample)


def test_equal_blocks_share_a_class():
    case = make_case("gpt2")
    found = classes_of(case.model, case.sample)
    blocks = [group for group in members_of(found) if len(group) > 1]
    assert [len(group) for group in blocks] == [3]


def test_the_profile_carries_the_classes():
    case = make_case("gpt2")
    layers = profile(case.model, case.sample, options=QUICK).layers
    by_class: dict[str, set[str]] = {}
    for entry in layers:
        by_class.setdefault(entry.layer.cost_class, set()).add(entry.layer.name)
    assert {f"transformer.h.{index}" for index in range(3)} in by_class.values()
    assert "" not in by_class
    for names in by_class.values():
        times = {entry.forward.median_s for entry in layers if entry.layer.name in names}
        assert len(times) == 1


class Block(nn.Module):
    """Traced operation by operation."""

    def __init__(self, width=8, factor=2.0, function: Callable[[Tensor], Tensor] = torch.relu):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.factor, self.function = factor, function

    def forward(self, x):
        return self.function(self.linear(x)) * self.factor


class Blocks(nn.Module):
    """Not a Sequential, so that the blocks are traced instead of called."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


DIFFERENT = {
    "a constant": lambda: Block(factor=3.0),
    "an operation": lambda: Block(function=torch.tanh),
    "parameters that are not trained": lambda: Block().requires_grad_(False),
    "the type of a parameter": lambda: Half(),
    "no bias": lambda: without_bias(),
    "one more operation": lambda: Block(function=lambda x: torch.relu(x) + 1),
    "an order of arguments": lambda: Block(function=lambda x: torch.relu(1 - x)),
}


class Half(Block):
    def forward(self, x):
        return self.function(self.linear(x).double().float()) * self.factor


def without_bias():
    block = Block()
    block.linear.bias = None
    return block


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_traced_layer_that_differs_has_a_class_of_its_own(what):
    model = Blocks(Block(), Block(), DIFFERENT[what](), Block())
    found = classes_of(model, torch.randn(2, 8))
    assert found[1] == found[3]
    assert found[2] != found[1]


def test_an_input_without_gradient_makes_a_difference():
    """The first of equal layers has no gradient to compute for the model's input."""
    found = classes_of(Blocks(Block(), Block(), Block()), torch.randn(2, 8))
    assert found[0] != found[1] == found[2]


def test_shapes_strides_and_types_of_inputs_make_a_difference():
    turn = [nn.Flatten(), nn.Unflatten(1, (4, 4, 1))]
    images = torch.randn(2, 4, 4, 1)
    same = of_children(nn.ReLU(), nn.ReLU(), sample=images)
    assert same[0] == same[1]
    shaped = of_children(nn.ReLU(), nn.Flatten(), nn.ReLU(), *turn, sample=images)
    assert shaped[0] != shaped[2]
    strided = of_children(nn.ReLU(), Permute(), nn.ReLU(), sample=torch.randn(2, 4, 4, 4))
    assert strided[0] != strided[2]


class Permute(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


def test_one_weight_used_twice_is_not_two_weights():
    class Twice(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            if tied:
                self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = Blocks(Block(), Twice(tied=False), Twice(tied=True), Twice(tied=False))
    found = classes_of(model, torch.randn(2, 8))
    assert found[1] == found[3]
    assert found[1] != found[2]


class Opaque(nn.Module):
    """Its Python looks at its data, so that it is called whole."""

    def __init__(self, turns=1, extra="", depth=1):
        super().__init__()
        self.turns, self.extra = turns, extra
        self.inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))

    def forward(self, x):
        for _ in range(self.turns):
            x = self.inner(x)
        return x if x.sum() > -1e9 else -x

    def extra_repr(self):
        return self.extra


class OtherOpaque(Opaque):
    pass


def test_opaque_layers_share_a_class_only_if_configured_alike():
    found = of_children(
        nn.Linear(8, 8),
        Opaque(), Opaque(), Opaque(turns=2), Opaque(extra="other"), Opaque(depth=2), OtherOpaque(),
        Opaque().eval(), Opaque().requires_grad_(False), hooked(Opaque()),
    )  # fmt: skip
    assert found[1] == found[2]
    assert len(set(found[1:])) == len(found) - 2


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def turning(turns):
    """A module whose type, of the same name each time, counts for itself."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(turns):
                x = self.linear(x)
            return x if x.sum() > -1e9 else -x

    return Turning


def sine(turns):
    """A function likewise."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            for _ in range(turns):
                x = x.sin()
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Sine


def test_what_a_factory_made_is_alike_only_if_it_is_the_same():
    once, often = turning(1), turning(50)
    found = of_children(nn.Linear(8, 8), once(), often(), once())
    assert found[1] == found[3] != found[2]
    once, often = sine(1), sine(50)
    blocks = [Block(function=chosen.apply) for chosen in (once, once, often, once)]
    found = classes_of(Blocks(*blocks), torch.randn(2, 8))
    assert found[1] == found[3] != found[2]


def test_parametrized_modules_are_alike_if_parametrized_alike():
    """Each has a type of its own, so each once was a class by itself."""

    def weight(module=nn.Linear, **options):
        return nn.utils.parametrizations.weight_norm(module(8, 8), **options)

    def changed():
        module = weight()
        type(module).forward = lambda self, x: nn.Linear.forward(self, x) * 2
        return module

    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    bias = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8), name="bias", dim=None)
    _, *found = of_children(
        nn.Linear(8, 8), weight(), weight(), weight(dim=1), weight(turning_linear()), spectral,
        bias, changed(), nn.Linear(8, 8),
    )  # fmt: skip
    assert found[0] == found[1]
    assert len(set(found)) == len(found) - 1


def turning_linear():
    """A type of the name of another one."""

    class Linear(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x))

    return Linear


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = Opaque(), options

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options) + 1


def test_options_of_checkpointing_make_a_difference():
    kept = {"use_reentrant": False, "preserve_rng_state": True}
    other = {"use_reentrant": False, "preserve_rng_state": False}
    model = Blocks(*(Checkpointed(**options) for options in (kept, kept, other, kept)))
    found = classes_of(model, torch.randn(2, 8))
    assert found[1] == found[3] != found[2]


def test_dropout_of_another_rate_and_layers_in_other_modes_differ():
    found = of_children(nn.ReLU(), nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.2))
    assert found[1] == found[2] != found[3]
    frozen = of_children(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval())
    assert frozen[1] != frozen[2]


def test_classes_are_the_same_in_every_process_and_for_every_copy():
    first = classes_of(Blocks(Block(), Block()), torch.randn(2, 8))
    assert classes_of(Blocks(Block(), Block()), torch.randn(2, 8)) == first


def test_without_deduplication_every_layer_has_times_of_its_own():
    case = make_case("gpt2")
    options = QUICK.model_copy(update={"deduplicate": False})
    layers = profile(case.model, case.sample, options=options).layers
    blocks = [entry for entry in layers if entry.layer.name.startswith("transformer.h.")]
    assert len({entry.layer.cost_class for entry in blocks}) == 1
    assert len({entry.forward.median_s for entry in blocks}) > 1
