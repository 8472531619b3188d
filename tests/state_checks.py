"""Everything about a model that measuring must leave alone, as values that compare bit by bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Bytes of parameters, buffers and gradients; modes; hooks; random state."""
    return {
        "state": {key: _bytes(value) for key, value in model.state_dict().items()},
        "identities": [id(parameter) for parameter in model.parameters()],
        "gradients": {
            name: None if parameter.grad is None else (id(parameter.grad), _bytes(parameter.grad))
            for name, parameter in model.named_parameters()
        },
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        "torch": _bytes(torch.get_rng_state()),
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
