"""Time and memory of each layer of a sequential module, measured on copies."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import InvalidInput
from ...profiler.machine.memory import allocated_bytes
from ..skip.tracker import SkipTracker, use_skip_tracker

Values = tuple[Any, ...]


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Yield a copy of each layer on a device, in training mode."""
    for layer in module:
        # Copied one by one, so that the device need not hold the whole module.
        yield copy.deepcopy(layer).to(device).train()


def profile_times(
    module: nn.Sequential, sample: Any, timeout: float, device: torch.device
) -> list[float]:
    """Measure each layer's forward and backward in seconds; return the median of the rounds."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise InvalidInput("some parameter already has gradient; call zero_grad() first")
    rounds: list[list[float]] = []
    begun = time.monotonic()
    while not rounds or time.monotonic() - begun < timeout:
        rounds.append(_time_round(module, sample, device))
    if len(rounds) > 1:
        rounds = rounds[1:]  # the first pays for what is made once
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _time_round(module: nn.Sequential, sample: Any, device: torch.device) -> list[float]:
    times = []
    value, tracker = _moved(sample, device), SkipTracker()
    for layer in layerwise_sandbox(module, device):
        value = _detached(value, tracker)
        given = set(tracker.tensors)
        # GPU work is only queued; unsynchronized, the clock would measure the queueing.
        _synchronize(device)
        begun = time.perf_counter()
        with use_skip_tracker(tracker):
            value = layer(value)
        # The layers that pop them are not run together with this one, but their gradients arrive
        # here.
        stashed = [tensor for name, tensor in tracker.tensors.items() if name not in given]
        roots = [v for v in (*_tuple(value), *stashed) if v is not None and v.requires_grad]
        if roots:
            # The values serve as their own gradients, since only the time matters.
            torch.autograd.backward(roots, roots)
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    return times


def profile_sizes(
    module: nn.Sequential, input: Any, chunks: int, param_scale: float, device: torch.device
) -> list[float]:
    """Bytes of each layer: what its forward leaves behind, and copies of its parameters.

    The forward is of one sample; what it leaves is multiplied by the samples of a micro-batch.
    """
    samples = _tuple(input)[0].size(0) / chunks
    value, tracker = _moved(_first_sample(input), device), SkipTracker()
    sizes = []
    for layer in layerwise_sandbox(module, device):
        value = _detached(value, tracker)
        with _LeftBehind() as left, use_skip_tracker(tracker):
            value = layer(value)
        parameters = sum(p.nbytes for p in layer.parameters())
        sizes.append(left.size_bytes() * samples + parameters * param_scale)
    return sizes


class _LeftBehind(TorchDispatchMode):
    """Counter of the memory that operations made and that is still held afterwards.

    By autograd or by anything else; on a GPU in the blocks its allocator hands out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            # Views and in-place results use an input's storage and take no memory. The weak
            # reference lets the data go, but keeps its key from being used for another storage.
            if storage._cdata not in given:
                size_bytes = allocated_bytes(storage.nbytes(), tensor.device)
                self._made[storage._cdata] = StorageWeakRef(storage), size_bytes
        return result

    def size_bytes(self) -> int:
        """Bytes still held."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _tuple(value: Any) -> Values:
    return value if isinstance(value, tuple) else (value,)


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _moved(value: Any, device: torch.device) -> Any:
    return _each(lambda v: v.detach().to(device).requires_grad_(v.requires_grad), value)


def _detached(value: Any, tracker: SkipTracker) -> Any:
    """Detach a value and the stashed skip tensors from the layers that made them."""
    for name, tensor in tracker.tensors.items():
        if tensor is not None:
            tracker.tensors[name] = _fresh(tensor)
    return _each(_fresh, value)


def _fresh(tensor: Tensor) -> Tensor:
    """Return a non-leaf copy, which a layer may change in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _first_sample(value: Any) -> Any:
    return _each(lambda v: v[:1].detach().requires_grad_(v.requires_grad), value)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
