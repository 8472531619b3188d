"""Keyed dropout: random numbers that do not depend on the plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...capture.capture import default_device
from ...capture.program.keyed_randomness import RandomKeys
from ...capture.program.segment import Segment
from ...core.errors import InvalidInput
from ...core.units import name_type
from ..random_state import preserve_random_state

# Threads of one process share the generators of the CPU and of Python.
_lock = threading.RLock()


@contextmanager
def keyed_dropout(
    module: nn.Module,
    *,
    seed: int,
    step: int,
    microbatch: int,
    device: torch.device | None = None,
) -> Iterator[None]:
    """Make the random numbers of forwards inside depend on these arguments and the layer alone.

    Dropout, and anything else that draws from torch's or Python's generators, then gets the same
    masks however the model is cut, on whichever rank a stage runs, and when it is recomputed::

        with keyed_dropout(stage, seed=0, step=step, microbatch=index):
            outputs = stage(*inputs)

    So all plans with the same micro-batches compute the same loss on the same kind of device. The
    generators of the CPU, of Python and of the device are restored afterwards. Threads of one
    process wait for each other, because they share these generators.

    Args:
        module: A stage, or a module that holds stages (`Segment`).
        seed: Seed of the whole training run. Replicas of the whole pipeline, which see other
            samples, need different ones.
        step: Number of the training step, counted by the caller.
        microbatch: Index in the step's batch, counted over all replicas of a stage.
        device: Where the module runs; that of its first parameter if `None`.

    Raises:
        InvalidInput: The module holds no stage, so its layers are unknown.
    """
    stages = [stage for stage in module.modules() if isinstance(stage, Segment)]
    if not stages:
        raise InvalidInput(
            f"{name_type(module)} holds no stage of a captured model; pass a stage of a "
            "pipeline (pipeline.stages), or for the whole model captured.segment(0, "
            "len(captured.layers))"
        )
    where = default_device(module) if device is None else device
    keys = RandomKeys(seed, step, microbatch, where)
    with _lock, preserve_random_state(where), ExitStack() as stack:
        for stage in stages:
            stack.enter_context(stage.keyed(keys))
        yield
