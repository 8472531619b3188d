"""Forwards of a planned model in one process, many requests at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...capture.program.segment import Segment
from ...capture.sample import check_module
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..partition.cut import cut_for_plan
from ..supported_plans import check_runnable
from .microbatch import Inbox, Piece
from .requests import Requests
from .stage_device import placed, seats_for
from .stage_worker import StageWork, Worker


class InferencePipeline:
    """Serves a stream of requests: each stage works on another one at the same time.

    ::

        with stagewright.InferencePipeline(model, plan) as pipeline:
            futures = [pipeline.submit(batch) for batch in batches]
            outputs = [future.result() for future in futures]

    Every replica of every stage has a thread and, on a GPU, streams of its own. The model is put
    into evaluation mode and runs in inference mode; its weights are loaded once, here. Requests
    may come from several threads; their results come in the order in which they were submitted.

    A batch larger than the plan's micro-batch goes through in pieces of at most that size, and the
    outputs are put together along their first dimension; a smaller one goes as it is. A model that
    could only be captured at one shape takes multiples of it.

    Args:
        model: The model the plan was made for. Its modules are used, not copied, but for replicas.
        plan: Where to cut. Its order of work is not used; `docs/inference.md` says which plan to
            ask for.
        devices: One, or one for every device of the plan, stage by stage; `None` leaves the model
            where it is. On one device a stage's replicas are passed over.
        sample: See `runtime.cut.cut_for_plan`.
        max_in_flight: Most micro-batches under way at once, of all requests together; `None` for
            two for every thread that works on them. More take memory and gain nothing in a steady
            stream.
        autocast: Run the stages under ``torch.autocast`` to this dtype.
        pad: Whether a batch that does not fill the shape captured is filled up with copies of its
            last sample, whose outputs are dropped: for models whose samples do not depend on each
            other. Models that take batches of any size need none.

    Raises:
        PlanMismatch: The plan is for another model, its layers are reordered, or the model cannot
            be put into evaluation mode.
        InvalidInput: The number of devices is not the plan's, or another argument not what it
            may be.
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
        seats = seats_for(plan, devices, model)
        room = room_for(max_in_flight, sum(map(len, seats)))
        pieces = cut_for_plan(model, plan, sample)
        self._stages = placed(pieces, seats, model)
        self._inboxes = [[Inbox(k, len(each)) for k in range(len(each))] for each in seats]
        self._inboxes.append([Inbox()])
        self._requests = Requests(
            pieces, plan, partial(self._pass_on, 0), self._inboxes[-1][0], room, pad=pad
        )
        self._workers = [
            Worker(
                f"stage {index}",
                self._inboxes[index][replica],
                partial(self._work, StageWork(index, stage, seat, autocast), index),
                self._requests.fail,
            )
            for index, (stages, places) in enumerate(zip(self._stages, seats, strict=True))
            for replica, (stage, seat) in enumerate(zip(stages, places, strict=True))
        ]

    @property
    def stages(self) -> tuple[tuple[Segment, ...], ...]:
        """The replicas of each stage, in order."""
        return tuple(map(tuple, self._stages))

    def submit(self, *args: Tensor, **kwargs: Tensor) -> Future[Any]:
        """Send a batch on its way, called like the model.

        Waits while `max_in_flight` micro-batches are under way. Leave the batch's tensors as they
        are until the result is there.

        Returns:
            A future of the model's output, on the last stage's device, made in inference mode. Its
            `cancel` works until the output is there: stages that have not begun with the batch
            leave it out. What a stage raises is raised by `result`, with a note of where; other
            requests go on.

        Raises:
            InvalidInput: The batch is not what the model takes, or the pipeline is closed.
        """
        return self._requests.submit(args, kwargs)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs of a stream of batches, in order, one after the other.

        No more batches are taken from the stream than there is room for, so it may be endless.

        Args:
            batches: Each a tensor, a tuple of them, or a dict by keyword.

        Raises:
            Exception: Whatever a stage raised on a batch; the batches behind it are cancelled. Use
                `submit` to go on.
        """
        return self._requests.map(batches)

    def close(self) -> None:
        """Take no more requests, wait until those under way are through, and end the threads."""
        self._close(is_abandoned=False)

    def _close(self, *, is_abandoned: bool) -> None:
        self._requests.close(is_abandoned=is_abandoned)
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(is_abandoned=error is not None)

    def _work(self, work: StageWork, index: int, piece: Piece) -> None:
        self._pass_on(index + 1, work.through(piece))

    def _pass_on(self, index: int, piece: Piece) -> None:
        """To a stage, or behind the last one to who waits for results."""
        inboxes = self._inboxes[index]
        inboxes[piece.number % len(inboxes)].put(piece)


def room_for(max_in_flight: int | None, num_workers: int) -> int:
    """How many pieces may be under way: for each worker one at work and one that waits for it."""
    if max_in_flight is None:
        return 2 * num_workers
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise InvalidInput(
            f"max_in_flight is {max_in_flight!r}; give a number of micro-batches from 1 up"
        )
    return max_in_flight
