"""With keyed random numbers a plan changes no result: masks follow layer, step, micro-batch."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput
from stagewright.runtime.engine.keyed_dropout import keyed_dropout
from stagewright.runtime.partition.cut import cut


class Block(nn.Module):
    """Dropout as a module, in attention and as a function."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.4)

    def forward(self, x):
        x = self.drop(x)
        heads, p = x.unsqueeze(1), 0.3 if self.training else 0.0
        x = x + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)[:, 0]
        return self.outer(functional.dropout(self.inner(x).relu(), 0.3, self.training))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Noise(nn.Module):
    """Draws from Python's generator, so capture leaves it as it is; and as its input lies."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return (self.fc(x + torch.rand_like(x)) * random.random()).t()


class TakingTurns(nn.Module):
    """A layer that runs again behind another, and a skip over both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Dropout(0.5)
        self.c = nn.Linear(8, 8)

    def forward(self, x):
        first = self.a(x)
        return self.c(self.a(self.b(first)) + first)


MODELS = {
    "exported": (Blocks, (3, 8, 8), "export"),
    "traced": (Blocks, (3, 8, 8), "trace"),
    "opaque": (lambda: nn.Sequential(*[Noise() for _ in range(4)]), (8, 8), "auto"),
    "turns": (TakingTurns, (5, 8), "auto"),
}


def made(name):
    torch.manual_seed(0)
    build, shape, mode = MODELS[name]
    model, sample = build().double(), torch.randn(shape, dtype=torch.float64)
    return model, sample, trace(model, sample, mode=mode, check=False)


def run(stages, x, *, again=False, **keys):
    """One micro-batch forward; each stage's second forward is returned where asked for."""
    values = (x,)
    for stage in stages:
        for _ in range(2 if again else 1):
            with keyed_dropout(stage, **keys):
                made = stage(*values)
        values = made
    return values[0]


def gradients(model, output):
    model.zero_grad()
    output.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def pieces(captured, count):
    """About equal numbers of layers, cut where it is legal."""
    size = len(captured.layers)
    legal = [c.boundary.after + 1 for c in captured.cuts if c.boundary.legal]
    edges = {min(legal, key=lambda p, k=k: abs(p - k * size / count)) for k in range(1, count)}
    bounds = [0, *sorted(edges), size]
    return cut(captured, [b - a for a, b in pairwise(bounds)]).stages


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_one_piece(name):
    model, x, captured = made(name)
    whole = run(pieces(captured, 1), x, seed=1, step=2, microbatch=3)
    expected = gradients(model, whole)
    for count in (2, 3, 4):
        torch.rand(count), random.random()  # other numbers were drawn before
        stages = pieces(captured, count)
        output = run(stages, x, seed=1, step=2, microbatch=3)
        assert torch.equal(output, whole)
        found = gradients(model, output)
        assert all(torch.allclose(found[key], expected[key], rtol=1e-12) for key in expected)
    assert len(stages) > 1


def test_a_forward_computed_again_has_the_same_masks():
    _, x, captured = made("exported")
    once = run(pieces(captured, 2), x, seed=1, step=2, microbatch=3)
    assert torch.equal(once, run(pieces(captured, 2), x, again=True, seed=1, step=2, microbatch=3))


@pytest.mark.parametrize("changed", ["seed", "step", "microbatch"])
def test_every_key_changes_the_masks(changed):
    _, x, captured = made("exported")
    keys = {"seed": 1, "step": 2, "microbatch": 3}
    (stage,) = pieces(captured, 1)
    assert not torch.equal(run([stage], x, **keys), run([stage], x, **{**keys, changed: 9}))


def test_layers_have_masks_of_their_own():
    model = nn.Sequential(*[nn.Dropout(0.5) for _ in range(4)])
    captured = trace(model, torch.ones(50, 50))
    masks = [run([captured.segment(k, k + 1)], torch.ones(50, 50), seed=0, step=0, microbatch=0)
             for k in range(4)]  # fmt: skip
    assert len({mask.numpy().tobytes() for mask in masks}) == 4


def test_generators_stay_where_they_were():
    _, x, captured = made("opaque")
    states = torch.get_rng_state(), random.getstate()
    run(pieces(captured, 2), x, seed=1, step=2, microbatch=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_without_keys_a_stage_draws_as_ever():
    model, x, captured = made("exported")
    (stage,) = pieces(captured, 1)
    run([stage], x, seed=1, step=2, microbatch=3)
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    assert torch.equal(stage(x)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_too(name):
    model, x, captured = made(name)
    model.cuda()
    before = torch.cuda.get_rng_state()
    outputs = []
    for count in (1, 2, 4):
        stages = [stage.cuda() for stage in pieces(captured, count)]
        outputs.append(run(stages, x.cuda(), seed=1, step=2, microbatch=3))
    assert all(torch.allclose(output, outputs[0], rtol=1e-9) for output in outputs)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_evaluation_draws_nothing():
    model, x, captured = made("exported")
    stages = [stage.eval() for stage in pieces(captured, 2)]
    expected = model.eval()(x)
    assert torch.equal(run(stages, x, seed=0, step=0, microbatch=0), expected)


def test_a_module_without_stages_is_refused():
    with (
        pytest.raises(InvalidInput, match="a Linear holds no stage of a captured model"),
        keyed_dropout(nn.Linear(1, 1), seed=0, step=0, microbatch=0),
    ):
        pass
