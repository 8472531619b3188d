"""Random initialisation of a rank's part of a model, seeded by names and not by ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.program.program import storage_key
from ...core.errors import InvalidInput
from ...core.units import list_some
from ..random_state import preserve_random_state
from .tensor_slots import ModelTensor
from .weights import Init

RESETS = ("reset_parameters", "_reset_parameters")
"""The initialisers that torch's own modules call in their constructors."""

SHOWN = 5
"""The number of names that an error lists."""


def initialise(
    model: nn.Module,
    wanted: Sequence[ModelTensor],
    tensors: Iterable[ModelTensor],
    *,
    init: Init | None,
    seed: int,
    device: torch.device,
) -> None:
    """Initialise some of a model's tensors.

    Children come before their parents, as in ``nn.Module.apply``. A tied weight is initialised at
    its first slot; its other slots are on the meta device meanwhile.

    ``wanted`` have memory at their first slots, on the device; ``tensors`` are all of the model.
    For ``init`` and ``seed`` see `Weights`.
    """
    # By storage: views that an initialiser takes of a weight count as the weight.
    names = {
        storage_key(held): each.name for each in tensors for held in (each.tensor, each.home.get())
    }
    mode = SeededInitMode(seed, names)
    before = {each.name: each.home.get() for each in wanted}
    # Only modules that hold something here, or contain one that does: others would be initialised
    # on the meta device for nothing.
    needed = {ancestor for each in wanted for ancestor in _ancestors(each.home.path)}
    with preserve_random_state(device), torch.no_grad(), device:
        for path, module in _children_first(model):
            if path in needed:
                mode.module = path
                _initialise_module(init, module, path, mode)
    unset = [
        each
        for each in wanted
        if each.name not in mode.written and each.home.get() is before[each.name]
    ]
    if unset:
        raise InvalidInput(_describe_unset(unset, init))


def _initialise_module(
    init: Init | None, module: nn.Module, path: str, mode: SeededInitMode
) -> None:
    try:
        with mode:
            if init is not None:
                init(module)
            else:
                reset = next((getattr(module, n) for n in RESETS if hasattr(module, n)), None)
                if reset is not None:
                    reset()
    except (RuntimeError, NotImplementedError) as error:
        where = f"{path!r} ({type(module).__name__})" if path else f"the {type(module).__name__}"
        raise InvalidInput(
            f"initialising {where} failed: {error}. This rank holds only the parameters of its "
            "own stages, the others are on the meta device: initialise each from its shape in "
            "init= of Weights, or load a checkpoint"
        ) from error


def _children_first(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield modules in the order of ``nn.Module.apply``, each once, with its first path."""

    def visit(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)
        yield path, module

    first = {id(module): path for path, module in model.named_modules()}
    return ((path, module) for path, module in visit("", model) if first[id(module)] == path)


def _ancestors(path: str) -> Iterable[str]:
    """Yield a module's path and those of the modules that contain it."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _describe_unset(unset: Sequence[ModelTensor], init: Init | None) -> str:
    listed = list_some(
        [f"{each.kind} {each.name} (of {type(each.home.owner).__name__})" for each in unset], SHOWN
    )
    if init is None:
        why = "no reset_parameters sets it" if len(unset) == 1 else "no reset_parameters sets them"
        out = "pass Weights(init=function); it is called with each module and sets its tensors"
    else:
        why, out = "init= did not set it" if len(unset) == 1 else "init= did not set them", "set it"
    buffers = any(each.kind == "buffer" for each in unset)
    other = (
        "; or give a buffer its value on the CPU before building the pipeline, which then uses it "
        "as it is"
        if buffers
        else "; or load a checkpoint that holds it"
    )
    return f"{listed} would have no values: {why}; {out}{other}"


class SeededInitMode(TorchDispatchMode):
    """Dispatch mode that seeds the generator before every random operation inside.

    A rank initialises its part of a module, with the rest on the meta device, where nothing is
    drawn. From a single stream of random numbers a parameter's values would depend on which others
    are here. So the generator is seeded by the name of the tensor drawn into and the number of
    draws into it before. For a temporary, which is copied into a parameter afterwards, the name is
    that of the module being initialised.

    ``names`` are those of the model's tensors, with memory and on meta, by `storage_key`.

    Attributes:
        written: Names of the tensors written to so far.
        module: Path of the module being initialised.
    """

    def __init__(self, seed: int, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[str] = set()
        self.module = ""
        self._seed, self._names = seed, names
        self._draws: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = list(_written(func, args, kwargs))
        known = [self._names[key] for key in map(storage_key, targets) if key in self._names]
        real = [tensor for tensor in targets if not tensor.is_meta]
        own_generator = any(isinstance(value, torch.Generator) for value in kwargs.values())
        # Draws into a weight that is on meta are neither seeded nor counted: on the rank that holds
        # the weight they are, and the counts of other names must not differ between ranks.
        if torch.Tag.nondeterministic_seeded in func.tags and not own_generator:
            if not known:
                self._seed_for(f"made in {self.module}")
            elif real:
                self._seed_for(f"into {known[0]}")
        if real:
            self.written.update(known)
        return func(*args, **kwargs)

    def _seed_for(self, key: str) -> None:
        text = f"{self._seed}/{key}/{self._draws[key]}"
        self._draws[key] += 1
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)  # fits a signed 64-bit integer


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, according to its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                yield each
