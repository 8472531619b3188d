"""Operations of an exported graph that nothing reads."""

import torch
from torch import nn
from torch.nn import functional

from stagewright.capture.capture import trace


class UnreadDropout(nn.Module):
    """Drops values that nothing reads, as the last block of PEGASUS-X does to its global tokens."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for block in self.blocks:
            functional.dropout(x, 0.5, self.training)
            x = functional.dropout(block(x), 0.5, self.training)
        return x


def test_random_numbers_of_unread_operations_are_still_drawn():
    captured = trace(UnreadDropout(), torch.randn(3, 4))
    assert captured.graph.mode == "export"
    assert [layer.name for layer in captured.graph.layers] == ["blocks.0", "blocks.1"]
