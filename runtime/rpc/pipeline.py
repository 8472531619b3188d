"""A planned model under one controller: a master script, and workers that only serve.

The stages of a plan are modules on the workers of a ``torch.distributed.rpc`` session. The master
sends micro-batches to the first; each stage hands on to the next itself, so that stage 1 works on
one micro-batch while stage 0 works on another. Gradients are those of ``dist_autograd``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

from ...core.errors import InvalidInput, PlanMismatch, RankFailed
from ...core.plan.plan import Plan
from ..engine.microbatch import join_outputs, split_batch
from ..supported_plans import check_runnable
from .assembly import assemble
from .calls import anchor, answer, send
from .liveness import RollCall
from .results import Inbox
from .session import DEFAULT_TIMEOUT_S
from .stage import Route, StageServer, Task, forward, on_stage
from .stage_builder import Source

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer


LossFunction = Callable[[Any, Tensor], Tensor]

THREADS = 12
"""Of the 16 that a worker has by default to answer with: as many may wait for their turn."""


class RpcPipeline:
    """A planned model whose stages live on other processes.

    ::

        with controller(3, "10.0.0.1:29500"):
            with RpcPipeline(model, plan, workers=["worker1", "worker2"]) as pipeline:
                optimizer = DistributedOptimizer(SGD, pipeline.parameter_rrefs(), lr=0.1)
                loss = pipeline.train_step(
                    batch, target=target, loss_fn=loss_fn, optimizer=optimizer
                )

    Inside a ``dist_autograd.context`` with gradients on, what a call returns can be
    differentiated; elsewhere it is a plain forward. Whatever the plan's schedule, all forwards
    come before all backwards, as in GPipe, so stages hold every micro-batch's activations.

    Use every output computed in a context for its loss, and compute others under
    ``torch.no_grad``: the backward pass waits for a gradient of each, until it times out.

    Args:
        model: A module, which is sent to the workers with its weights, or a function without
            arguments that builds it there. Its code has to be importable on every worker.
        plan: Where to cut.
        workers: Names of the processes, stage by stage; one may serve several stages.
        num_split: Micro-batches a batch is split into; as planned if `None`.
        devices: Where each stage runs on its worker; the CPU if `None`.
        seed: Of the function that builds the model; this process's own if `None`.
        sample: See `runtime.cut.cut_for_plan`.
        timeout_s: How long a worker may be silent.

    Raises:
        PlanMismatch: The plan is for another model, or uses what is not run here.
        InvalidInput: The workers are not as many as the stages, or the model cannot be sent.
        RankFailed: A worker is not there.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        plan: Plan,
        *,
        workers: Sequence[str],
        num_split: int | None = None,
        devices: Sequence[str | None] | None = None,
        seed: int | None = None,
        sample: Any = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        check_places(plan, workers, devices)
        self.plan = plan if num_split is None else with_split(plan, num_split)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._stages: tuple[rpc.RRef[StageServer], ...] = ()
        source = Source.of(model, torch.initial_seed() if seed is None else seed)
        self._roll = RollCall(list(dict.fromkeys(workers)), timeout_s)
        try:
            places = devices or [None] * len(workers)
            parts = assemble(self._roll, source, self.plan, workers, places, sample)
            self._parts, self._stages = parts, parts.stages
            self._connect()
        except BaseException:
            self._roll.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_split(self) -> int:
        """Micro-batches a batch is split into."""
        return self.plan.num_microbatches

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run a batch; called like the model.

        Returns:
            The model's output, as `runtime.pipeline.Pipeline` puts it together.

        Raises:
            InvalidInput: The batch does not split into micro-batches.
            StageError: The model raised on a worker.
            RankFailed: A worker died or stopped answering.
        """
        batches = self._split(args, kwargs)
        outputs = self._run(batches, torch.is_grad_enabled() and _in_context())
        sizes = [len(batch[0]) for batch in batches]
        return self._parts.output.unflatten(join_outputs(outputs, sizes))

    def forward_backward(
        self,
        context_id: int,
        *args: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        **kwargs: Tensor,
    ) -> Tensor:
        """Loss of a batch, its gradients left in a ``dist_autograd`` context on the workers.

        Args:
            context_id: The context this is called in.
            *args: The batch, as the model takes it.
            target: Split like the batch.
            loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch, run on this process.
            **kwargs: Inputs by keyword.

        Returns:
            The mean over the batch.

        Raises:
            InvalidInput: As for calling the pipeline.
            StageError: Likewise.
            RankFailed: Likewise.
        """
        batches = self._split(args, kwargs)
        sizes = [len(batch[0]) for batch in batches]
        if not target.dim() or len(target) != sum(sizes):
            raise InvalidInput(
                f"the target has shape {tuple(target.shape)}, the batch {sum(sizes)} samples; "
                "a target has one entry a sample, along its first dimension"
            )
        outputs = self._run(batches, True)
        total = torch.zeros(())
        for flat, wanted, size in zip(outputs, target.split(sizes), sizes, strict=True):
            loss = loss_fn(self._parts.output.unflatten(flat), wanted)
            total = total + loss * (size / sum(sizes))
        total = anchor(total, [value for flat in outputs for value in flat])
        run_backward = dist_autograd.backward  # type: ignore[attr-defined]
        self._roll.do(lambda: run_backward(context_id, [total]), "the backward pass")
        return total.detach()

    def train_step(
        self,
        *args: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        optimizer: DistributedOptimizer,
        **kwargs: Tensor,
    ) -> Tensor:
        """Forward, backward and the optimizer's step; see `forward_backward`."""
        with dist_autograd.context() as context_id:
            loss = self.forward_backward(
                context_id, *args, target=target, loss_fn=loss_fn, **kwargs
            )
            self._roll.do(lambda: optimizer.step(context_id), "the optimizer's step")
        return loss

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Every trainable parameter once, as ``DistributedOptimizer`` takes them."""
        return [rref for found in self._on_all("parameters") for rref in found.values()]

    def gradients(self, context_id: int) -> dict[str, Tensor]:
        """What a context has accumulated, by the model's names; a tied weight under one name."""
        return {
            name: gradient
            for found in self._on_all("gradients", context_id)
            for name, gradient in found.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's, gathered on this process's CPU under the model's own names."""
        found = {name: value for part in self._on_all("state") for name, value in part.items()}
        for tied in self._parts.tied:
            weight = next(found[name] for name in tied.names if name in found)
            found.update(dict.fromkeys(tied.names, weight))
        return {name: found[name] for name in self._parts.names if name in found}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give every stage its part of the whole model's state.

        Raises:
            InvalidInput: Names are missing or unknown.
        """
        names = set(self._parts.names)
        missing, unknown = names - state.keys(), state.keys() - names
        if missing or unknown:
            raise InvalidInput(
                f"not this model's state: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for stage, held in zip(self._stages, self._on_all("names"), strict=True):
            future = self._start(stage, "load", {name: state[name] for name in held})
            self._roll.wait(stage.owner_name(), future, "loading values")

    def train(self, mode: bool = True) -> Self:
        """Switch all stages to training or evaluation mode.

        Raises:
            PlanMismatch: The captured model has operations frozen in the other mode.
        """
        self._on_all("train", mode)
        return self

    def eval(self) -> Self:
        """Switch all stages to evaluation mode."""
        return self.train(False)

    def close(self) -> None:
        """Have the workers let go of their stages; they go on serving."""
        if self._stages and self._roll.missing is None:
            self._on_all("close")
        self._stages = ()
        self._roll.close()

    def _connect(self) -> None:
        """Tell every stage where to send what."""
        inbox = rpc.RRef(self._inbox)
        onward = (*self._stages[1:], None)
        for index, (stage, following) in enumerate(zip(self._stages, onward, strict=True)):
            borrowers = {
                group: tuple(self._stages[other] for other in tied.stages[1:])
                for group, tied in enumerate(self._parts.tied)
                if tied.stages[0] == index
            }
            future = self._start(stage, "connect", Route(following, inbox, borrowers))
            self._roll.wait(stage.owner_name(), future, "connecting the stages")

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, ...]]:
        structure, size = self._parts.structure, self._parts.microbatch_size
        flat = structure.flatten(args, kwargs)
        return split_batch(flat, self.num_split, size, structure.names)

    def _run(self, batches: list[tuple[Tensor, ...]], wants_grad: bool) -> list[tuple[Any, ...]]:
        """Flat outputs of every micro-batch; one step at a time, whoever calls."""
        with self._lock:
            self._check_open()
            step = self._inbox.begin()
            lending = [
                (stage, self._start(stage, "lend", step, wants_grad)) for stage in self._lenders()
            ]
            window = max(1, THREADS // self._parts.most_stages)
            for microbatch, values in enumerate(batches):
                self._wait_for(microbatch + 1 - window)
                task = Task(step, microbatch, wants_grad)
                first = self._stages[0]
                send(first.owner_name(), forward, first, task, values)
            for stage, future in lending:
                self._roll.wait(stage.owner_name(), future, "lending tied weights")
            self._wait_for(len(batches))
            return self._inbox.take()

    def _lenders(self) -> list[rpc.RRef[StageServer]]:
        owners = {tied.stages[0] for tied in self._parts.tied}
        return [self._stages[index] for index in sorted(owners)]

    def _wait_for(self, count: int) -> None:
        """Until so many micro-batches are through.

        Raises:
            RankFailed: A worker is gone, or none came through for too long.
        """
        waited_s, before = 0.0, self._inbox.count
        while not self._inbox.has(count, 0.2):
            self._roll.check(f"micro-batch {self._inbox.count} of {self.num_split}")
            waited_s = waited_s + 0.2 if self._inbox.count == before else 0.0
            before = self._inbox.count
            if waited_s > self._timeout_s:
                raise RankFailed(
                    f"micro-batch {before} of {self.num_split} did not come through in "
                    f"{self._timeout_s:g} s, though every worker still answers; allow more with "
                    "timeout_s="
                )

    def _check_open(self) -> None:
        if not self._stages:
            raise InvalidInput("this pipeline is closed")

    def _start(self, stage: rpc.RRef[StageServer], method: str, *args: Any) -> Future[Any]:
        return send(stage.owner_name(), answer, on_stage, stage, method, *args)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """What every stage answers, asked at once."""
        self._check_open()
        started = [(stage, self._start(stage, method, *args)) for stage in self._stages]
        return [
            self._roll.wait(stage.owner_name(), future, f"{method!r} of all stages")
            for stage, future in started
        ]


def _in_context() -> bool:
    try:
        dist_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def with_split(plan: Plan, num_split: int) -> Plan:
    """The plan for the same batch in another number of micro-batches.

    Raises:
        InvalidInput: The batch does not divide so.
    """
    if not plan.inputs:
        raise InvalidInput("this plan records no inputs; plan with num_microbatches instead")
    batch = plan.inputs[0].shape[0] * plan.num_microbatches
    if num_split < 1 or batch % num_split:
        raise InvalidInput(f"num_split is {num_split}; it has to divide the batch of {batch}")
    size = batch // num_split
    inputs = tuple(
        spec.model_copy(update={"shape": (size, *spec.shape[1:])}) for spec in plan.inputs
    )
    changed = {"num_microbatches": num_split, "inputs": inputs}
    if size != plan.inputs[0].shape[0]:
        changed["boundaries"] = ()  # their shapes are those of the planned size
    return plan.model_copy(update=changed)


def check_places(plan: Plan, workers: Sequence[str], devices: Sequence[object] | None) -> None:
    """Refuse what would run otherwise than planned, and too few places.

    Raises:
        PlanMismatch: The plan uses what is not run here.
        InvalidInput: There is not one worker, and one device, for each stage.
    """
    check_runnable(plan, "one device")
    if any(stage.replicas > 1 for stage in plan.stages):
        raise PlanMismatch("a plan with replicas is not run over RPC; plan with --max-replicas 1")
    if any(stage.recompute != "never" for stage in plan.stages):
        raise PlanMismatch("recomputation is not done over RPC; plan with --recompute never")
    if len(workers) != plan.num_stages:
        raise InvalidInput(
            f"the plan has {plan.num_stages} stages, but {len(workers)} workers are named; name "
            "one for each stage, the same one several times if it serves several"
        )
    if devices is not None and len(devices) != plan.num_stages:
        raise InvalidInput(
            f"{len(devices)} devices for {plan.num_stages} stages; give one for each stage"
        )
