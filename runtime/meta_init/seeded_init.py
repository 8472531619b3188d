"""Seeded initialisation: random numbers that depend on a parameter's name, not on its rank."""

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


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators afterwards."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore(device)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, according to its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                yield each
