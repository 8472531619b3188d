"""Materialisation of a rank's part of a model on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...capture.observation.python_state import get_python_attributes
from ...capture.program.segment import Segment, get_constants
from ...core.errors import InvalidInput
from .initialise import initialise
from .tensor_slots import ModelTensor, empty_like, list_tensors
from .weight_files import WeightReader
from .weights import Weights


def materialise(
    model: nn.Module, stages: Iterable[Segment], weights: Weights, device: torch.device
) -> None:
    """Allocate and fill the tensors of some stages of a model, leaving the others on meta.

    The model is on meta, except for buffers with values; it and its stages are changed in place.
    """
    stages = list(stages)
    tensors = list_tensors(model)
    names: set[str] = set()
    for stage in stages:
        names.update(name for name, _ in stage.named_parameters(remove_duplicate=False))
        names.update(name for name, _ in stage.named_buffers(remove_duplicate=False))
    here = [each for each in tensors if names.intersection(each.names)]
    _materialise(model, here, tensors, weights, device)
    for stage in stages:
        stage.rebind_tensors(model)
        _check_constants(stage)


def materialise_whole(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Allocate and fill all tensors of a model, with the values that its stages would get."""
    tensors = list_tensors(model)
    _materialise(model, tensors, tensors, weights, device)


def _materialise(
    model: nn.Module,
    here: Collection[ModelTensor],
    tensors: list[ModelTensor],
    weights: Weights,
    device: torch.device,
) -> None:
    bare = [each for each in here if each.tensor.is_meta]
    reader = None
    if weights.checkpoint is not None:
        reader = WeightReader(weights.checkpoint, tensors, strict=weights.strict)
    for each in bare:
        each.home.put(empty_like(each.tensor, device))
    # Initialised before anything is read: an initialiser sets all tensors of a module, including
    # those that the checkpoint has.
    unread = [each for each in bare if reader is None or not reader.has(each)]
    if unread:
        initialise(model, unread, tensors, init=weights.init, seed=weights.seed, device=device)
    if reader is not None:
        reader.fill(each for each in here if each.is_persistent or each in bare)
    for each in here:
        value = each.home.get()
        if value.shape != each.tensor.shape or value.is_meta:
            raise InvalidInput(
                f"init= made {each.name} a tensor of shape {list(value.shape)} on {value.device}, "
                f"but the model has {list(each.tensor.shape)}; set its values in place"
            )
        for slot in each.slots:  # ties the weight again
            slot.put(value)


def _check_constants(stage: Segment) -> None:
    """Check that no plain tensor attribute is left on meta: nothing would give it values."""
    lost = [name for name, tensor in get_constants(stage).items() if tensor.is_meta]
    for path, module in stage.named_modules():
        if module is not stage:
            lost += [
                f"{path}.{name}"
                for name, value in sorted(get_python_attributes(module).items())
                if any(isinstance(v, Tensor) and v.is_meta for v in pytree.tree_leaves(value))
            ]
    if lost:
        raise InvalidInput(
            f"{', '.join(lost)} holds a tensor on the meta device that is not registered there as "
            "a parameter or buffer, so nothing gives it values; register it"
        )
