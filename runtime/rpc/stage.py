"""A stage on its worker: it serves micro-batches, and hands them on to the next stage itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from ...capture.program.segment import Segment
from ...core.errors import InvalidInput
from .calls import Failure, anchor_one, send
from .results import Inbox, deliver, report


@dataclass(frozen=True)
class Route:
    """Where a stage sends what.

    Attributes:
        onward: The next stage; `None` behind the last.
        inbox: The master's, for outputs and errors.
        borrowers: By tied group, the stages that borrow the weight this stage owns.
    """

    onward: rpc.RRef[StageServer] | None
    inbox: rpc.RRef[Inbox]
    borrowers: Mapping[int, tuple[rpc.RRef[StageServer], ...]]


@dataclass(frozen=True)
class Task:
    """What the master says of a micro-batch.

    Attributes:
        step: Number of the step.
        microbatch: Its place in the step.
        wants_grad: Whether a backward may follow.
    """

    step: int
    microbatch: int
    wants_grad: bool


class StageServer:
    """Holds one stage.

    A weight tied over several stages lives on the first of them. In every step it is lent to the
    others as a tensor that distributed autograd follows, so its gradients meet where it lives.

    Args:
        stage: The stage.
        index: Its place in the pipeline.
        device: Where it runs; between processes tensors travel by the CPU.
        owned: By tied group, the name of a weight that is lent to other stages.
        borrowed: By tied group, the names of a weight that another stage lends.
    """

    def __init__(
        self,
        stage: Segment,
        index: int,
        device: torch.device | None,
        owned: Mapping[int, str],
        borrowed: Mapping[int, tuple[str, ...]],
    ) -> None:
        self._stage: Segment = stage if device is None else stage.to(device)
        self._index = index
        self._device = device
        self._owned, self._borrowed = owned, borrowed
        self._elsewhere = {name for names in borrowed.values() for name in names}
        self._loans = Loans()
        self._turns = Turns()
        self._route: Route | None = None

    def connect(self, route: Route) -> None:
        """Say where results go; before the first micro-batch."""
        self._route = route

    def close(self) -> None:
        """Let go of the stage, and of other processes' objects."""
        self._turns.end()
        with self._turns.between():
            self._route, self._stage = None, Segment((), True)
            self._loans.clear()

    def lend(self, step: int, wants_grad: bool) -> None:
        """Send the weights this stage owns to those that borrow them."""
        for group, stages in self._routed.borrowers.items():
            weight = self._parameters()[self._owned[group]]
            with torch.set_grad_enabled(wants_grad):  # as a Parameter it would arrive a leaf
                travelling = weight.cpu().view_as(weight)
            for stage in stages:
                send(stage.owner_name(), borrow, stage, step, group, travelling)

    def borrow(self, step: int, group: int, weight: Tensor) -> None:
        """Receive a weight of another stage, for one step."""
        self._loans.add(step, group, weight)
        self._turns.changed()

    def forward(self, task: Task, values: tuple[Any, ...]) -> None:
        """Run a micro-batch when its turn comes, and send on what it gives.

        Never raises: an error goes to the master, who waits for the outputs.
        """
        try:
            with self._turns.turn(task.step, task.microbatch, lambda: self._has_loans(task.step)):
                outputs = self._run(task, values)
                self._send_on(task, outputs)
        except Abandoned:
            return
        except Exception as error:  # noqa: BLE001 (the master raises it)
            failure = Failure.of(error, f"stage {self._index}, micro-batch {task.microbatch}")
            if self._route is not None:
                inbox = self._route.inbox
                send(inbox.owner_name(), report, inbox, task.step, failure)

    def train(self, mode: bool) -> None:
        """Switch the stage's mode; see `capture.segment.Segment.train`."""
        with self._turns.between():
            self._stage.train(mode)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of all that lives here, under the model's names."""
        with self._turns.between():
            return {
                name: value.detach().cpu().clone()
                for name, value in self._stage.state_dict().items()
                if name not in self._elsewhere
            }

    def names(self) -> list[str]:
        """What this stage takes values of: all it uses, lent weights included."""
        return list(self._stage.state_dict())

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over values."""
        with self._turns.between():
            self._stage.load_state_dict(state)

    def parameters(self) -> dict[str, rpc.RRef[Tensor]]:
        """References to the trainable parameters that live here."""
        return {name: rpc.RRef(weight) for name, weight in self._trainable().items()}

    def gradients(self, context_id: int) -> dict[str, Tensor]:
        """What a context has accumulated for the parameters that live here, on the CPU."""
        found = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {
            name: found[weight].cpu()
            for name, weight in self._trainable().items()
            if weight in found
        }

    @property
    def _routed(self) -> Route:
        if self._route is None:
            raise InvalidInput("this pipeline is closed")
        return self._route

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._stage.named_parameters(remove_duplicate=False))

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {
            name: weight
            for name, weight in self._stage.named_parameters()
            if weight.requires_grad and name not in self._elsewhere
        }

    def _has_loans(self, step: int) -> bool:
        return self._loans.has(step, self._borrowed)

    def _run(self, task: Task, received: tuple[Any, ...]) -> tuple[Any, ...]:
        with torch.set_grad_enabled(task.wants_grad):
            inputs = tuple(self._here(value) for value in received)
            lent = self._loans.current()
            outputs = self._call(task, inputs, lent)
            anchored = anchor_one(outputs, (*received, *lent.values()))
            return tuple(value.cpu() if isinstance(value, Tensor) else value for value in anchored)

    def _call(
        self, task: Task, inputs: tuple[Any, ...], lent: Mapping[int, Tensor]
    ) -> tuple[Any, ...]:
        weights = {
            name: self._here(lent[group])
            for group, names in self._borrowed.items()
            for name in names
        }
        if weights and task.wants_grad:
            self._check_differentiable()
            result: tuple[Any, ...] = torch.func.functional_call(self._stage, weights, inputs)
            return result
        if weights and task.microbatch == 0:
            with torch.no_grad():
                for name, weight in weights.items():
                    self._parameters()[name].copy_(weight)
        return tuple(self._stage(*inputs))

    def _check_differentiable(self) -> None:
        """Refuse the one case in which a lent weight would not be the one that is used."""
        if self._stage._evaluation and not self._stage.training:
            raise InvalidInput(
                "a stage that borrows a tied weight runs another graph in evaluation mode, which "
                "cannot be differentiated here; plan with --tied together, or call it under "
                "torch.no_grad()"
            )

    def _here(self, value: Any) -> Any:
        if self._device is None or not isinstance(value, Tensor):
            return value
        return value.to(self._device)

    def _send_on(self, task: Task, outputs: tuple[Any, ...]) -> None:
        """Still within the turn, so that micro-batches arrive in order and wait little."""
        route = self._routed
        if route.onward is not None:
            send(route.onward.owner_name(), forward, route.onward, task, outputs)
        else:
            inbox = route.inbox
            send(inbox.owner_name(), deliver, inbox, task.step, task.microbatch, outputs)


def forward(stage: rpc.RRef[StageServer], task: Task, values: tuple[Any, ...]) -> None:
    """Runs on the stage's worker, called by the stage before or by the master."""
    stage.local_value().forward(task, values)


def borrow(stage: rpc.RRef[StageServer], step: int, group: int, weight: Tensor) -> None:
    """Runs on the stage's worker, called by the stage that owns the weight."""
    stage.local_value().borrow(step, group, weight)


def on_stage(stage: rpc.RRef[StageServer], method: str, *args: Any) -> Any:
    """Runs on the stage's worker: one of its methods, by name."""
    return getattr(stage.local_value(), method)(*args)


class Loans:
    """What other stages lent, by tied group; those of the latest step only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._weights: dict[int, Tensor] = {}

    def add(self, step: int, group: int, weight: Tensor) -> None:
        """A weight has come; one of an earlier step comes too late and is dropped."""
        with self._lock:
            if step > self._step:
                self._step, self._weights = step, {}
            if step == self._step:
                self._weights[group] = weight

    def has(self, step: int, groups: Iterable[int]) -> bool:
        """Whether everything needed for a step has come."""
        with self._lock:
            return not (wanted := set(groups)) or (
                step == self._step and wanted <= self._weights.keys()
            )

    def current(self) -> Mapping[int, Tensor]:
        """The weights of the latest step."""
        with self._lock:
            return MappingProxyType(dict(self._weights))

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._weights = {}


class Abandoned(Exception):
    """The step this turn belongs to is over: it failed, or a later one has begun."""


class Turns:
    """The order of work of one stage.

    Steps are numbered upwards by the master. The first turn of a later step ends all waiting for
    turns of earlier ones, so an abandoned step keeps no thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = threading.Lock()
        self._step = -1
        self._next = 0
        self._failed = False

    @contextmanager
    def turn(self, step: int, microbatch: int, ready: Callable[[], bool]) -> Iterator[None]:
        """Wait until this micro-batch is next and ready, and keep the others out meanwhile.

        Args:
            step: Which step.
            microbatch: Its place in the step.
            ready: Whether whatever else it needs has come; asked again after `changed`.

        Raises:
            Abandoned: The step ended before its turn came.
        """
        with self._changed:
            self._begin(step)
            self._changed.wait_for(
                lambda: self._is_over(step) or (self._next == microbatch and ready())
            )
            if self._is_over(step):
                raise Abandoned
        with self._working:
            try:
                yield
            except BaseException:
                self._finish(step, failed=True)
                raise
        self._finish(step, failed=False)

    @contextmanager
    def between(self) -> Iterator[None]:
        """Keep micro-batches out, to look at the stage or to change it."""
        with self._working:
            yield

    def changed(self) -> None:
        """Something that a turn may wait for has come."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """No turn will come any more."""
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
            if step == self._step:
                self._next += 1
                self._failed = self._failed or failed
            self._changed.notify_all()
