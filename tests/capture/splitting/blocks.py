"""Small models of traced blocks, compared with themselves split over ranks that are threads."""

import copy

import torch
from torch import nn

from tests.capture.splitting.threads import join_outputs, run_split

EXACT = 1e-12


def check(model, sample, degree, stages=()):
    """Compare with the unsplit model; return the names of divided weights."""
    model = model.double()
    whole = copy.deepcopy(model)
    made = join_outputs(whole(*sample))
    made.mul(torch.arange(made.numel()).reshape(made.shape).sin()).sum().backward()
    outputs, gradients, divided = run_split(model, sample, degree, stages=stages)
    for output in outputs:
        assert (output - made).abs().max() <= EXACT
    for name, weight in whole.named_parameters():
        for found in gradients[name]:
            assert (found - weight.grad).abs().max() <= EXACT, name
    return divided


class Block(nn.Module):
    """A layer with a forward of its own, so that its operations are traced."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._run = forward

    def forward(self, x):
        return self._run(self, x)


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
