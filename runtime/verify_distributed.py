"""Verify a plan on real ranks: compare their step with one of the unsplit model on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..capture.capture import trace
from ..capture.captured import Captured
from ..capture.equivalence.check import compute_gradient_floor
from ..capture.observation.generation_cache import switch_off_caches
from ..capture.observation.nested_values import map_tensors
from ..capture.observation.preserve import preserve_model, preserve_random_state
from ..capture.sample import CallStructure
from ..core.errors import InvalidInput, StagewrightError
from ..core.plan.plan import Plan
from .checkpoint_files.rank_agreement import RankAgreement
from .distributed import DistributedPipeline
from .engine.batch_io import BatchInputs, as_scalar_loss
from .engine.keyed_dropout import keyed_dropout
from .engine.microbatch import split_target
from .random_state import RandomState
from .verify import (
    LossFunction,
    Verification,
    convert,
    copy_model,
    difference_of,
    explain_failure,
    with_input_dtype,
)

UNSPLIT_RANK = 0
"""Rank that also has the unsplit model, whose numbers it sends the others one tensor at a time."""

PATIENCE = 10.0
"""Factor on the group's timeout where ranks wait for one that compares."""

SEED = 0
"""Seed of masks of dropout: in the unsplit model they are drawn by micro-batch and layer, too."""


def verify_distributed(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    target: Any,
    loss_fn: LossFunction,
    *,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Verification:
    """Run one step of the model unsplit and one on this plan's ranks, and compare them.

    Every rank calls it with equal arguments, as under ``torchrun`` after `init_process_group`. The
    step is that of a `DistributedPipeline`, whose ranks split layers, share weights and send
    messages as planned. Gradients and buffers are gathered from the ranks that hold parts of them,
    and each rank compares what it has with the unsplit model's. A forward-only plan is run in
    evaluation mode.

    Where the model draws random numbers, its unsplit step is that of its captured program, run
    whole and checked against the model, with the masks of `keyed_dropout`.

    Args:
        model: The model, equal on every rank, which is copied and not changed.
        plan: The plan to verify.
        batch: A whole batch: one argument, a tuple of them, or a dict of keywords.
        target: A tensor or a nest of tensors, split like the batch.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch.
        dtype: Dtype of both copies and floating inputs; ``torch.float64`` tells rounding apart.
        group: The ranks, in order; the default group if `None`.

    Returns:
        The differences over all ranks, on every rank.

    Raises:
        InvalidInput: The batch is not the plan's, there is no group, or split heads have dropout.
        PlanMismatch: The plan is for another model or other ranks, or its step fails alone.
        RankFailed: A rank died; the message names it.
    """
    trains = plan.schedule != "forward_only"
    if dtype is not None:
        plan, (batch, target) = with_input_dtype(plan, dtype), convert((batch, target), dtype)
    parts = copy_model(model, dtype, trains=trains)
    with (
        preserve_random_state(),
        DistributedPipeline(
            parts, plan, loss_fn=loss_fn, group=group, keyed_dropout=SEED
        ) as pipeline,
    ):
        _check_masks(pipeline, trains=trains)
        structure = CallStructure.from_json(plan.input_structure)
        args, kwargs = structure.split_call(batch)
        inputs = BatchInputs(plan, structure, pipeline.device).microbatches(args, kwargs)
        whole = None
        with pipeline.during("the start of the unsplit model", patience=PATIENCE):
            if pipeline.rank == UNSPLIT_RANK:
                made = copy_model(model, dtype, trains=trains).to(pipeline.device)
                whole = _UnsplitModel(made, structure, loss_fn, inputs[0])
        unsplit_loss = _run_unsplit(pipeline, whole, inputs, target)
        loss = _run_ranks(pipeline, args, kwargs, target, trains=trains)
        # Other ranks wait while one gathers and compares.
        with pipeline.during("the comparison with the unsplit model", patience=PATIENCE):
            return _compare(pipeline, whole.model if whole else None, unsplit_loss, loss)


def _check_masks(pipeline: DistributedPipeline, *, trains: bool) -> None:
    if trains and pipeline.split is not None and pipeline.split.draws_apart:
        raise InvalidInput(
            "ranks that split attention heads each draw the dropout of their own, and no step of "
            "the unsplit model has these masks; verify a plan of the model without attention "
            "dropout (attn_pdrop=0 or attention_dropout=0 for models of transformers, dropout 0 "
            "in --config for families): its layers split alike"
        )


class _UnsplitModel:
    """The model whole, on one rank.

    Where it draws random numbers it is run by its captured program, whose layers can draw those
    that the ranks draw.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: CallStructure,
        loss_fn: LossFunction,
        flat: Sequence[Tensor],
    ) -> None:
        self.model = model
        self._structure, self._loss_fn = structure, loss_fn
        self._captured: Captured | None = None
        if model.training and self._draws(flat):
            sample = structure.as_sample(_clone(flat))
            self._captured = trace(model, sample, recipe=structure.recipe)
            self._segment = self._captured.segment(0, len(self._captured.layers))

    def run(self, index: int, flat: Sequence[Tensor], target: Any, share: float) -> float:
        """Run a micro-batch, add to gradients and return its share of the mean loss."""
        with torch.set_grad_enabled(self.model.training), switch_off_caches(self.model):
            loss = as_scalar_loss(self._loss_fn(self._call(index, flat), target)) * share
            if self.model.training:
                loss.backward()
        return float(loss.detach())

    def _call(self, index: int, flat: Sequence[Tensor]) -> Any:
        # Cloned: micro-batches are views of the batch, and the model may work in place.
        if self._captured is None:
            args, kwargs = self._structure.unflatten(_clone(flat))
            return self.model(*args, **kwargs)
        with keyed_dropout(self._segment, seed=SEED, step=0, microbatch=index):
            return self._captured.unflatten_output(self._segment(*_clone(flat)))

    def _draws(self, flat: Sequence[Tensor]) -> bool:
        """Return True if a forward draws from torch's or Python's generators."""
        args, kwargs = self._structure.unflatten(_clone(flat))
        with preserve_model(self.model), torch.no_grad(), switch_off_caches(self.model):
            before = _read_generators(flat[0].device)
            self.model(*args, **kwargs)
            return _read_generators(flat[0].device) != before


def _clone(flat: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in flat]


def _read_generators(device: torch.device) -> tuple[Any, ...]:
    state = RandomState.now(device)
    assert state.cpu is not None
    of_torch, (of_python, _) = state.cpu
    on_device = None if state.device is None else state.device.tolist()
    return of_torch.tolist(), of_python, on_device


def _run_unsplit(
    pipeline: DistributedPipeline,
    whole: _UnsplitModel | None,
    inputs: Sequence[Sequence[Tensor]],
    target: Any,
) -> float:
    """Run the unsplit step on the rank that has the model; return its mean loss there."""
    total, number = 0.0, pipeline.plan.num_microbatches
    for index, wanted in enumerate(split_target(target, number)):
        with pipeline.during(f"micro-batch {index} of the unsplit model"):
            if whole is not None:
                flat = [tensor.to(pipeline.device) for tensor in inputs[index]]
                there = map_tensors(lambda value: value.to(pipeline.device), wanted)
                total += whole.run(index, flat, there, 1 / number)
        pipeline.barrier()  # after each micro-batch, so that no rank waits for a whole step
    return total


def _run_ranks(
    pipeline: DistributedPipeline,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    *,
    trains: bool,
) -> float:
    """Run the ranks' step and return its mean loss; raise `PlanMismatch` for a failure."""
    try:
        if trains:
            loss = pipeline.step(*args, target=target, **kwargs)
        else:
            _, loss = pipeline.evaluate(*args, target=target, **kwargs)
    except StagewrightError:
        raise
    except Exception as error:
        raise explain_failure(error, f"rank {pipeline.rank}") from error
    return pipeline.share_results(loss, 0.0)[0]


@dataclass(frozen=True)
class _Entry:
    """A parameter or buffer of the unsplit model, by all its names.

    Attributes:
        shape: Of what is compared, a parameter's gradient or a buffer.
        dtype: Its dtype; `None` if the parameter has no gradient.
    """

    names: tuple[str, ...]
    is_buffer: bool
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Expected:
    """Facts about the unsplit step that all ranks know."""

    loss: float
    floor: float
    entries: tuple[_Entry, ...]
    state_names: frozenset[str]


@dataclass
class _Found:
    """Differences that a rank found, and the names that it holds."""

    gradients: dict[str, float]
    buffers: dict[str, float]
    state_names: frozenset[str]


def _compare(
    pipeline: DistributedPipeline, whole: nn.Module | None, unsplit_loss: float, loss: float
) -> Verification:
    """Compare what each rank holds with the unsplit model's; called on every rank."""
    ranks = RankAgreement(pipeline.group)
    tensors = {} if whole is None else _name_tensors(whole)
    expected = ranks.first(lambda: _describe(whole, tensors, unsplit_loss))
    found = _Found({}, {}, frozenset(pipeline.module.state_dict()))
    own = {name: tensor for name, (tensor, _) in _name_tensors(pipeline.module).items()}
    for entry in expected.entries:
        value = _send_expected(pipeline, entry, tensors)
        differences = found.buffers if entry.is_buffer else found.gradients
        floor = 0.0 if entry.is_buffer else expected.floor
        if value is not None and whole is not None:
            differences[entry.names[0]] = 0.0  # said even if no stage holds it
        for copy in {id(own[name]): name for name in entry.names if name in own}.values():
            part = own[copy] if entry.is_buffer else own[copy].grad
            if value is None and part is None:
                continue
            ours = None if part is None else pipeline.whole(copy, part)
            worst = max(differences.get(entry.names[0], 0.0), difference_of(ours, value, floor))
            differences[entry.names[0]] = worst
    return _join(expected, ranks.each(lambda: found), loss)


def _name_tensors(module: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Return parameters and buffers under each of their names, and whether they are buffers."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {
        **{name: (tensor, False) for name, tensor in parameters},
        **{name: (tensor, True) for name, tensor in buffers},
    }


def _describe(
    whole: nn.Module | None, tensors: dict[str, tuple[Tensor, bool]], loss: float
) -> _Expected:
    assert whole is not None, "the first rank has the unsplit model"
    names: dict[int, list[str]] = {}
    for name, (tensor, _) in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    entries = []
    for same in names.values():
        tensor, is_buffer = tensors[same[0]]
        value = tensor if is_buffer else tensor.grad
        dtype = None if value is None else value.dtype
        entries.append(_Entry(tuple(same), is_buffer, tuple(tensor.shape), dtype))
    floor = compute_gradient_floor(p.grad for p in whole.parameters() if p.grad is not None)
    return _Expected(loss, floor, tuple(entries), frozenset(whole.state_dict()))


def _send_expected(
    pipeline: DistributedPipeline, entry: _Entry, tensors: dict[str, tuple[Tensor, bool]]
) -> Tensor | None:
    """Return the unsplit model's gradient or buffer; called on every rank, one after the other.

    One at a time, so that no rank but the one with the unsplit model needs memory for all.
    """
    if entry.dtype is None:
        return None
    if pipeline.rank == UNSPLIT_RANK:
        tensor = tensors[entry.names[0]][0]
        value = tensor if entry.is_buffer else tensor.grad
        assert value is not None
        value = value.detach().to_dense().contiguous()
    else:
        value = torch.empty(entry.shape, dtype=entry.dtype, device=pipeline.device)
    sent = torch.view_as_real(value) if value.is_complex() else value
    dist.broadcast(sent, group_src=UNSPLIT_RANK, group=pipeline.group)
    return value


def _join(expected: _Expected, ranks: Sequence[_Found], loss: float) -> Verification:
    """Join what ranks found, the largest difference of each tensor."""
    gradients: dict[str, float] = {}
    buffers: dict[str, float] = {}
    for each in ranks:
        for joined, own in ((gradients, each.gradients), (buffers, each.buffers)):
            joined.update({name: max(joined.get(name, 0.0), own[name]) for name in own})
    held = frozenset().union(*(each.state_names for each in ranks))
    return Verification(
        loss=abs(loss - expected.loss) / max(abs(expected.loss), 1e-30),
        gradients=gradients,
        buffers=buffers,
        missing=tuple(sorted(expected.state_names - held)),
        unknown=tuple(sorted(held - expected.state_names)),
    )
