"""Targets of saving and loading: a pipeline over processes, in one process, or any module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.errors import InvalidInput
from ..checkpoint_files.divided_tensor import DividedTensor
from ..checkpoint_files.rank_agreement import RankAgreement
from ..distributed import DistributedPipeline
from ..pipeline import Pipeline
from ..tensor_parallel.split_model import Division

CHECKPOINT_PATIENCE = 10.0
"""Writing takes minutes where steps take seconds; a rank that dies is noticed at once anyway."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that ``torch.compile`` and activation checkpointing add to names."""


@dataclass(frozen=True)
class CheckpointTarget:
    """This rank's part of a model.

    Attributes:
        tensors: Parameters and persistent buffers by name, each tensor once, under its canonical
            name if this rank knows it.
        names: All names of each tensor, by its key in ``tensors``.
        ranks: Ranks that take part.
        plan: Content id of the plan, if known.
        steps: Steps taken, for a pipeline.
        unsaved: Modules with extra state that is neither parameter nor buffer.
        model: The model or pipeline.
        divided: By ``id`` of a tensor, how the ranks that share a stage divide it.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    ranks: RankAgreement
    plan: str | None
    steps: int | None
    unsaved: tuple[str, ...]
    model: DistributedPipeline | nn.Module
    divided: Mapping[int, Division] = field(default_factory=dict)

    def in_whole(self, tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """Return a tensor as it is saved: of a divided one, a part that knows its place.

        ``like`` is the parameter that it is laid out like, if it is a state of an optimizer.
        """
        division = self.divided.get(id(tensor if like is None else like))
        if division is None:
            return tensor
        assert isinstance(self.model, DistributedPipeline)
        assert self.model.split is not None
        layout, shard = division.layout, self.model.split.group.shard
        return DividedTensor(
            tensor, layout.dim, layout.parts, shard, division.degree, division.shape
        )

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Name a lost rank in an error of what is done inside, if the model is a pipeline's."""
        with ExitStack() as stack:
            if isinstance(self.model, DistributedPipeline):
                stack.enter_context(self.model.during(doing, patience=CHECKPOINT_PATIENCE))
                # NCCL sends pickled objects through the current device, which need not be this
                # rank's.
                if self.model.device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self.model.device))
            yield

    def canonical_names(self) -> dict[int, str]:
        """Return the name of each tensor, by ``id``."""
        return {id(tensor): name for name, tensor in self.tensors.items()}

    def aliases(self) -> dict[str, str]:
        """Map every other name of a tied tensor to its canonical name."""
        return {name: key for key, names in self.names.items() for name in names if name != key}

    def check_memory(self) -> None:
        """Raise `InvalidInput` if a tensor has no memory yet."""
        for name, tensor in self.tensors.items():
            if tensor.is_meta:
                raise InvalidInput(
                    f"{name} is on the meta device; allocate memory first, with "
                    "module.to_empty(device=...)"
                )


def find_target(
    model: DistributedPipeline | nn.Module, group: dist.ProcessGroup | None = None
) -> CheckpointTarget:
    """Return this rank's part of a model; raise `InvalidInput` for anything else."""
    plan = steps = None
    divided: dict[int, Division] = {}
    if isinstance(model, DistributedPipeline):
        plan, steps, group = model.plan.content_id(), model.steps, group or model.group
        module, tied = model.module, [record.names for record in model.graph.parameters]
    elif isinstance(model, nn.Module):
        module, tied = model, []
        steps = model.steps if isinstance(model, Pipeline) else None
    else:
        raise InvalidInput(f"expected a pipeline or a module, got {type(model).__name__}")
    tensors, names = _collect_tensors(module, tied)
    if isinstance(model, DistributedPipeline) and model.is_divided:
        assert model.split is not None
        divided = {
            id(tensor): model.split.divided[name]
            for name, tensor in _named(module)
            if name in model.split.divided
        }
    unsaved = _find_extra_state(module)
    return CheckpointTarget(
        tensors, names, RankAgreement(group), plan, steps, unsaved, model, divided
    )


def _collect_tensors(
    module: nn.Module, tied: list[tuple[str, ...]]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return each tensor under its canonical name, and all names of each."""
    elsewhere = {name: names for names in tied for name in names}
    canonical: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, tensor in _named(module):
        known = elsewhere.get(name, (name,))
        # The first name in the whole model, even if this rank holds only another one: all ranks
        # must store a tied tensor under one key.
        key = canonical.setdefault(id(tensor), known[0])
        tensors[key] = tensor
        names[key] = tuple(dict.fromkeys((*names.get(key, (key,)), name, *known)))
    return tensors, names


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then persistent buffers, under each of their names."""
    # DDP prefixes every name with `module.`; a checkpoint must load without it.
    while isinstance(module, DistributedDataParallel):
        module = module.module
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _clean(name), parameter
    # Torch's private fields, since `named_buffers` includes buffers that are not persistent, and
    # `state_dict` detaches tensors, whose identity reveals ties.
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield _clean(f"{path}.{name}" if path else name), buffer


def _find_extra_state(module: nn.Module) -> tuple[str, ...]:
    return tuple(
        name
        for name, owner in module.named_modules()
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    )


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
