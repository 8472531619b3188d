"""What is saved or loaded: a pipeline of processes, of one process, or any module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.errors import InvalidInput
from ..checkpoint_files.rank_agreement import Ranks
from ..distributed import DistributedPipeline
from ..pipeline import Pipeline

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile`` and activation checkpointing put into the names of what they wrap."""


@dataclass(frozen=True)
class Target:
    """This rank's part of a model.

    Attributes:
        tensors: Parameters and persistent buffers by the names this rank knows them by, each
            tensor once, under its canonical name where the rank knows it.
        names: All names of each, by its key in ``tensors``.
        ranks: Who takes part.
        plan: Content id of the plan, if known.
        steps: Of a pipeline, those it has taken.
        unsaved: Modules with state of their own, which is neither parameter nor buffer.
        explained: ``explained(doing)`` goes around communication: names the rank that failed.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    ranks: Ranks
    plan: str | None
    steps: int | None
    unsaved: tuple[str, ...]
    explained: Callable[[str], AbstractContextManager[None]]

    def canonical_names(self) -> dict[int, str]:
        """The name of each tensor by its identity."""
        return {id(tensor): name for name, tensor in self.tensors.items()}

    def aliases(self) -> dict[str, str]:
        """Every other name of a tied tensor, and its canonical one."""
        return {name: key for key, names in self.names.items() for name in names if name != key}

    def check_memory(self) -> None:
        """See that there is something to read from or to write to.

        Raises:
            InvalidInput: A tensor has no memory yet.
        """
        for name, tensor in self.tensors.items():
            if tensor.is_meta:
                raise InvalidInput(
                    f"{name} is on the meta device; give the module memory first, with "
                    "module.to_empty(device=...)"
                )


def target_of(
    model: DistributedPipeline | nn.Module, group: dist.ProcessGroup | None = None
) -> Target:
    """Find out what a model holds on this rank.

    Raises:
        InvalidInput: It is no model.
    """
    if isinstance(model, DistributedPipeline):
        return _of_pipeline(model, group)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"expected a pipeline or a module, got {type(model).__name__}")
    tensors, names = _once(model, [])
    steps = model.steps if isinstance(model, Pipeline) else None
    return Target(
        tensors, names, Ranks(group), None, steps, _unsaved(model), lambda doing: nullcontext()
    )


def _of_pipeline(pipeline: DistributedPipeline, group: dist.ProcessGroup | None) -> Target:
    records = pipeline.graph.parameters
    tensors, names = _once(pipeline.module, [record.names for record in records])

    @contextmanager
    def explained(doing: str) -> Iterator[None]:
        on_gpu = pipeline.device.type == "cuda"
        # NCCL sends objects through the current device.
        with (
            pipeline.during(doing),
            torch.cuda.device(pipeline.device) if on_gpu else nullcontext(),
        ):
            yield

    ranks = Ranks(group or pipeline.group)
    plan = pipeline.plan.content_id()
    unsaved = _unsaved(pipeline.module)
    return Target(tensors, names, ranks, plan, pipeline.steps, unsaved, explained)


def _once(
    module: nn.Module, tied: list[tuple[str, ...]]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Each tensor under its canonical name, and all its names."""
    elsewhere = {name: names for names in tied for name in names}
    canonical: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, tensor in _named(module):
        known = elsewhere.get(name, (name,))
        key = canonical.setdefault(id(tensor), known[0])
        tensors[key] = tensor
        names[key] = tuple(dict.fromkeys((*names.get(key, (key,)), name, *known)))
    return tensors, names


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, under every name each goes by."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _clean(name), parameter
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield _clean(f"{path}.{name}" if path else name), buffer


def _unsaved(module: nn.Module) -> tuple[str, ...]:
    return tuple(
        name
        for name, owner in module.named_modules()
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    )


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
