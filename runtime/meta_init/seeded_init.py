"""Random numbers of initialisation that depend on a parameter's name, not on who else is here."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.program.program import storage_key
from ..random_state import RandomState


class SeededInitMode(TorchDispatchMode):
    """Inside, what is drawn into a tensor follows the seed, the tensor's name and the kind of draw.

    A rank initialises its own part of a module; the rest of it is on the meta device, where
    nothing is drawn. With one course of random numbers a parameter's values would depend on which
    others are here, so the generator is seeded before every draw: by the name of the tensor drawn
    into and how often that was before, or, for a tensor that the model does not hold (which is
    copied into a parameter afterwards), by the module that is being initialised.

    Args:
        seed: Of the whole initialisation.
        names: The names of the model's tensors, real ones and others, by `storage_key`.

    Attributes:
        written: Names of the tensors that anything was written to.
        module: Path of the module that is being initialised.
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
        # What is drawn into a weight that is elsewhere must not be counted: only some ranks do it.
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
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Put the random generators back afterwards."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore(device)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors an operation says it writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                yield each
