"""Run micro-batches through stages in clock order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import checkpoint, recompute_before
from .copy import arrive, cross, leave
from .dependency import fork, join
from .streams import Place
from .thread_modes import Surroundings
from .worker import Workers

Values = tuple[Any, ...]


@dataclass(frozen=True)
class LocalStage:
    """One stage of a run.

    Attributes:
        function: From the number of a micro-batch and its inputs to its outputs. The inputs are
            what the stage before it returned, then what it ``takes``; the outputs are what the
            next stage is given, then what it ``leaves``.
        module: Whose buffers a recomputation must not change.
        place: Where it works.
        checkpointed: So many micro-batches, the first ones, keep their inputs alone.
        takes: Names of the values that it is given from earlier stages directly.
        leaves: Names of the values that it makes for later stages to take.
    """

    function: Callable[[int, Values], Values]
    module: nn.Module
    place: Place
    checkpointed: int = 0
    takes: tuple[Hashable, ...] = ()
    leaves: tuple[Hashable, ...] = ()


def run_stages(stages: Sequence[LocalStage], microbatches: Sequence[Values]) -> list[Values]:
    """Run all micro-batches through all stages.

    Args:
        stages: In order.
        microbatches: The inputs of the first stage, one tuple a micro-batch, on any device.

    Returns:
        What the last stage returns for each micro-batch.

    Raises:
        Exception: Whatever a stage raises, with a note of where. The clock in which it happens is
            finished, and nothing is begun after it.
    """
    return _Run(stages, microbatches).run()


class _Run:
    """What is known while a batch is on its way.

    Each stage's work on a micro-batch makes these nodes, from the top::

        join     wait, in the backward, for this stage's next micro-batch (see `order`)
        arrive   wait for the copy from the stage before (see `travel`)
        stage    or its checkpoint (see `checkpointing`)
        leave    let the copy to the next stage wait for this
        recompute
        fork     give the next micro-batch its token
    """

    def __init__(self, stages: Sequence[LocalStage], microbatches: Sequence[Values]) -> None:
        self._stages = stages
        self._values = list(microbatches)
        self._left: list[dict[Hashable, tuple[int, Any]]] = [{} for _ in microbatches]
        self._tokens: list[Tensor | None] = [None] * len(stages)
        self._surroundings = Surroundings.here()

    def run(self) -> list[Values]:
        with Workers([stage.place.device for stage in self._stages]) as workers:
            for work in clock_order(len(self._values), len(self._stages)):
                tasks = [
                    (stage, partial(self._compute, number, stage, self._inputs(number, stage)))
                    for number, stage in work
                ]
                workers.run(tasks)
        return self._values

    def _inputs(self, microbatch: int, index: int) -> Values:
        """What a stage is given, where it works."""
        stage, values = self._stages[index], self._values[microbatch]
        if index == 0:
            values = _brought(values, stage.place)
        else:
            values = cross(values, self._stages[index - 1].place, stage.place)
        for name in stage.takes:
            source, value = self._left[microbatch].pop(name)
            values += cross((value,), self._stages[source].place, stage.place)
        return values

    def _compute(self, microbatch: int, index: int, inputs: Values) -> None:
        stage = self._stages[index]
        try:
            with self._surroundings.entered(), stage.place.entered():
                outputs = self._through(stage, index, microbatch, inputs)
        except Exception as error:
            error.add_note(f"in stage {index}, micro-batch {microbatch}")
            raise
        main = len(outputs) - len(stage.leaves)
        self._values[microbatch] = outputs[:main]
        for name, value in zip(stage.leaves, outputs[main:], strict=True):
            self._left[microbatch][name] = index, value

    def _through(self, stage: LocalStage, index: int, microbatch: int, inputs: Values) -> Values:
        function = partial(stage.function, microbatch)
        inputs, token = _after(inputs, self._tokens[index])
        if index > 0:
            inputs = arrive(inputs, stage.place)
        node = None
        if microbatch < stage.checkpointed and torch.is_grad_enabled():
            outputs, node = checkpoint(function, stage.module, inputs, token)
        else:
            outputs = function(inputs)
        if index < len(self._stages) - 1:
            outputs = leave(outputs, stage.place)
        outputs, self._tokens[index] = fork(recompute_before(outputs, node))
        return outputs


def _after(inputs: Values, token: Tensor | None) -> tuple[Values, Tensor | None]:
    """Tie inputs to the micro-batch before; the token comes back where they cannot be tied."""
    tied = None if token is None else join(inputs, token)
    return (inputs, token) if tied is None else (tied, None)


def _brought(values: Values, place: Place) -> Values:
    """A batch as it came, on the first stage's device."""
    if place.device is None:
        return values
    on_gpu = place.device.type == "cuda"
    return tuple(
        value.to(place.device, non_blocking=on_gpu) if isinstance(value, Tensor) else value
        for value in values
    )


def clock_order(num_microbatches: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    """What runs at each clock: stage ``s`` works on micro-batch ``clock - s``.

    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.

    Yields:
        Pairs of micro-batch and stage, stages ascending. No two of a clock depend on each other.
    """
    for clock in range(num_microbatches + num_stages - 1):
        yield [
            (clock - stage, stage)
            for stage in range(num_stages)
            if 0 <= clock - stage < num_microbatches
        ]
