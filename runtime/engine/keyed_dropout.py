"""Random numbers that do not depend on the plan."""

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
from ..random_state import RandomState

# Generators of the CPU and of Python are one for the whole process.
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
    """Forwards of one micro-batch inside draw numbers that depend on these and the layer alone.

    Dropout, and whatever else draws from torch's or Python's generators, then has the same masks
    however the model is cut, on which rank a stage is, and when a forward is computed again::

        with keyed_dropout(stage, seed=0, step=step, microbatch=index):
            outputs = stage(*inputs)

    So the loss of a plan equals that of any other with the same micro-batches on the same kind of
    device. Generators of the CPU, of Python and of the device are left as they were found. Threads
    of one process wait for each other, as they share the CPU's.

    Args:
        module: A stage, or a module that holds stages (`capture.segment.Segment`).
        seed: Of the whole training; another one on replicas of the whole pipeline, which are
            given other samples.
        step: Of training, counted by the caller.
        microbatch: Of the step's batch, counted over all replicas of a stage.
        device: Where the module runs; that of its first parameter if `None`.

    Raises:
        InvalidInput: The module holds no stage, so that its layers are not known.
    """
    stages = [stage for stage in module.modules() if isinstance(stage, Segment)]
    if not stages:
        raise InvalidInput(
            f"a {type(module).__name__} holds no stage of a captured model; give a stage of a "
            "pipeline (pipeline.stages), or for the whole model captured.segment(0, "
            "len(captured.layers))"
        )
    where = default_device(module) if device is None else device
    keys = RandomKeys(seed, step, microbatch, where)
    with ExitStack() as stack:
        stack.enter_context(_lock)
        before = RandomState.now(where)
        stack.callback(before.restore, where)
        for stage in stages:
            stack.enter_context(stage.keyed(keys))
        yield
