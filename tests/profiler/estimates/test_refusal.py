"""Models that do not run without values."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagewright.core.errors import CaptureError
from stagewright.profiler.estimates.estimate import estimate


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), block()

    def forward(self, x):
        return self.block(self.first(x))


def test_a_branch_on_data_is_to_be_measured():
    """Cause: the way out named nn.Sequential, which helps no estimate."""
    where = r"'block' \(test_refusal.py:\d+ in forward\)"
    said = rf"an estimate runs without values, and {where} needs them\."
    with pytest.raises(CaptureError, match=said) as caught:
        estimate(Model(Branching), torch.randn(2, 4), device="H100")
    assert "Sequential" not in str(caught.value)
    assert "stagewright.profile(model, sample)" in str(caught.value)
    assert caught.value.module == "block"


def test_a_block_recomputed_with_dropout_is_estimated_without_its_checkpoint():
    found = estimate(Model(Recomputed), torch.randn(2, 4), device="H100")
    assert [entry.layer.opaque for entry in found.layers] == [""] * len(found.layers)
    assert len(found.layers) == 3
    assert "recompute" in "\n".join(found.notes)
