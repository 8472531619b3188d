"""Leave a model and the random generators exactly as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore modes, buffers, gradients and random state on the way out, whatever happens.

    Args:
        model: The model; parameters must not be changed inside.
        training: Mode to put the whole model in meanwhile; `None` leaves each module's own.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    python_state = random.getstate()
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(python_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
