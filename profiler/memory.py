"""What a layer keeps for its backward pass, and what it needs in passing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.program import storage_key, tensors_of
from ..core.profile import SavedStorage
from .storages import Storage


class SavedStorages:
    """Records which layers keep which storages while their forward runs.

    Storages are told apart by identity, so the tensors recorded are held until `records` has
    been read: a freed storage's identity would be used again. Parameters, buffers and the
    model's own inputs are not counted; they are there anyway.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        resident = (*model.parameters(), *model.buffers(), *inputs)
        self._resident = {storage_key(tensor) for tensor in resident}
        self._aliases: dict[int, int] = {}
        self._held: list[Tensor] = list(resident)
        self._sizes: dict[int, int] = {}
        self._layers: dict[int, set[int]] = {}

    def same_storage(self, copy: Tensor, original: Tensor) -> None:
        """Count ``copy``, made only for measuring, as the tensor it was copied from."""
        self._aliases[storage_key(copy)] = storage_key(original)
        self._held += [copy, original]

    def during(self, layer: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which everything autograd keeps is put down to ``layer``."""

        def pack(tensor: Tensor) -> Tensor:
            key = self._aliases.get(storage_key(tensor), storage_key(tensor))
            if key not in self._resident:
                self._held.append(tensor)
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self._layers.setdefault(key, set()).add(layer)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def bytes_of(self, layer: int) -> int:
        """Bytes of the distinct storages one layer keeps."""
        return sum(self._sizes[key] for key, layers in self._layers.items() if layer in layers)

    def records(self, num_layers: int) -> tuple[SavedStorage, ...]:
        """The storage table; layers from ``num_layers`` on (the loss) are left out."""
        table = []
        for key, found in self._layers.items():
            layers = tuple(sorted(layer for layer in found if layer < num_layers))
            if layers:
                table.append(SavedStorage(size_bytes=self._sizes[key], layers=layers))
        return tuple(table)


class PeakMemory(TorchDispatchMode):
    """Follows the bytes of every tensor created inside, and their highest sum.

    Counts what operators return, on any device, and remembers which storages those were. On CUDA
    the sums are the allocator's own, scratch memory inside kernels included; elsewhere that is
    not seen.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device if device is not None and device.type == "cuda" else None
        self._live: dict[int, Storage] = {}
        self._peak_bytes = 0
        self._start_bytes = self._reset()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(tensor) for tensor in tensors_of((*args, *(kwargs or {}).values()))}
        for tensor in tensors_of(result):
            key = storage_key(tensor)
            if key not in given:
                self._live[key] = Storage.of(tensor)
        if self._device is None:
            self._peak_bytes = max(self._peak_bytes, self.live_bytes())
        return result

    @property
    def peak_bytes(self) -> int:
        """The most alive at once since the beginning, or since `restart_peak`."""
        if self._device is None:
            return self._peak_bytes
        return torch.cuda.max_memory_allocated(self._device) - self._start_bytes

    def live(self) -> dict[int, Storage]:
        """Storages created inside and still alive, by identity."""
        self._live = {key: storage for key, storage in self._live.items() if storage.is_alive}
        return self._live

    def live_bytes(self) -> int:
        """Bytes created inside and still alive."""
        if self._device is None:
            return sum(storage.size_bytes for storage in self.live().values())
        return torch.cuda.memory_allocated(self._device) - self._start_bytes

    def restart_peak(self) -> int:
        """Forget the peak so far; returns the bytes alive now."""
        self._peak_bytes = self.live_bytes()
        self._reset()
        return self._peak_bytes

    def _reset(self) -> int:
        if self._device is None:
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)
