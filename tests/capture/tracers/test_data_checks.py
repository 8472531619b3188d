"""Checks of data are left out of a traced model, and named; branches on data are not traced."""

from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.tracers.data_checks import passing_value


class Head(nn.Module):
    """Two blocks, the check in the model's own forward, so that nothing less could be opaque."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def run(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Asserts(Head):
    def forward(self, x):
        assert torch.all(x < 100).item(), f"{x} is too large"
        return self.run(x)


class Raises(Head):
    def forward(self, x):
        if x.dim() > 2 or not (x < 100).all():
            raise ValueError(f"too large: {x}" if x.dim() > 1 else "too large")
        return self.run(x)


class RaisesForNumber(Head):
    def forward(self, x):
        if x.max().item() > 100:
            raise ValueError("too large")
        return self.run(x)


class Validates(Head):
    """torch.distributions checks its arguments."""

    def forward(self, x):
        y = self.run(x)
        kind = torch.distributions.Normal(y, torch.ones_like(y), validate_args=True)
        return kind.log_prob(x)


@contextmanager
def noting(notes):
    try:
        yield
    finally:
        notes.append("done")


class ChecksInBlocks(Head):
    """Blocks that end whatever happens in them let the exception out."""

    def forward(self, x):
        try:
            with torch.no_grad(), nullcontext(), noting([]):
                check_size(x)
        finally:
            x = x.clone()
        return self.run(x)


@pytest.mark.parametrize("kind", [Asserts, Raises, RaisesForNumber, Validates, ChecksInBlocks])
def test_a_check_of_data_is_left_out_and_named(kind):
    captured = trace(kind(), torch.randn(3, 4))
    assert [layer.name for layer in captured.graph.layers] == ["blocks.0", "blocks.1"]
    assert not any(layer.opaque for layer in captured.graph.layers)
    (note,) = [note for note in captured.graph.notes if note.startswith("does not check")]
    assert note.split()[-1].partition(":")[0] in ("test_data_checks.py", "distribution.py")


class Caught(Head):
    """What it raises it catches: a branch like any other."""

    def forward(self, x):
        try:
            if (x > 0).any():
                raise ValueError
        except ValueError:
            return self.run(-x)
        return self.run(x)


def check_size(x):
    if (x > 100).any():
        raise ValueError


class CaughtByCaller(Head):
    """A helper's check that decides which way the model goes."""

    def forward(self, x):
        try:
            check_size(x)
        except ValueError:
            return self.run(-x)
        return self.run(x)


class Suppressed(Head):
    def forward(self, x):
        with suppress(ValueError):
            check_size(x)
            return self.run(x)
        return self.run(-x)


class Swallow:
    """Ends a block without an exception, whatever happened in it."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


@contextmanager
def swallow():
    try:
        yield
    except ValueError:
        return


class SwallowedByClass(Head):
    def forward(self, x):
        with Swallow():
            check_size(x)
            return self.run(x)
        return self.run(-x)


class SwallowedByGenerator(Head):
    def forward(self, x):
        with swallow():
            if (x > 100).any():
                raise ValueError
            return self.run(x)
        return self.run(-x)


class Doubles(Head):
    def forward(self, x):
        if (x > 0).any():
            x = 2 * x
        return self.run(x)


@pytest.mark.parametrize(
    "kind", [Caught, CaughtByCaller, Suppressed, SwallowedByClass, SwallowedByGenerator, Doubles]
)
def test_a_branch_that_goes_on_both_ways_is_not_a_check(kind):
    assert trace(kind(), torch.randn(3, 4)).graph.mode == "modules"


def test_a_branch_none_of_whose_ways_goes_on_is_not_a_check():
    def fails(x):
        if x:
            raise ValueError
        raise TypeError

    assert all(passing_value(fails.__code__, at) is None for at in range(0, 40, 2))


class Compiled(Head):
    """Makes its mask only where it is not compiled, as transformers' LongT5 does."""

    def forward(self, x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones_like(x)
        return self.run(x * mask)


def test_code_that_fails_when_compiled_is_traced_as_it_runs_uncompiled():
    captured = trace(Compiled(), torch.randn(3, 4))
    assert captured.graph.mode == "export"
    assert not any(layer.opaque for layer in captured.graph.layers)
