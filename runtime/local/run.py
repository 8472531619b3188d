"""Execution of micro-batches through local stages in clock order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..changed_buffers import ChangedBuffers
from .checkpoint import checkpoint, recompute_before
from .copy import arrive, cross, leave
from .dependency import fork, join
from .streams import StageDevice
from .thread_modes import ThreadModes

Values = tuple[Any, ...]


@dataclass(frozen=True)
class LocalStage:
    """Stage of a local run.

    Attributes:
        function: Maps the index of a micro-batch and its inputs to its outputs. The inputs are the
            previous stage's outputs, then the values in ``takes``; the outputs are the next
            stage's inputs, then the values in ``leaves``.
        module: Module whose buffers a recomputation must not change.
        device: Device and streams of the stage.
        checkpointed: Number of micro-batches, from the first, that keep only their inputs.
        takes: Names of values received directly from earlier stages.
        leaves: Names of values produced for later stages, or for the caller if none takes them.
    """

    function: Callable[[int, Values], Values]
    module: nn.Module
    device: StageDevice
    checkpointed: int = 0
    takes: tuple[Hashable, ...] = ()
    leaves: tuple[Hashable, ...] = ()


def run_stages(stages: Sequence[LocalStage], microbatches: Sequence[Values]) -> list[Values]:
    """Run all micro-batches, on any device, through all stages.

    Returned are each one's outputs, followed by values left that no stage took, in stages' order.
    An error of a stage gets a note of where; its clock cycle is completed, and no other is started.
    """
    return _Run(stages, microbatches).run()


class _Run:
    """State of a batch during a run.

    A stage's work on a micro-batch adds these nodes to the autograd graph, from the top::

        join       in backward, wait for this stage's next micro-batch (see `dependency`)
        arrive     wait for the copy from the previous stage (see `copy`)
        stage      or its checkpoint (see `checkpoint`)
        leave      let the copy to the next stage wait for this one
        recompute  in backward, run the stage again, if it is checkpointed
        fork       give the next micro-batch its token
    """

    def __init__(self, stages: Sequence[LocalStage], microbatches: Sequence[Values]) -> None:
        self._stages = stages
        self._values = list(microbatches)
        self._left: list[dict[Hashable, tuple[int, Any]]] = [{} for _ in microbatches]
        self._tokens: list[Tensor | None] = [None] * len(stages)
        self._changed: dict[int, ChangedBuffers] = {}
        self._modes = ThreadModes.current()

    def run(self) -> list[Values]:
        with DeviceThreads([stage.device.device for stage in self._stages]) as workers:
            for work in clock_order(len(self._values), len(self._stages)):
                # Inputs are taken on this thread, between cycles, while no stage writes `_values`
                # or `_left`.
                tasks = [
                    (stage, partial(self._compute, number, stage, self._inputs(number, stage)))
                    for number, stage in work
                ]
                workers.run(tasks)
        return [
            (*outputs, *(value for _, value in left.values()))
            for outputs, left in zip(self._values, self._left, strict=True)
        ]

    def _inputs(self, microbatch: int, index: int) -> Values:
        """Return a stage's inputs on its device."""
        stage, values = self._stages[index], self._values[microbatch]
        if index == 0:
            values = _move_batch(values, stage.device)
        else:
            values = cross(values, self._stages[index - 1].device, stage.device)
        for name in stage.takes:
            source, value = self._left[microbatch].pop(name)
            values += cross((value,), self._stages[source].device, stage.device)
        return values

    def _compute(self, microbatch: int, index: int, inputs: Values) -> None:
        stage = self._stages[index]
        try:
            with self._modes.activate(), stage.device.activate():
                outputs = self._run_stage(stage, index, microbatch, inputs)
        except Exception as error:
            error.add_note(f"in stage {index}, micro-batch {microbatch}")
            raise
        # Without a lock: within a cycle, no two stages work on one micro-batch.
        main = len(outputs) - len(stage.leaves)
        self._values[microbatch] = outputs[:main]
        for name, value in zip(stage.leaves, outputs[main:], strict=True):
            self._left[microbatch][name] = index, value

    def _run_stage(self, stage: LocalStage, index: int, microbatch: int, inputs: Values) -> Values:
        function = partial(stage.function, microbatch)
        # Inputs without gradients cannot carry the dependency; a checkpoint then takes the token
        # itself. Without a checkpoint, nothing is recomputed, and any order will do.
        token = self._tokens[index]
        if token is not None and (tied := join(inputs, token)) is not None:
            inputs, token = tied, None
        if index > 0:
            inputs = arrive(inputs, stage.device)
        node = None
        if microbatch < stage.checkpointed and torch.is_grad_enabled():
            if index not in self._changed:
                self._changed[index] = ChangedBuffers(stage.module)
            outputs, node = checkpoint(function, stage.module, self._changed[index], inputs, token)
        else:
            outputs = function(inputs)
        if index < len(self._stages) - 1:
            outputs = leave(outputs, stage.device)
        outputs, self._tokens[index] = fork(recompute_before(outputs, node))
        return outputs


def _move_batch(values: Values, device: StageDevice) -> Values:
    """Move a batch to the first stage's device."""
    if device.device is None:
        return values
    on_gpu = device.device.type == "cuda"
    return tuple(
        value.to(device.device, non_blocking=on_gpu) if isinstance(value, Tensor) else value
        for value in values
    )


def clock_order(num_microbatches: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the work of each clock cycle: stage ``s`` works on micro-batch ``clock - s``.

    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.

    Yields:
        Pairs of micro-batch and stage, stages ascending; those of a cycle are independent.
    """
    for clock in range(num_microbatches + num_stages - 1):
        yield [
            (clock - stage, stage)
            for stage in range(num_stages)
            if 0 <= clock - stage < num_microbatches
        ]


class DeviceThreads:
    """Thread pool that runs tasks on the threads of their devices, inside a ``with`` block.

    Stages on one device share a thread, since they share its random number generator and would
    otherwise draw from it in an order that changes between runs. With a single device, the
    calling thread runs all tasks.
    """

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self._devices = devices
        self._threads: dict[torch.device | None, ThreadPoolExecutor] = {}

    def __enter__(self) -> Self:
        distinct = dict.fromkeys(self._devices)
        if len(distinct) > 1:
            self._threads = {device: ThreadPoolExecutor(1, "stage") for device in distinct}
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def run(self, tasks: Sequence[tuple[int, Callable[[], None]]]) -> None:
        """Run a task for each of some stages; raise the first error once all tasks have ended."""
        if self._threads:
            started = [self._threads[self._devices[stage]].submit(task) for stage, task in tasks]
            errors = [future.exception() for future in started]
        else:
            errors = [_run_task(task) for _, task in tasks]
        for error in errors:
            if error is not None:
                raise error


def _run_task(task: Callable[[], None]) -> Exception | None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 - raised by the caller, when the others have run
        return error
    return None
