"""Storage table of a model whose layers were measured one at a time.

A storage that crosses a boundary is told by the value that crosses it: a layer that keeps its input
keeps what the layer in front of it made. Which values share memory is known from running the graph
on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ...capture.program.program import storage_key, tensors_of, value_of
from ...capture.program.segment import get_constants
from ...core.profile.profile import SavedStorage
from ..layers.layer_run import LayerRun
from ..layers.saved_storages import Storage, StorageTable

Place = tuple[str, int, int]
"""Where a storage is met in a layer: ``read``, ``write`` or ``constant``, the position of the
value, and of the tensor in it; or ``inside``, numbered."""


@dataclass(frozen=True)
class Kept:
    """One storage that a layer keeps for its backward."""

    place: Place
    size_bytes: int


class LayerTable(StorageTable):
    """Storage table of one layer, which says where the layer meets what it saves."""

    def places(
        self,
        kept: Iterable[Storage],
        given: Sequence[Any],
        produced: Sequence[Any],
        constants: Iterable[Tensor],
    ) -> list[Kept]:
        """Locate the saved storages among a layer's values; parameters and buffers are left out."""
        # The first place counts: an output that is a view of an input is the input's storage, which
        # the layer in front made.
        known: dict[int, Place] = {}
        for what, values in (("read", given), ("write", produced), ("constant", list(constants))):
            for position, value in enumerate(values):
                for item, tensor in enumerate(tensors_of(value)):
                    known.setdefault(storage_key(tensor), (what, position, item))
        found: dict[Place, Kept] = {}
        for number, storage in enumerate(kept):
            key = self._identify(storage)
            if key not in self._resident:
                place = known.get(key, ("inside", number, 0))
                found.setdefault(place, Kept(place, storage.size_bytes))
        return list(found.values())


def storage_table(
    runs: Sequence[LayerRun], kept: Sequence[Sequence[Kept]], resident: frozenset[int]
) -> tuple[SavedStorage, ...]:
    """Build the storage table: each storage once, with all layers that save it."""
    sizes: dict[object, int] = {}
    layers: dict[object, list[int]] = {}
    for index, (run, entries) in enumerate(zip(runs, kept, strict=True)):
        for entry in entries:
            key = _identity(run, index, entry.place)
            # Parameters, buffers and the model's inputs exist with or without a backward.
            if key in resident:
                continue
            sizes.setdefault(key, entry.size_bytes)
            found = layers.setdefault(key, [])
            if index not in found:
                found.append(index)
    return tuple(
        SavedStorage(size_bytes=sizes[key], layers=tuple(found)) for key, found in layers.items()
    )


def kept_bytes(run: LayerRun, kept: Iterable[Kept], resident: frozenset[int]) -> int:
    """Sum the distinct storages one layer saves."""
    sizes = {_identity(run, 0, entry.place): entry.size_bytes for entry in kept}
    return sum(size for key, size in sizes.items() if key not in resident)


def _identity(run: LayerRun, index: int, place: Place) -> object:
    """Return a key that is equal for the same storage in every layer."""
    what, position, item = place
    if what == "read":
        return _storage(run.reads[position], item)
    if what == "write":
        node = run.writes[position]
        assert node is not None, "layers of a model write for others"
        return _storage(node, item)
    if what == "constant":
        assert run.segment is not None
        return id(list(get_constants(run.segment).values())[position])
    return index, position


def _storage(node: fx.Node, item: int) -> int:
    return storage_key(list(tensors_of(value_of(node)))[item])


def sharing(run: LayerRun) -> tuple[int, ...]:
    """Assign a number to the storage of each value of a layer; equal numbers share memory."""
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(storage_key(tensor), len(numbers))
        for node in (*run.reads, *run.writes)
        if node is not None
        for tensor in tensors_of(value_of(node))
    )
