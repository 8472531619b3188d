"""Peak memory: bytes in use while something runs, and their maximum."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.program.program import storage_key, tensors_of
from .saved_storages import Storage


class PeakMemory(TorchDispatchMode):
    """Dispatch mode that sums the bytes of tensors created inside, and the peak of that sum.

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
        # A view or an in-place result shares an argument's storage: nothing was allocated.
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
        """Return the most bytes alive at once since the start or the last `restart_peak`."""
        if self._device is None:
            return self._peak_bytes
        return torch.cuda.max_memory_allocated(self._device) - self._start_bytes

    def live(self) -> dict[int, Storage]:
        """Return the storages created inside that are still alive, by identity."""
        self._live = {key: storage for key, storage in self._live.items() if storage.is_alive}
        return self._live

    def live_bytes(self) -> int:
        """Return the bytes created inside that are still alive."""
        if self._device is None:
            return sum(storage.size_bytes for storage in self.live().values())
        return torch.cuda.memory_allocated(self._device) - self._start_bytes

    def restart_peak(self) -> int:
        """Forget the peak so far and return the bytes alive now."""
        self._peak_bytes = self.live_bytes()
        self._reset()
        return self._peak_bytes

    def _reset(self) -> int:
        if self._device is None:
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)
