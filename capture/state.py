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

    Buffers are restored as objects and as values: a forward may change one in place, or put
    another in its place.

    Args:
        model: The model; parameters must not be changed inside.
        training: Mode to put the whole model in meanwhile; `None` leaves each module's own.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
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
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(python_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
