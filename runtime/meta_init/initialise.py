"""Initialise what a rank holds of a model, module by module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ...capture.program.program import storage_key
from ...core.errors import InvalidInput
from .seeded_init import SeededInitMode, preserve_generators
from .tensor_slots import ModelTensor
from .weights import Init

RESETS = ("reset_parameters", "_reset_parameters")
"""What torch's own modules call when they are built."""

SHOWN = 5
"""Names listed in an error."""


def initialise(
    model: nn.Module,
    wanted: Sequence[ModelTensor],
    slots: Iterable[ModelTensor],
    *,
    init: Init | None,
    seed: int,
    device: torch.device,
) -> None:
    """Give values to some of a model's tensors.

    Children come before their parents, as in ``nn.Module.apply``. A tied weight is initialised
    where the model holds it first; its other places are on the meta device meanwhile.

    Args:
        model: Where ``wanted`` have memory at their homes; changed in place.
        wanted: What has to have values afterwards.
        slots: All of the model's.
        init: See `Weights`.
        seed: See `Weights`.
        device: Where ``wanted`` are.

    Raises:
        InvalidInput: Something wanted was not set, or a module could not be initialised.
    """
    names = {storage_key(tensor): slot.name for slot in slots for tensor in _held(slot)}
    draws = SeededInitMode(seed, names)
    before = {slot.name: slot.home.get() for slot in wanted}
    needed = {ancestor for slot in wanted for ancestor in _ancestors(slot.home.path)}
    with preserve_generators(device), torch.no_grad(), device:
        for path, module in _children_first(model):
            if path in needed:
                draws.module = path
                _apply(init, module, path, draws)
    unset = [
        slot
        for slot in wanted
        if slot.name not in draws.written and slot.home.get() is before[slot.name]
    ]
    if unset:
        raise InvalidInput(_unset(unset, init))


def _apply(init: Init | None, module: nn.Module, path: str, draws: SeededInitMode) -> None:
    try:
        with draws:
            if init is not None:
                init(module)
            else:
                reset = next((getattr(module, n) for n in RESETS if hasattr(module, n)), None)
                if reset is not None:
                    reset()
    except (RuntimeError, NotImplementedError) as error:
        where = f"{path!r} ({type(module).__name__})" if path else f"the {type(module).__name__}"
        raise InvalidInput(
            f"initialising {where} failed: {error}. Of its parameters this rank holds only its "
            "own stage's, the others are on the meta device: initialise each from its shape, in "
            "the init= of Weights, or load a checkpoint"
        ) from error


def _held(slot: ModelTensor) -> Iterable[Tensor]:
    """A slot's tensors: the one with memory, and the one without at its other places."""
    yield slot.tensor
    yield slot.home.get()


def _children_first(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Modules in the order of ``nn.Module.apply``, each once, by its first path."""

    def visit(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)
        yield path, module

    first = {id(module): path for path, module in model.named_modules()}
    return ((path, module) for path, module in visit("", model) if first[id(module)] == path)


def _ancestors(path: str) -> Iterable[str]:
    """A module's path and those of all modules around it."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _unset(unset: Sequence[ModelTensor], init: Init | None) -> str:
    listed = ", ".join(
        f"{slot.kind} {slot.name} (of {type(slot.home.owner).__name__})" for slot in unset[:SHOWN]
    )
    more = f" and {len(unset) - SHOWN} more" if len(unset) > SHOWN else ""
    if init is None:
        why = "no reset_parameters sets it" if len(unset) == 1 else "no reset_parameters sets them"
        out = "pass Weights(init=function), which is called with each module and sets what it holds"
    else:
        why, out = "init= did not set it" if len(unset) == 1 else "init= did not set them", "set it"
    buffers = any(slot.kind == "buffer" for slot in unset)
    other = (
        "; a buffer may also be given its value on the model before the pipeline is made, on the "
        "CPU: it is used as it is"
        if buffers
        else "; or load a checkpoint that holds it"
    )
    return f"{listed}{more} would have no values: {why}; {out}{other}"
