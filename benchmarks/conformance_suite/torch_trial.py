"""torch's column: its own ``pipeline()``, split before the same modules, under its own schedule.

It is used as its documentation says, and given the benefit of the doubt: the first stage gets
those inputs that its cut left there, later stages get theirs by keyword.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.utils import _pytree as pytree

from conformance_suite.cell import NUM_MICROBATCHES, Cell
from conformance_suite.models import ROWS
from conformance_suite.reference import BY_NAME, STEPS, StepState, batch_of, state_of

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
    "forward_only": ScheduleGPipe,
}
"""torch has no plain zero bubble, but its interleaved one takes one stage a rank; and no forward
alone beside ``eval()`` of another."""

ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
FOLDED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class TorchTrial:
    """One rank's part of a cell."""

    def __init__(self, cell: Cell) -> None:
        self._cell, self._model = cell, BY_NAME[cell.model]
        self.states: list[StepState] = []

    def prepare(self) -> None:
        sample, _ = self._model.batch(ROWS)
        cuts = self._model.cuts_into(self._cell.stages)
        pipe = pipeline(
            self._model.fresh(), sample, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
        )
        if pipe.num_stages != self._cell.stages:
            raise RuntimeError(f"{pipe.num_stages} stages were made of {self._cell.stages}")
        self._held = held_stages(self._cell, dist.get_rank())
        self._stages = [pipe.build_stage(index, torch.device("cpu")) for index in self._held]
        self._inputs = {index: _model_inputs(pipe.split_gm, index) for index in self._held}
        kind = SCHEDULES[self._cell.schedule]
        self._schedule = kind(
            self._stages[0] if kind in ONE_STAGE else self._stages,
            NUM_MICROBATCHES,
            loss_fn=self._model.loss,
        )

    def run(self) -> None:
        for step in range(STEPS):
            nest, target = batch_of(self._model, step)
            inputs = pytree.tree_leaves(nest)  # a stage has an argument for each of them
            losses: list[Tensor] = []
            last = self._cell.stages - 1 in self._held
            perform = self._schedule.step if self._cell.trains else self._schedule.eval
            with torch.set_grad_enabled(self._cell.trains):
                perform(
                    *self._positional(inputs),
                    target=target if last else None,
                    losses=losses if last else None,
                    **self._keywords(inputs),
                )
            loss = float(torch.stack(losses).detach().mean()) if last else None
            self.states.append(state_of(loss, [stage.submod for stage in self._stages]))

    def _positional(self, inputs: list[Any]) -> list[Any]:
        return [inputs[place] for place, _ in self._inputs.get(0, [])]

    def _keywords(self, inputs: list[Any]) -> dict[str, Any]:
        return {
            name: inputs[place]
            for stage in self._held
            if stage
            for place, name in self._inputs[stage]
        }

    def close(self) -> None:
        """Nothing is left running."""


def held_stages(cell: Cell, rank: int) -> list[int]:
    """Return the stages of a rank: round and round, or to the end and back."""
    if SCHEDULES[cell.schedule] in FOLDED:
        return [rank, cell.stages - 1 - rank]
    return list(range(rank, cell.stages, cell.ranks))


def _model_inputs(split: fx.GraphModule, stage: int) -> list[tuple[int, str]]:
    """Return positions of the model inputs that a stage takes itself, and its names for them."""
    places = {
        node: i for i, node in enumerate(n for n in split.graph.nodes if n.op == "placeholder")
    }
    call = [node for node in split.graph.nodes if node.op == "call_module"][stage]
    module: Any = split.get_submodule(call.target)
    names = [node.target for node in module.graph.nodes if node.op == "placeholder"]
    return [
        (places[argument], name)
        for argument, name in zip(call.args, names, strict=True)
        if argument in places
    ]
