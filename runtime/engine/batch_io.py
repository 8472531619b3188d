"""Inputs and outputs of a whole batch: micro-batches, shares of the loss, joined outputs."""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ...capture.captured import Captured
from ...capture.observation.nested_values import map_tensors
from ...capture.observation.python_state import read_closure
from ...capture.sample import CallStructure
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.units import count, list_some, name_type
from ..ranks.device_placement import move_to_device, queues_work
from ..ranks.process_groups import RankSet
from ..tensor_parallel.exchange import ShardGroup
from ..tensor_parallel.split_output import OutputParts
from .loss_graph import LossGraphCheck
from .loss_reduction import LossReduction, ReductionCheck
from .microbatch import check_inputs, join_outputs, split_batch
from .padding import PartialTarget, count_samples, trim_padding

LossFunction = Callable[[Any, Tensor], Tensor]

MAX_CALLS_FOLLOWED = 3
"""From the loss function to a module with weights: a function that calls one that calls it."""


def check_loss_function(loss_fn: LossFunction, model: nn.Module) -> None:
    """Raise `InvalidInput` for a loss with weights of its own, which nothing would train."""
    ours = {id(parameter) for parameter in model.parameters()}
    for module in _find_modules(loss_fn, MAX_CALLS_FOLLOWED):
        names = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in ours]
        if names:
            raise InvalidInput(
                f"loss_fn uses {name_type(module)} with trainable parameters of its own "
                f"({list_some(names, 3)}), which no optimizer of a pipeline holds and no "
                "checkpoint saves; use them in the model and return what the loss needs, or "
                "freeze them (requires_grad_(False))"
            )


def check_gradients_enabled() -> None:
    """Raise `InvalidInput` where a training step could leave no gradients."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise InvalidInput(
            "a training step needs gradients, but this code runs under torch.no_grad() or "
            "torch.inference_mode(); call step outside of it, or call evaluate"
        )


def _find_modules(value: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a callable is, holds, closes over or names as globals."""
    if isinstance(value, nn.Module):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        held = vars(value.__self__) if hasattr(value.__self__, "__dict__") else {}
        read = set(value.__func__.__code__.co_names) if hasattr(value.__func__, "__code__") else ()
        parts = [
            value.__self__,
            value.__func__,
            *(held[name] for name in sorted(held.keys() & read)),
        ]
    elif isinstance(value, FunctionType):
        read = {i.argval for i in dis.get_instructions(value) if i.opname == "LOAD_GLOBAL"}
        parts = [value.__globals__[name] for name in sorted(read & value.__globals__.keys())]
        parts += read_closure(value).values()
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    for part in parts if depth else ():
        # Functions of torch name a great many others, and hold no weights.
        is_library = str(getattr(part, "__module__", "")).startswith("torch.")
        if isinstance(part, nn.Module) or not is_library:
            yield from _find_modules(part, depth - 1)


class BatchOutputs:
    """Losses and outputs of a batch, put together from those of its micro-batches.

    ``last`` is the last stage, if it is here. ``replicas`` are its ranks, of which entry k mod
    length runs micro-batch k; ``group`` is theirs if there are several and this rank is one of
    them. ``sharing`` are the ranks that share the last stage's layers, if there are several;
    ``parts`` are outputs of which each holds a part, ``divided`` names of weights of which they do.
    ``reduction`` says how losses of micro-batches make the batch's.
    """

    def __init__(
        self,
        captured: Captured,
        loss_fn: LossFunction | None,
        num_microbatches: int,
        device: torch.device,
        last: nn.Module | None,
        replicas: RankSet = (0,),
        group: dist.ProcessGroup | None = None,
        parts: OutputParts | None = None,
        divided: Collection[str] = (),
        sharing: ShardGroup | None = None,
        reduction: LossReduction = "mean",
    ) -> None:
        self._reduction, self._looks = reduction, ReductionCheck(reduction, device)
        self._captured, self._loss_fn, self._parts = captured, loss_fn, parts
        self._sharing = sharing
        model = captured.program.model
        self._check = LossGraphCheck(model, last, divided) if last is not None else None
        self._num_microbatches, self._device = num_microbatches, device
        self._replicas, self._group = replicas, group

    def compute_loss_share(self, flat: Any, target: Any) -> Tensor:
        """Compute a micro-batch's share of the batch's loss.

        ``flat`` are the stage's outputs; the target is a `PartialTarget` if some samples are
        padding.
        """
        loss_fn, check = self._loss_fn, self._check
        assert loss_fn is not None
        assert check is not None, "the last stage computes the loss"
        # Stages send tensors only; constants of the model's output are put back in between.
        tensors = iter(flat if isinstance(flat, tuple | list) else [flat])
        tensors = (value for value in tensors if isinstance(value, Tensor))
        outputs = [
            next(tensors) if isinstance(node, fx.Node) else node
            for node in self._captured.program.flat_outputs
        ]
        weight = 1 / self._num_microbatches
        samples = None
        if isinstance(target, PartialTarget):
            samples, weight = target.samples, target.samples / target.of
            target = target.target
        weight = 1.0 if self._reduction == "sum" else weight

        def compute(given: list[Any], target: Any = target) -> Tensor:
            output = self._captured.unflatten_output(given)
            if samples is not None:
                output = trim_padding(output, count_samples(given) or 0, samples)
            return as_scalar_loss(loss_fn(output, target))

        parts = self._parts
        if parts is None and samples is None and torch.is_grad_enabled():
            self._looks.look(compute, outputs, target)
        run = (
            partial(compute, outputs) if parts is None else partial(parts.compute, compute, outputs)
        )
        with self._sharing.check_equal_draws() if self._sharing is not None else nullcontext():
            return check.run(run, outputs) * weight

    def move_target(self, target: Any) -> Any:
        """Return a whole batch's target on the device: moved once, not in every micro-batch."""
        return map_tensors(lambda value: move_to_device(value, self._device), target)

    def reduce_loss(self, shares: Sequence[Tensor]) -> Tensor:
        """Add up the shares of all replicas to the batch's mean loss."""
        loss = torch.stack(list(shares)).sum() if shares else torch.zeros((), device=self._device)
        if self._group is not None:
            dist.all_reduce(loss, group=self._group)
        return loss

    def join_batch_output(self, made: dict[int, list[Any]], microbatch_size: int) -> Any:
        """Return the whole batch's output; ``made`` are those computed here, by micro-batch."""
        if self._parts is not None:
            made = {number: self._parts.join(found) for number, found in made.items()}
        outputs = self._gather_outputs(made)
        sizes = [microbatch_size] * len(outputs)
        return self._captured.unflatten_output(join_outputs(outputs, sizes))

    def _gather_outputs(self, made: dict[int, list[Any]]) -> list[tuple[Any, ...]]:
        """Return the outputs of all micro-batches, including those of other replicas."""
        if self._group is None:
            return [tuple(made[index]) for index in range(self._num_microbatches)]
        template = next(iter(made.values()))
        columns = [
            self._exchange(made, position) if isinstance(value, Tensor) else None
            for position, value in enumerate(template)
        ]
        return [
            tuple(
                value if column is None else column[index]
                for value, column in zip(template, columns, strict=True)
            )
            for index in range(self._num_microbatches)
        ]

    def _exchange(self, made: dict[int, list[Any]], position: int) -> list[Tensor]:
        """Return one output of all micro-batches, broadcast by each replica in one message."""
        like: Tensor = next(iter(made.values()))[position]
        found = [like] * self._num_microbatches
        for replica in range(len(self._replicas)):
            theirs = range(replica, self._num_microbatches, len(self._replicas))
            if replica in made:  # replica r's first micro-batch is number r
                packed = torch.stack([made[index][position] for index in theirs]).contiguous()
            else:
                packed = like.new_empty((len(theirs), *like.shape))
            dist.broadcast(packed, group_src=replica, group=self._group)
            for index, value in zip(theirs, packed, strict=True):
                found[index] = value
        return found


def as_scalar_loss(loss: Any) -> Tensor:
    """Return a loss without dimensions; raise `InvalidInput` unless it is a single number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidInput(
            f"loss_fn returned {found} but must return one number; take the mean over the "
            "micro-batch"
        )
    return loss.reshape(())


class BatchInputs:
    """The micro-batches of the arguments that a model is called with."""

    def __init__(self, plan: Plan, structure: CallStructure, device: torch.device) -> None:
        self._plan, self._structure, self._device = plan, structure, device

    @property
    def microbatch_size(self) -> int:
        """Return the number of samples per micro-batch."""
        return self._plan.inputs[0].shape[0]

    @property
    def size(self) -> int:
        """Return the number of samples per batch."""
        return self.microbatch_size * self._plan.num_microbatches

    def microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_used: bool = True
    ) -> list[tuple[Tensor, ...]]:
        """Check the batch and return the flat inputs of every micro-batch.

        They are on the device if a stage here uses them.
        """
        names = self._structure.argument_names
        if len(args) == len(names) + 1 and not kwargs:
            raise InvalidInput(
                f"this model takes {count(len(args) - 1, 'input')} "
                f"({', '.join(names)}) but got {len(args)}; pass the target as "
                "target="
            )
        flat = self._structure.flatten(args, kwargs)
        self._check(flat)
        batches = split_batch(
            flat, self._plan.num_microbatches, self._plan.inputs, self._structure.names
        )
        if not are_used or not queues_work(self._device):
            return batches
        return [
            tuple(move_to_device(tensor, self._device) for tensor in batch) for batch in batches
        ]

    def _check(self, flat: tuple[Tensor, ...]) -> None:
        check_inputs(flat, self._plan.inputs)
        for spec, tensor in zip(self._plan.inputs, flat, strict=True):
            wanted = (spec.shape[0] * self._plan.num_microbatches, *spec.shape[1:])
            if tuple(tensor.shape) != wanted:
                raise InvalidInput(
                    f"input {spec.name!r} has shape {tuple(tensor.shape)}; this plan's batch is "
                    f"{wanted}: {self._plan.num_microbatches} micro-batches of {spec.shape[0]}"
                    f"{_hint_for_samples(len(tensor), wanted[0], spec.shape[0])}"
                )


def _hint_for_samples(found: int, wanted: int, size: int) -> str:
    """Return advice for a batch with another number of samples."""
    if not found:
        return ""
    hint = f". Pass {wanted} samples"
    if found % size == 0:
        hint += f", or plan with {count(found // size, 'micro-batch')}"
    if found < wanted:
        hint += (
            ". If it is the last batch of the data, leave it out (drop_last=True), or pad it in an "
            "evaluation: evaluate(..., pad=True)"
        )
    return hint
