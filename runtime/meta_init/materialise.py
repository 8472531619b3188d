"""Give memory and values to what a rank holds of a model on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from ...capture.program.segment import Segment, get_constants
from ...core.errors import InvalidInput
from .initialise import initialise
from .tensor_slots import ModelTensor, empty_like, list_tensors
from .weight_files import WeightReader
from .weights import Weights


def materialise(
    model: nn.Module, stages: Iterable[Segment], weights: Weights, device: torch.device
) -> None:
    """Give memory and values to what some stages of a model hold; the rest stays as it is.

    Args:
        model: On the meta device, but for buffers that have values; changed in place.
        stages: Cut from it; changed in place.
        weights: Where the values come from.
        device: Where they go.

    Raises:
        InvalidInput: A value comes from nowhere, or the checkpoint does not fit the model.
    """
    stages = list(stages)
    slots = list_tensors(model)
    names = {name for stage in stages for name in _names_in(stage)}
    here = [slot for slot in slots if names.intersection(slot.names)]
    materialise_tensors(model, here, slots, weights, device)
    for stage in stages:
        stage.rebind_tensors(model)
        _check_constants(stage)


def materialise_whole(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Give memory and values to a whole model, the same ones as to its stages.

    Raises:
        InvalidInput: See `materialise`.
    """
    slots = list_tensors(model)
    materialise_tensors(model, slots, slots, weights, device)


def materialise_tensors(
    model: nn.Module,
    here: Collection[ModelTensor],
    slots: list[ModelTensor],
    weights: Weights,
    device: torch.device,
) -> None:
    """Give memory and values to some of a model's tensors.

    Args:
        model: Changed in place.
        here: Which.
        slots: All of the model's.
        weights: Where the values come from.
        device: Where they go.
    """
    bare = [slot for slot in here if slot.tensor.is_meta]
    reading = None
    if weights.checkpoint is not None:
        reading = WeightReader(weights.checkpoint, slots, strict=weights.strict)
    for slot in here:
        if slot.tensor.is_meta:
            slot.home.put(empty_like(slot.tensor, device))
    unread = [slot for slot in bare if reading is None or not reading.has(slot)]
    if unread:
        initialise(model, unread, slots, init=weights.init, seed=weights.seed, device=device)
    if reading is not None:
        reading.fill(slot for slot in here if slot.is_persistent or slot in bare)
    for slot in here:
        value = slot.home.get()
        if value.shape != slot.tensor.shape or value.is_meta:
            raise InvalidInput(
                f"init= made {slot.name} a tensor of shape {list(value.shape)} on {value.device}, "
                f"the model has {list(slot.tensor.shape)}; set its values in place"
            )
        for place in slot.places:
            place.put(value)


def _names_in(stage: Segment) -> Iterator[str]:
    for name, _ in stage.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in stage.named_buffers(remove_duplicate=False):
        yield name


def _check_constants(stage: Segment) -> None:
    """Tensors that are neither parameters nor buffers cannot be found again."""
    lost = [name for name, tensor in get_constants(stage).items() if tensor.is_meta]
    for path, module in stage.named_modules():
        if module is not stage:
            held = {key for key, value in vars(module).items() if _is_meta(value)}
            lost += [f"{path}.{key}" for key in sorted(held)]
    if lost:
        raise InvalidInput(
            f"{', '.join(lost)} is a tensor on the meta device that is neither parameter nor "
            "buffer, so nothing gives it values; register it as a buffer"
        )


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta
