"""Pipelined inference of a planned model in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...capture.program.segment import Segment
from ...capture.sample import check_module
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..partition.cut import cut_for_plan
from ..partition.model_snapshot import ModelSnapshot
from ..supported_plans import check_runnable, check_stateful_replicas
from .microbatch import InFlightMicrobatch, OrderedQueue
from .requests import RequestDispatcher
from .stage_device import assign_devices, place_stages
from .stage_worker import InferenceStage, QueueWorker


class InferencePipeline:
    """Pipelined inference in one process: the stages work on different requests at the same time.

    ::

        with stagewright.InferencePipeline(model, plan) as pipeline:
            futures = [pipeline.submit(batch) for batch in batches]
            outputs = [future.result() for future in futures]

    Every replica of every stage has its own thread and, on a GPU, its own streams. The model is
    put into evaluation mode and runs in inference mode; its weights are moved to the devices
    once. Requests may come from several threads; results are delivered in submission order.

    A batch larger than the plan's micro-batch is split into micro-batches of at most that size,
    and the outputs are joined along their first dimension; a smaller batch is not padded. A model
    that could only be captured at one shape accepts multiples of it.

    Args:
        model: The model the plan was made for. Its modules are used; only replicas are copies.
        plan: The stages. Its schedule is not used; see `docs/guides/inference.md`.
        devices: One device, or one per device of the plan, stage by stage; `None` leaves the
            model where it is. On a single device, replicas are not used.
        sample: See `runtime.partition.cut.cut_for_plan`.
        max_in_flight: Most micro-batches in flight at once over all requests; two per stage
            thread if `None`. More take memory without speeding up a steady stream.
        autocast: Run the stages under ``torch.autocast`` with this dtype.
        pad: For a model captured at one shape: pad batches with copies of the last sample, whose
            outputs are dropped. Correct only if the model's samples are independent.

    Raises:
        PlanMismatch: The plan is for another model, its layers are reordered, or the model cannot
            be put into evaluation mode.
        InvalidInput: The number of devices or another argument is invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        devices: Sequence[torch.device | str] | None = None,
        sample: Any = None,
        max_in_flight: int | None = None,
        autocast: torch.dtype | None = None,
        pad: bool = False,
    ) -> None:
        check_module(model)
        check_runnable(plan, "one device")
        placement = assign_devices(plan, devices, model)
        limit = resolve_max_in_flight(max_in_flight, sum(map(len, placement)))
        cut_model = cut_for_plan(model, plan, sample)
        layers = cut_model.captured.graph.layers
        check_stateful_replicas(layers, plan, [len(homes) for homes in placement])
        self._stages = place_stages(cut_model, placement, model)
        self._snapshot = ModelSnapshot(cut_model.captured)
        self._queues = [
            [OrderedQueue(k, len(each)) for k in range(len(each))] for each in placement
        ]
        self._queues.append([OrderedQueue()])
        self._dispatcher = RequestDispatcher(
            cut_model, plan, partial(self._pass_on, 0), self._queues[-1][0], limit, pad=pad
        )
        self._workers = [
            QueueWorker(
                f"stage {index}",
                self._queues[index][replica],
                partial(self._run_stage, InferenceStage(index, stage, device, autocast), index),
                self._dispatcher.fail,
            )
            for index, (stages, homes) in enumerate(zip(self._stages, placement, strict=True))
            for replica, (stage, device) in enumerate(zip(stages, homes, strict=True))
        ]

    @property
    def stages(self) -> tuple[tuple[Segment, ...], ...]:
        """Replicas of each stage, in pipeline order."""
        return tuple(map(tuple, self._stages))

    def submit(self, *args: Tensor, **kwargs: Tensor) -> Future[Any]:
        """Submit a batch; call it like the model.

        Waits while `max_in_flight` micro-batches are in flight. Do not modify the batch's tensors
        until the result is available.

        Returns:
            A future of the model's output, an inference tensor on the last stage's device. It can
            be cancelled until it is done; stages then skip the batch. Its `result` raises what a
            stage raised, with a note naming the stage; other requests are not affected.

        Raises:
            InvalidInput: The batch does not fit the model, or the pipeline is closed.
            PlanMismatch: The model was changed after the pipeline was built.
        """
        self._snapshot.check(training=False)
        return self._dispatcher.submit(args, kwargs)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of a stream of batches, in order.

        The stream may be endless: batches are taken from it as results are consumed.

        Args:
            batches: Each one argument, a tuple of them, or a dict of keyword arguments.

        Raises:
            Exception: The error of a stage; later batches are cancelled. Use `submit` to continue
                after errors.
        """
        self._snapshot.check(training=False)
        return self._dispatcher.map(batches)

    def close(self) -> None:
        """Accept no more requests, wait for those in flight, and end the threads."""
        self._close(is_abandoned=False)

    def _close(self, *, is_abandoned: bool) -> None:
        self._dispatcher.close(is_abandoned=is_abandoned)
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(is_abandoned=error is not None)

    def _run_stage(
        self, runner: InferenceStage, index: int, microbatch: InFlightMicrobatch
    ) -> None:
        self._pass_on(index + 1, runner.run(microbatch))

    def _pass_on(self, index: int, microbatch: InFlightMicrobatch) -> None:
        """Send a micro-batch to a stage, or after the last stage to the results."""
        # The replicas of a stage take micro-batches in turn.
        queues = self._queues[index]
        queues[microbatch.number % len(queues)].put(microbatch)


def resolve_max_in_flight(max_in_flight: int | None, num_workers: int) -> int:
    """Return the in-flight limit; by default one running and one waiting per worker."""
    if max_in_flight is None:
        return 2 * num_workers
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise InvalidInput(
            f"max_in_flight is {max_in_flight!r}; it must be a positive number of micro-batches"
        )
    return max_in_flight
