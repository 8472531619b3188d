"""Memory run: one layer forwards and backwards, for what it saves and its workspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.program.program import storage_key, tensors_of
from ...core.units import format_bytes
from ..machine.memory import ON_CUDA
from .layer_run import LayerRun, Values, detached, mapped
from .precision import Context
from .saved_storages import GraphWatch, Storage, StorageTable


class PeakMemory(TorchDispatchMode):
    """Dispatch mode that sums the bytes of tensors created inside, and the peak of that sum.

    Counts what operators return, on any device, and remembers which storages those were. On CUDA
    the sums are the allocator's own, scratch memory inside kernels included; elsewhere that is
    not seen.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device if device is not None and device.type in ON_CUDA else None
        self._live: dict[int, Storage] = {}
        self._peak_bytes = 0
        self._start_bytes = self._reset()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view or an in-place result shares an argument's storage: nothing was allocated.
        given = {storage_key(tensor) for tensor in _memory((*args, *(kwargs or {}).values()))}
        for tensor in _memory(result):
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

    def notes(self) -> tuple[str, ...]:
        """Return the most that CUDA's allocator took and reserved, to hold what it took."""
        if self._device is None:
            return ()
        taken = format_bytes(torch.cuda.max_memory_allocated(self._device))
        reserved = format_bytes(torch.cuda.max_memory_reserved(self._device))
        return (f"the timed passes had {taken} allocated at most, and {reserved} reserved",)

    def _reset(self) -> int:
        if self._device is None:
            return 0
        # A cached block up to 1 MiB larger than asked for is handed out, and counted, whole.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


def _memory(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value that have memory: for a sparse one, its indices and values."""
    for tensor in tensors_of(value):
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        else:
            yield tensor


@dataclass(frozen=True)
class MemoryRun:
    """Values a layer produced and memory it needed.

    Attributes:
        produced: Its outputs, without their history.
        kept: Storages its graph keeps until the backward.
        forward_bytes: Most memory in use at once in the forward beyond what it was given,
            parameters and what it keeps: outputs that no backward reads, and scratch memory.
        backward_bytes: Most memory in use at once in the backward: gradients, including those of
            its outputs and inputs, and scratch memory, less the saved storages freed by then.
    """

    produced: list[Any]
    kept: list[Storage]
    forward_bytes: int
    backward_bytes: int


def memory_run(
    run: LayerRun,
    values: Values,
    table: StorageTable,
    device: torch.device,
    context: Context,
    *,
    warm_up: bool = True,
) -> MemoryRun:
    """Run a layer on the values it receives in the model; its gradients must exist already."""
    if warm_up and (device.type in ON_CUDA or _converts(device, context)):
        # What the first use of a kernel allocates is not the layer's: cuBLAS's workspaces, one for
        # each thread that issues work, which stay, and those that cuDNN tries algorithms with. Nor
        # are weights that autocast converts once a step.
        memory_run(run, values, table, device, context, warm_up=False)
    leaves = run.leaves(values)
    given, made = _given(run, leaves, table)
    peak = PeakMemory(device)
    with context(), peak:
        outputs = run.function(*given)
    highest = peak.peak_bytes
    # From here on only `root` leads to the graph: outputs are detached, arguments dropped. What
    # then dies together with the graph is what the graph saved (see `GraphWatch`).
    root = _root(outputs)
    produced = [detached(value) for value in outputs]
    del given, outputs
    made_inside = dict(peak.live())
    watch = GraphWatch([*tensors_of(leaves), *tensors_of(produced)], made | made_inside)
    before = peak.restart_peak()
    if root is not None:
        with peak:
            root.backward()
    backward = peak.peak_bytes - before
    del root  # the last reference to the graph
    kept = watch.kept()
    # What the graph keeps is charged to the activations, not to the forward's workspace.
    forward = highest - sum(storage.size_bytes for storage in kept if storage.key in made_inside)
    return MemoryRun(produced, kept, max(forward, 0), backward)


def _converts(device: torch.device, context: Context) -> bool:
    """Return True if forwards run under autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return False
    with context():
        return torch.is_autocast_enabled(device.type)


def _given(
    run: LayerRun, leaves: Sequence[Any], table: StorageTable
) -> tuple[list[Any], dict[int, Storage]]:
    """Return the call's arguments and the copies among them.

    A leaf lives as long as the graph that leads to it, so views of the leaves are handed in: they
    stay only if they are kept.
    """
    arguments = run.arguments(leaves)
    copies: dict[int, Storage] = {}
    for copy, leaf in zip(tensors_of(arguments), tensors_of(leaves), strict=True):
        if copy is not leaf:
            storage = Storage.of(copy)
            copies[storage.key] = storage
            table.same_storage(storage, Storage.of(leaf))
    return [mapped(lambda tensor: tensor.view_as(tensor), value) for value in arguments], copies


def _root(outputs: Sequence[Any]) -> Tensor | None:
    """Return a tensor to start the backward from that does not keep the outputs alive."""
    roots = [value for value in tensors_of(list(outputs)) if value.requires_grad]
    if not roots:
        return None
    root: Tensor = _Ones.apply(*roots)  # type: ignore[no-untyped-call]
    return root


class _Ones(torch.autograd.Function):
    """Autograd function that gives each input a gradient of ones, made in the backward."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        # On the meta device: shape, dtype and strides are kept, the memory is not.
        ctx.shapes = [(torch.empty_like(value, device="meta"), value.device) for value in values]
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.ones_like(shape, device=device) for shape, device in ctx.shapes)
