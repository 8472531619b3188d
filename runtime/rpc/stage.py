"""Stage server on an RPC worker: runs micro-batches and sends outputs to the next stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from ...capture.program.segment import Segment
from ...core.errors import InvalidInput
from .calls import anchor_one, post, to_sendable
from .results import OutputCollector


@dataclass(frozen=True)
class Route:
    """Destinations of a stage's messages.

    Attributes:
        next_stage: The next stage; `None` for the last one.
        collector: The master's collector of outputs and errors.
    """

    next_stage: rpc.RRef[StageServer] | None
    collector: rpc.RRef[OutputCollector]


@dataclass(frozen=True)
class MicrobatchTask:
    """A micro-batch of a step, after whose forward a backward may follow if it wants gradients."""

    step: int
    microbatch: int
    wants_grad: bool


class StageServer:
    """Server of one stage."""

    def __init__(self, stage: Segment, index: int, device: torch.device | None) -> None:
        self._stage: Segment = stage if device is None else stage.to(device)
        self._index = index
        self._device = device
        self._sequencer = StageSequencer()
        self._route: Route | None = None

    def connect(self, route: Route) -> None:
        """Set the destinations; called before the first micro-batch."""
        self._route = route

    def close(self) -> None:
        """Release the stage and the references to other processes."""
        # In this order: waiting micro-batches give up, then the running one is awaited.
        self._sequencer.end()
        with self._sequencer.exclusive:
            # References of other processes keep this object alive; its weights are released.
            self._route, self._stage = None, Segment((), True)

    def forward(self, task: MicrobatchTask, values: tuple[Any, ...]) -> None:
        """Run a micro-batch in order and send its outputs to the next stage.

        Never raises: errors go to the master, which waits for the outputs.
        """
        try:
            with self._sequencer.enter(task.step, task.microbatch):
                outputs = self._run(task, values)
                self._send_on(task, outputs)
        except StepAbandoned:
            # The master started another step, or has been told of the error already.
            return
        except Exception as error:  # noqa: BLE001 (raised by the master)
            failure = to_sendable(error, f"stage {self._index}, micro-batch {task.microbatch}")
            if self._route is not None:
                post(self._route.collector, "fail", task.step, failure)

    def train(self, mode: bool) -> None:
        """Switch the stage's mode; see `capture.segment.Segment.train`."""
        with self._sequencer.exclusive:
            self._stage.train(mode)

    def state(self) -> dict[str, Tensor]:
        """Return CPU copies of the parameters and buffers, by the model's names."""
        with self._sequencer.exclusive:
            return {
                name: value.detach().cpu().clone()
                for name, value in self._stage.state_dict().items()
            }

    def names(self) -> list[str]:
        """Return the names of all values this stage uses."""
        return list(self._stage.state_dict())

    def load(self, state: dict[str, Tensor]) -> None:
        """Load parameters and buffers."""
        with self._sequencer.exclusive:
            self._stage.load_state_dict(state)

    def parameters(self) -> dict[str, rpc.RRef[Tensor]]:
        """Return references to the trainable parameters."""
        return {name: rpc.RRef(weight) for name, weight in self._trainable().items()}

    def gradients(self, context_id: int) -> dict[str, Tensor]:
        """Return a context's gradients of the parameters, on the CPU."""
        found = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {
            name: found[weight].cpu()
            for name, weight in self._trainable().items()
            if weight in found
        }

    @property
    def _connected_route(self) -> Route:
        if self._route is None:
            raise InvalidInput("this pipeline is closed")
        return self._route

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {
            name: weight for name, weight in self._stage.named_parameters() if weight.requires_grad
        }

    def _run(self, task: MicrobatchTask, received: tuple[Any, ...]) -> tuple[Any, ...]:
        with torch.set_grad_enabled(task.wants_grad):
            inputs = tuple(self._to_device(value) for value in received)
            anchored = anchor_one(tuple(self._stage(*inputs)), received)
            return tuple(value.cpu() if isinstance(value, Tensor) else value for value in anchored)

    def _to_device(self, value: Any) -> Any:
        if self._device is None or not isinstance(value, Tensor):
            return value
        return value.to(self._device)

    def _send_on(self, task: MicrobatchTask, outputs: tuple[Any, ...]) -> None:
        # Before the next micro-batch may start, so that they arrive in order and rarely wait.
        route = self._connected_route
        if route.next_stage is not None:
            post(route.next_stage, "forward", task, outputs)
        else:
            post(route.collector, "put", task.step, task.microbatch, outputs)


class StepAbandoned(Exception):
    """Raised in a micro-batch whose step failed or was superseded by a later one."""


class StageSequencer:
    """Sequencer that runs a stage's micro-batches one at a time, in order.

    Steps are numbered upwards by the master. The first micro-batch of a later step releases all
    that wait in earlier steps, so that an abandoned step occupies no threads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.exclusive = threading.Lock()
        """Keeps micro-batches out while the stage is read or changed."""
        self._step = -1
        self._next = 0
        self._failed = False

    @contextmanager
    def enter(self, step: int, microbatch: int) -> Iterator[None]:
        """Wait until this micro-batch is next, and keep others out inside the block.

        Raises `StepAbandoned` if the step ended before.
        """
        with self._changed:
            self._begin(step)
            self._changed.wait_for(lambda: self._is_over(step) or self._next == microbatch)
            if self._is_over(step):
                raise StepAbandoned
        # Within a step, `_next` alone admits one micro-batch at a time. The lock is for those who
        # change the stage, and for an abandoned step's micro-batch that is still running.
        with self.exclusive:
            try:
                yield
            except BaseException:
                self._finish(step, failed=True)
                raise
        self._finish(step, failed=False)

    def end(self) -> None:
        """Release all waiting micro-batches for good."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _begin(self, step: int) -> None:
        if step > self._step:
            self._step, self._next, self._failed = step, 0, False
            self._changed.notify_all()

    def _is_over(self, step: int) -> bool:
        return self._failed or step != self._step

    def _finish(self, step: int, *, failed: bool) -> None:
        with self._changed:
            # A micro-batch of an abandoned step must not advance its successor.
            if step == self._step:
                self._next += 1
                self._failed = self._failed or failed
            self._changed.notify_all()
