"""Pipelined training from one master process, with stages on RPC workers.

The stages of a plan are modules on the workers of a ``torch.distributed.rpc`` session. The master
sends micro-batches to the first stage; each stage sends its outputs to the next one directly, so
that stages work on different micro-batches. Gradients are computed by ``dist_autograd``.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

from ...capture.observation.nested_values import insert_tensors
from ...core.errors import InvalidInput, PlanMismatch, RankFailed
from ...core.plan.plan import Plan
from ..engine.batch_io import LossFunction
from ..engine.microbatch import join_outputs, split_batch
from ..supported_plans import check_runnable
from .calls import anchor, call_method, call_safely, post, send
from .liveness import LivenessCheck
from .results import OutputCollector
from .session import DEFAULT_TIMEOUT_S
from .stage import MicrobatchTask, Route, StageServer
from .stage_builder import ModelSource, build_on_workers

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer


THREADS = 12
"""Calls that may wait on a worker at once; torch gives it 16 threads, the rest stay free."""


class RpcPipeline:
    """Pipeline whose stages live in other processes, controlled by this one.

    ::

        with controller(3, "10.0.0.1:29500"):
            with RpcPipeline(model, plan, workers=["worker1", "worker2"]) as pipeline:
                optimizer = DistributedOptimizer(SGD, pipeline.parameter_rrefs(), lr=0.1)
                loss = pipeline.train_step(
                    batch, target=target, loss_fn=loss_fn, optimizer=optimizer
                )

    Inside a ``dist_autograd.context`` with gradients enabled, outputs can be differentiated;
    elsewhere a call is a plain forward. Whatever the plan's schedule, all forwards run before all
    backwards, as in GPipe, so stages hold the activations of every micro-batch.

    Use every output computed in a context for its loss, and compute others under
    ``torch.no_grad``: the backward pass waits for a gradient of each output until it times out.

    Args:
        model: A module, which is sent to the workers with its weights, or a function without
            arguments that builds it there. Its code must be importable on every worker.
        plan: The plan to follow.
        workers: Names of the processes, one per stage; a process may serve several stages.
        num_split: Micro-batches per batch; those of the plan if `None`.
        devices: Device of each stage on its worker; the CPU if `None`. ``cuda`` without a number is
            the GPU of the worker's ``LOCAL_RANK``.
        seed: Seed for the function that builds the model; this process's own seed if `None`.
        sample: See `runtime.partition.cut.cut_for_plan`.
        timeout_s: Longest silence of a worker.

    Raises:
        PlanMismatch: The plan is for another model, or has features that RPC does not support.
        InvalidInput: The number of workers is not that of the stages, or the model cannot be sent.
        RankFailed: A worker does not answer.
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
        check_placement(plan, workers, devices)
        self.plan = plan if num_split is None else change_num_split(plan, num_split)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._collector = OutputCollector()
        self._stages: tuple[rpc.RRef[StageServer], ...] = ()
        source = ModelSource.of(model, torch.initial_seed() if seed is None else seed)
        self._liveness = LivenessCheck(list(dict.fromkeys(workers)), timeout_s)
        try:
            places = devices or [None] * len(workers)
            built = build_on_workers(self._liveness, source, self.plan, workers, places, sample)
            self._built, self._stages = built, built.stages
            self._output = pickle.loads(built.output)
            self._most_stages = max(Counter(workers).values())  # on one worker
            self._connect()
        except BaseException:
            # Or its thread would go on pinging, with no object left to close.
            self._liveness.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_split(self) -> int:
        """Number of micro-batches per batch."""
        return self.plan.num_microbatches

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run a batch; called like the model.

        Returns:
            The model's output, joined as by `runtime.pipeline.Pipeline`.

        Raises:
            InvalidInput: The batch cannot be split into micro-batches.
            StageError: The model raised on a worker.
            RankFailed: A worker died or stopped answering.
        """
        batches = self._split(args, kwargs)
        outputs = self._run(batches, torch.is_grad_enabled() and _in_context())
        sizes = [len(batch[0]) for batch in batches]
        return insert_tensors(self._output, list(join_outputs(outputs, sizes)))

    def forward_backward(
        self,
        context_id: int,
        *args: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        **kwargs: Tensor,
    ) -> Tensor:
        """Run forward and backward; leave the gradients in the workers' ``dist_autograd`` context.

        Args:
            context_id: Id of the current context.
            *args: The batch, as the model takes it.
            target: Split like the batch.
            loss_fn: ``loss_fn(output, target)``, a mean over the micro-batch, run in this process.
            **kwargs: Inputs by keyword.

        Returns:
            The mean loss over the batch.

        Raises:
            InvalidInput: The batch cannot be split, or the target does not fit it.
            StageError: The model raised on a worker.
            RankFailed: A worker died or stopped answering.
        """
        batches = self._split(args, kwargs)
        sizes = [len(batch[0]) for batch in batches]
        if not target.dim() or len(target) != sum(sizes):
            raise InvalidInput(
                f"the target has shape {tuple(target.shape)}, but the batch has {sum(sizes)} "
                "samples; the target's first dimension must be the batch"
            )
        outputs = self._run(batches, True)
        total = torch.zeros(())
        for flat, wanted, size in zip(outputs, target.split(sizes), sizes, strict=True):
            loss = loss_fn(insert_tensors(self._output, list(flat)), wanted)
            # Weighted by size, so that the sum of the means is the mean of the whole batch.
            total = total + loss * (size / sum(sizes))
        # The loss may ignore some outputs; their stages would wait for gradients (see `anchor`).
        total = anchor(total, [value for flat in outputs for value in flat])
        run_backward = dist_autograd.backward  # type: ignore[attr-defined]
        self._liveness.run(lambda: run_backward(context_id, [total]), "the backward pass")
        return total.detach()

    def train_step(
        self,
        *args: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        optimizer: DistributedOptimizer,
        **kwargs: Tensor,
    ) -> Tensor:
        """Run forward, backward and the optimizer's step; see `forward_backward`."""
        # Every worker keeps the gradients in this context, so the optimizer steps before it ends.
        with dist_autograd.context() as context_id:
            loss = self.forward_backward(
                context_id, *args, target=target, loss_fn=loss_fn, **kwargs
            )
            self._liveness.run(lambda: optimizer.step(context_id), "the optimizer's step")
        return loss

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Return references to all trainable parameters, for ``DistributedOptimizer``."""
        return [rref for found in self._call_all("parameters") for rref in found.values()]

    def gradients(self, context_id: int) -> dict[str, Tensor]:
        """Return a context's gradients by parameter name; a tied weight has one name."""
        return {
            name: gradient
            for found in self._call_all("gradients", context_id)
            for name, gradient in found.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Gather the whole model's state on this process's CPU, under the model's names."""
        found = {name: value for part in self._call_all("state") for name, value in part.items()}
        return {name: found[name] for name in self._built.names if name in found}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the whole model's state into the stages.

        Raises:
            InvalidInput: Names are missing or unknown.
        """
        names = set(self._built.names)
        missing, unknown = names - state.keys(), state.keys() - names
        if missing or unknown:
            raise InvalidInput(
                f"the state does not match the model: missing {sorted(missing)}, "
                f"unknown {sorted(unknown)}"
            )
        for stage, held in zip(self._stages, self._call_all("names"), strict=True):
            future = self._start(stage, "load", {name: state[name] for name in held})
            self._liveness.wait(stage.owner_name(), future, "loading values")

    def train(self, mode: bool = True) -> Self:
        """Switch all stages to training or evaluation mode.

        Raises:
            PlanMismatch: The captured model has operations frozen in the other mode.
        """
        self._call_all("train", mode)
        return self

    def eval(self) -> Self:
        """Switch all stages to evaluation mode."""
        return self.train(False)

    def close(self) -> None:
        """Release the stages on the workers, which continue to serve."""
        if self._stages and self._liveness.missing is None:
            self._call_all("close")
        self._stages = ()
        self._liveness.close()

    def _connect(self) -> None:
        """Connect every stage to the next one and the master."""
        collector = rpc.RRef(self._collector)
        next_stages = (*self._stages[1:], None)
        for stage, next_stage in zip(self._stages, next_stages, strict=True):
            future = self._start(stage, "connect", Route(next_stage, collector))
            self._liveness.wait(stage.owner_name(), future, "connecting the stages")

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, ...]]:
        structure = self._built.structure
        flat = structure.flatten(args, kwargs)
        return split_batch(flat, self.num_split, self._built.fixed_inputs, structure.names)

    def _run(self, batches: list[tuple[Tensor, ...]], wants_grad: bool) -> list[tuple[Any, ...]]:
        """Return the flat outputs of every micro-batch; concurrent calls take turns."""
        with self._lock:
            self._check_open()
            step = self._collector.begin()
            # A micro-batch that waits for its turn occupies a thread of the worker, on each of its
            # stages: more of them would leave none for the one whose turn it is.
            window = max(1, THREADS // self._most_stages)
            for microbatch, values in enumerate(batches):
                self._wait_for(microbatch + 1 - window)
                task = MicrobatchTask(step, microbatch, wants_grad)
                post(self._stages[0], "forward", task, values)
            self._wait_for(len(batches))
            return self._collector.take()

    def _wait_for(self, count: int) -> None:
        """Wait until this many micro-batches have returned."""
        waited_s, before = 0.0, self._collector.count
        while not self._collector.has(count, 0.2):
            self._liveness.check(f"micro-batch {self._collector.count} of {self.num_split}")
            # Every returned micro-batch restarts the clock, so that a batch of many may take long.
            waited_s = waited_s + 0.2 if self._collector.count == before else 0.0
            before = self._collector.count
            if waited_s > self._timeout_s:
                raise RankFailed(
                    f"micro-batch {before} of {self.num_split} did not return within "
                    f"{self._timeout_s:g} s, though every worker still answers; raise timeout_s "
                    "if it needs more time"
                )

    def _check_open(self) -> None:
        if not self._stages:
            raise InvalidInput("this pipeline is closed")

    def _start(self, stage: rpc.RRef[StageServer], method: str, *args: Any) -> Future[Any]:
        return send(stage.owner_name(), call_safely, call_method, stage, method, *args)

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all stages in parallel and return the results."""
        self._check_open()
        started = [(stage, self._start(stage, method, *args)) for stage in self._stages]
        return [
            self._liveness.wait(stage.owner_name(), future, f"{method!r} of all stages")
            for stage, future in started
        ]


def _in_context() -> bool:
    try:
        # Private, as all queries of the context are; it raises outside of one.
        dist_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def change_num_split(plan: Plan, num_split: int) -> Plan:
    """Return the plan with its batch split into another number of micro-batches that divides it."""
    if not plan.inputs:
        raise InvalidInput("the plan records no inputs; plan with num_microbatches instead")
    batch = plan.inputs[0].shape[0] * plan.num_microbatches
    if num_split < 1 or batch % num_split:
        raise InvalidInput(f"num_split is {num_split}; it must divide the batch of {batch}")
    size = batch // num_split
    inputs = tuple(
        spec.model_copy(update={"shape": (size, *spec.shape[1:])}) for spec in plan.inputs
    )
    changed = {"num_microbatches": num_split, "inputs": inputs}
    if size != plan.inputs[0].shape[0]:
        changed["boundaries"] = ()  # recorded at the planned size
    return plan.model_copy(update=changed)


def check_placement(plan: Plan, workers: Sequence[str], devices: Sequence[object] | None) -> None:
    """Check that RPC supports the plan, and that there is a worker and a device per stage."""
    check_runnable(plan, "whole layers")
    if any(stage.replicas > 1 for stage in plan.stages):
        raise PlanMismatch("RPC does not support replicas; plan with --max-replicas 1")
    if any(stage.recompute != "never" for stage in plan.stages):
        raise PlanMismatch("RPC does not support recomputation; plan with --recompute never")
    if len(workers) != plan.num_stages:
        raise InvalidInput(
            f"the plan has {plan.num_stages} stages, but {len(workers)} workers are named; name "
            "one per stage, and repeat a worker that serves several"
        )
    if devices is not None and len(devices) != plan.num_stages:
        raise InvalidInput(
            f"{len(devices)} devices for {plan.num_stages} stages; give one per stage"
        )
