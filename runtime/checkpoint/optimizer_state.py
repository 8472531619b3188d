"""Optimizer state by parameter name: reading it, merging ranks, and loading it.

Groups are not kept: hyperparameters are stored per parameter, so that the ranks of another plan
find those of their own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ...core.units import name_type
from ..checkpoint_files.divided_tensor import DividedTensor
from ..checkpoint_files.manifest import SavedOptimizer, SavedState, slot_key
from ..checkpoint_files.tensors import adapt_value, describe, to_json_value, torch_dtype
from ..replicas.shared_optimizer import get_foreign_weights

DEVICE_OPTIONS = frozenset(
    ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
)
"""Options of a group that select an implementation; they are kept from the current optimizer."""

Hyperparameters = dict[str, JsonValue]

InWhole = Callable[[Tensor, Tensor], Tensor]
"""Returns a state laid out like a parameter as it is saved; see `CheckpointTarget.in_whole`."""


def read_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], in_whole: InWhole
) -> tuple[SavedOptimizer, dict[str, Tensor]]:
    """Return an optimizer's state by parameter name, and its tensors by key, which are no copies.

    ``names`` gives the canonical name of each of the model's tensors by ``id``.

    Raises:
        InvalidInput: The optimizer keeps a state of another shape for a divided parameter.
    """
    groups: list[Hyperparameters] = []
    parameters: dict[str, SavedState] = {}
    tensors: dict[str, Tensor] = {}
    foreign = get_foreign_weights(optimizer)
    for group, parameter, name in _parameters(optimizer, names):
        if id(parameter) in foreign:
            continue
        hyperparameters = _hyperparameters(group)
        if hyperparameters not in groups:
            groups.append(hyperparameters)
        slots, values = _slots(name, optimizer.state.get(parameter, {}))
        slots = {
            slot: _in_whole(f"{slot} of {name}", tensor, parameter, in_whole)
            for slot, tensor in slots.items()
        }
        tensors |= {slot_key(name, slot): tensor for slot, tensor in slots.items()}
        parameters[name] = SavedState(
            group=groups.index(hyperparameters),
            slots={slot: describe(f"{slot} of {name}", t) for slot, t in slots.items()},
            values=values,
        )
    _refuse_shared_state(optimizer, names)
    kind = type(optimizer).__name__
    return SavedOptimizer(kind=kind, groups=tuple(groups), parameters=parameters), tensors


def merge_optimizers(parts: list[SavedOptimizer]) -> SavedOptimizer:
    """Merge the optimizers of all ranks, which must agree about parameters that several hold."""
    groups: list[Hyperparameters] = []
    parameters: dict[str, SavedState] = {}
    kinds = sorted({part.kind for part in parts})
    if len(kinds) > 1:
        raise InvalidInput(f"ranks use different optimizers: {', '.join(kinds)}; use one")
    for part in parts:
        for hyperparameters in part.groups:
            if hyperparameters not in groups:
                groups.append(hyperparameters)
        places = [groups.index(hyperparameters) for hyperparameters in part.groups]
        for name, state in part.parameters.items():
            moved = state.model_copy(update={"group": places[state.group]})
            other = parameters.setdefault(name, moved)
            if other != moved:
                raise InvalidInput(
                    f"ranks that hold {name} keep different state for it: "
                    f"{_describe_state(other, groups)} and {_describe_state(moved, groups)}; use "
                    "equal hyperparameters and steps for every copy"
                )
    return SavedOptimizer(kind=kinds[0], groups=tuple(groups), parameters=parameters)


def check_optimizer(
    optimizer: Optimizer, saved: SavedOptimizer, saved_names: Mapping[int, str]
) -> None:
    """Check that an optimizer can hold the saved state, before anything is changed.

    ``saved_names`` gives each parameter's saved name by ``id``, for those that were saved.
    """
    kind = type(optimizer).__name__
    if kind != saved.kind:
        raise InvalidInput(
            f"the checkpoint is of {saved.kind}, the optimizer is {kind}; use {saved.kind}, or "
            "load without the optimizer"
        )
    for index, group in enumerate(optimizer.param_groups):
        _group_hyperparameters(index, group, saved, saved_names)


def allocate_state(
    optimizer: Optimizer,
    saved: SavedOptimizer,
    saved_names: Mapping[int, str],
    in_whole: InWhole,
) -> dict[str, Tensor]:
    """Allocate tensors for the saved state, by key, on the devices the optimizer expects."""
    room: dict[str, Tensor] = {}
    foreign = get_foreign_weights(optimizer)
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = saved_names.get(id(parameter), "")
            if name not in saved.parameters or id(parameter) in foreign:
                continue
            for slot, tensor in saved.parameters[name].slots.items():
                dtype = torch_dtype(tensor)
                # A moment, laid out like its parameter, as the optimizer itself would create it.
                whole = tuple(in_whole(parameter, parameter).shape)
                if tensor.shape == whole and parameter.dim() > 0:
                    empty = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    empty = in_whole(empty, parameter)
                else:  # step counters stay on the CPU unless a kernel reads them
                    device = parameter.device if tensor.shape or on_device else "cpu"
                    empty = torch.empty(tensor.shape, dtype=dtype, device=device)
                room[slot_key(name, slot)] = empty
    return room


def fill_optimizer(
    optimizer: Optimizer,
    saved: SavedOptimizer,
    saved_names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
) -> None:
    """Load saved state and hyperparameters through the optimizer's ``load_state_dict``.

    Parameters that had no state when saved have none afterwards; parameters that were not saved
    keep their state.
    """
    state: dict[int, Any] = {}
    foreign = get_foreign_weights(optimizer)
    groups, position = [], 0
    for index, group in enumerate(optimizer.param_groups):
        values = {
            key: adapt_value(group.get(key), value)
            for key, value in _group_hyperparameters(index, group, saved, saved_names).items()
        }
        # `load_state_dict` pairs parameters by position over all groups, not by name.
        indices = range(position, position + len(group["params"]))
        position = indices.stop
        for number, parameter in zip(indices, group["params"], strict=True):
            name = saved_names.get(id(parameter), "")
            if id(parameter) in foreign:
                state[number] = {}
            elif name in saved.parameters:
                kept = saved.parameters[name]
                state[number] = dict(kept.values) | {
                    slot: _own_part(tensors[slot_key(name, slot)]) for slot in kept.slots
                }
            else:
                state[number] = optimizer.state.get(parameter, {})
        # Saved hyperparameters win; those in DEVICE_OPTIONS were never saved and stay.
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append(own | values | {"params": list(indices)})
    loaded = {number: values for number, values in state.items() if values}
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        for key, value in wanted.items():
            # load_state_dict replaces tensors by copies, but a CUDA graph reads the originals.
            if isinstance(value, Tensor):
                group[key] = value


def _in_whole(what: str, state: Tensor, parameter: Tensor, in_whole: InWhole) -> Tensor:
    """Return a state as it is saved."""
    if state.dim() == 0 or in_whole(parameter, parameter) is parameter:
        return state
    if state.shape != parameter.shape:
        raise InvalidInput(
            f"cannot save {what}: it has shape {list(state.shape)} for a part of the parameter of "
            f"shape {list(parameter.shape)}, and the ranks that hold the other parts have others; "
            "use an optimizer whose state has the shape of the parameters, such as AdamW"
        )
    return in_whole(state, parameter)


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, DividedTensor) else tensor


def _parameters(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise InvalidInput(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have; create it from the parameters of the saved model"
                )
            yield group, parameter, name


def _hyperparameters(group: Mapping[str, Any]) -> Hyperparameters:
    return {
        key: to_json_value(f"{key} of the optimizer", value)
        for key, value in group.items()
        if key not in DEVICE_OPTIONS
    }


def _slots(name: str, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Hyperparameters]:
    """Split a parameter's state into tensors and plain values."""
    tensors: dict[str, Tensor] = {}
    values: Hyperparameters = {}
    for slot, value in state.items():
        if isinstance(value, Tensor):
            tensors[slot] = value
        elif value is None or isinstance(value, bool | int | float):
            values[slot] = value
        else:
            raise InvalidInput(
                f"the optimizer keeps {slot!r} of {name} as {name_type(value)}; only "
                "tensors, numbers and None of single parameters can be saved under one plan and "
                "loaded under another"
            )
    return tensors, values


def _refuse_shared_state(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    for owner in optimizer.state:
        if not isinstance(owner, Tensor) or id(owner) not in names:
            raise InvalidInput(
                f"{type(optimizer).__name__} keeps state that belongs to no parameter "
                f"({owner if isinstance(owner, str) else type(owner).__name__}); it cannot be saved"
            )


def _group_hyperparameters(
    index: int,
    group: Mapping[str, Any],
    saved: SavedOptimizer,
    saved_names: Mapping[int, str],
) -> Hyperparameters:
    """Return the saved hyperparameters of a group; raise `InvalidInput` if they differ."""
    first: tuple[str, Hyperparameters] | None = None
    for parameter in group["params"]:
        name = saved_names.get(id(parameter), "")
        if name not in saved.parameters:
            continue
        found = saved.groups[saved.parameters[name].group]
        if first is None:
            first = name, found
        for key in first[1].keys() | found.keys():
            ours, theirs = first[1].get(key), found.get(key)
            if ours != theirs:
                raise InvalidInput(
                    f"group {index} of the optimizer combines parameters that were saved with "
                    f"different {key}: {ours} for {first[0]}, {theirs} for {name}; use the "
                    "groups of the saved optimizer"
                )
    return first[1] if first else {}


def _describe_state(state: SavedState, groups: list[Hyperparameters]) -> str:
    slots = ", ".join(f"{slot} {list(t.shape)}" for slot, t in state.slots.items()) or "no state"
    return f"{slots} with {groups[state.group]}"
