"""Saved storages per layer, found by releasing everything but the layer's autograd graph."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...capture.program.program import storage_key
from ...core.profile.profile import SavedStorage
from ..machine.memory import allocated_bytes


class Storage(NamedTuple):
    """A storage without holding it: its identity lasts as long as the weak reference."""

    key: int
    size_bytes: int
    reference: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Describe a tensor's storage and the device memory it takes."""
        storage = tensor.untyped_storage()
        size_bytes = allocated_bytes(storage.nbytes(), tensor.device)
        return cls(storage_key(tensor), size_bytes, StorageWeakRef(storage))

    @property
    def is_alive(self) -> bool:
        return not self.reference.expired()


class StorageTable:
    """Collects, layer by layer, the storages autograd keeps until the backward.

    Storages are told apart by identity; weak references keep an identity from being used again
    while the memory itself goes. Parameters, buffers and the model's own inputs are not counted;
    they are there anyway.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        self._seen: dict[int, Storage] = {}
        self._aliases: dict[int, int] = {}
        self._layers: dict[int, set[int]] = {}
        resident = (*model.parameters(), *model.buffers(), *inputs)
        # Entries of `_seen` hold weak references, which keep an address from being reused for
        # another storage while its identity is still in the table.
        self._resident = {self._identify(Storage.of(tensor)) for tensor in resident}

    def same_storage(self, copy: Storage, original: Storage) -> None:
        """Count ``copy``, made only for measuring, as the storage it was copied from."""
        self._aliases[copy.key] = self._identify(original)
        self._seen[copy.key] = copy

    def keep(self, layer: int, storages: Iterable[Storage]) -> None:
        """Put storages down to ``layer``."""
        for storage in storages:
            key = self._identify(storage)
            if key not in self._resident:
                self._layers.setdefault(key, set()).add(layer)

    def counts(self, storage: Storage) -> bool:
        """Return whether a layer saves the storage, or it is resident anyway."""
        key = self._identify(storage)
        return key in self._resident or key in self._layers

    def bytes_of(self, layer: int) -> int:
        """Sum the distinct storages one layer saves."""
        return sum(
            self._seen[key].size_bytes for key, layers in self._layers.items() if layer in layers
        )

    def records(self, num_layers: int) -> tuple[SavedStorage, ...]:
        """Return the storage table without layers from ``num_layers`` on (the loss)."""
        table = []
        for key, found in self._layers.items():
            layers = tuple(sorted(layer for layer in found if layer < num_layers))
            if layers:
                table.append(SavedStorage(size_bytes=self._seen[key].size_bytes, layers=layers))
        return tuple(table)

    def _identify(self, storage: Storage) -> int:
        self._seen.setdefault(storage.key, storage)
        return self._aliases.get(storage.key, storage.key)


class GraphWatch:
    """Observer of what one layer's graph keeps alive, apart from what is alive for other reasons.

    Made when nothing but the graph is left of a run (its inputs and outputs may live on
    elsewhere); `kept` is asked when the graph is gone too. What is gone then, or has fewer users,
    was kept by the graph: however it was saved, by autograd, as an attribute of a custom
    function's context, or in the closure of a block to be computed again.
    """

    def __init__(self, outside: Iterable[Tensor], made: Mapping[int, Storage]) -> None:
        self._outside = {storage_key(tensor): tensor for tensor in outside}
        # Inputs and outputs outlive the graph, so "is it gone?" says nothing about them; but a
        # tensor the graph saved counts as one user of its storage until the graph is freed.
        self._users = {key: _users(tensor) for key, tensor in self._outside.items()}
        self._inside = [
            storage
            for key, storage in made.items()
            if key not in self._outside and storage.is_alive
        ]

    def kept(self) -> list[Storage]:
        """Return the storages the autograd graph saved."""
        if any(storage.is_alive for storage in self._inside):
            gc.collect()  # a cycle through the graph, or a module that remembers
        return [storage for storage in self._inside if not storage.is_alive] + [
            Storage.of(tensor)
            for key, tensor in self._outside.items()
            if _users(tensor) < self._users[key]
        ]


def _users(tensor: Tensor) -> int:
    # Private, but the only count that includes tensors held by C++ autograd nodes; Python's
    # reference counts see one wrapper per tensor at most.
    count: Any = torch._C._storage_Use_Count
    return int(count(storage_key(tensor)))
