"""Data parallelism in one process: a replica of a module on each of several devices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.observation.nested_values import list_tensors, map_tensors, replace_tensors
from ..core.errors import InvalidInput
from .local.streams import StageDevice, full_device
from .local.thread_modes import ThreadModes
from .replicas.gradient_hooks import GradientHooks
from .replicas.gradient_sync import BUCKET_BYTES, split_by_size

LossFunction = Callable[[Any, Any], Tensor]


class DataParallel:
    """Replicas of a module that train on shares of each batch, in a thread each.

    ::

        parallel = DataParallel(model, ["cuda:0", "cuda:1"], loss_fn=loss_fn, speeds=[2, 1])
        optimizer = torch.optim.AdamW(model.parameters())
        for batch, target in data:
            loss = parallel.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad()

    Replicas are copies of the module as it is at each step; those on its device share the memory of
    its weights. Losses are computed where outputs are, and gradients are summed in buckets into
    those of the module. They equal the unsplit model's, unless samples depend on each other: batch
    normalisation sees a share at a time, and buffers follow the first replica. Two replicas on one
    device draw random numbers from one generator, in no fixed order.

    Args:
        module: The model, on the first device; it is the first replica, and the one to optimize.
        devices: One for each replica; a device may be named several times.
        loss_fn: ``loss_fn(output, target)``, a mean over samples.
        speeds: Relative speeds of the devices, which shares of a batch follow; equal if `None`.

    Raises:
        InvalidInput: The devices or speeds are invalid, or the module is elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str],
        *,
        loss_fn: LossFunction,
        speeds: Sequence[float] | None = None,
    ) -> None:
        if not devices:
            raise InvalidInput("devices is empty; name a device for each replica")
        self.module, self.devices = module, [full_device(device) for device in devices]
        self.speeds = [1.0] * len(devices) if speeds is None else [float(each) for each in speeds]
        if len(self.speeds) != len(devices):
            raise InvalidInput(
                f"{len(self.speeds)} speeds for {len(devices)} devices; give each one"
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise InvalidInput(f"speeds are {self.speeds}; give positive numbers")
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != self.devices[0]:
                raise InvalidInput(
                    f"{name} is on {tensor.device}, but the first device is {self.devices[0]}; "
                    "move the module there"
                )
        self._loss_fn, self._weights = loss_fn, list(module.parameters())
        self._replicas = [module] * len(devices)
        self._hooks = GradientHooks(dict(module.named_parameters()), keeps=True)

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch, adding its gradients to those of the module.

        Tensors in the arguments and the target, however nested, are divided along their first
        dimension; other values are passed to every replica.

        Returns:
            The mean loss of the batch, on the first device.

        Raises:
            InvalidInput: The batch cannot be divided, a gradient is sparse, or the module got other
                parameters.
        """
        shares = self._divide((args, kwargs, target))

        def train(index: int) -> tuple[Tensor, list[Tensor]]:
            replica = self._replicas[index]
            own_args, own_kwargs, own_target = self._take((args, kwargs, target), shares, index)
            loss = self._loss_fn(replica(*own_args, **own_kwargs), own_target)
            loss = loss * (shares[index] / sum(shares))
            loss.backward()
            buckets = [] if index == 0 else self._collect(replica)
            return loss.detach().to(self.devices[0]), buckets

        self._hooks.begin(sums=True)
        try:
            losses, buckets = zip(*self._run(train), strict=True)
            with torch.no_grad():
                for replica, own in zip(self._replicas, buckets, strict=True):
                    self._add(replica, own)
            self._hooks.finish()
        except BaseException:  # half a sum would be taken for a gradient
            self._hooks.restore()
            raise
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for a batch, joined along the first dimension on the first device.

        Raises:
            InvalidInput: The batch cannot be divided, or a tensor of the output has no sample for
                each of the input.
        """
        shares = self._divide((args, kwargs))

        def infer(index: int) -> Any:
            own_args, own_kwargs = self._take((args, kwargs), shares, index)
            return self._replicas[index](*own_args, **own_kwargs)

        outputs = self._run(infer)
        columns = list(zip(*map(list_tensors, outputs), strict=True))
        for position, column in enumerate(columns):
            if any(t.dim() == 0 or len(t) != n for t, n in zip(column, shares, strict=True)):
                raise InvalidInput(
                    f"tensor {position} of the output has shape {tuple(column[0].shape)} for "
                    f"{shares[0]} samples; return one with the batch as its first dimension"
                )
        joined = [torch.cat([t.to(self.devices[0]) for t in column]) for column in columns]
        return replace_tensors(outputs[0], joined)

    @torch.no_grad()
    def _replicate(self, index: int) -> nn.Module:
        """Return a copy of the module as it is now, sharing its weights' memory if it can."""
        device = self.devices[index]
        made: dict[int, Any] = {}
        for tensor in (*self._weights, *self.module.buffers()):
            is_weight = isinstance(tensor, nn.Parameter)
            shares = is_weight and shares_memory(device, self.devices[0])
            own = tensor.detach().to(device, non_blocking=True, copy=not shares)
            made[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if is_weight else own
        return copy.deepcopy(self.module, made)

    def _divide(self, values: Any) -> list[int]:
        """Return how many samples each replica takes."""
        lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in list_tensors(values)]
        if len(set(lengths)) != 1:
            raise InvalidInput(
                "tensors of the arguments and target are divided along their first dimension, "
                f"which must be equal and not missing: {lengths}; make what is no batch a buffer "
                "of the module"
            )
        shares = divide_samples(lengths[0], self.speeds)
        if 0 in shares:
            idle = shares.index(0)
            raise InvalidInput(
                f"a batch of {lengths[0]} samples leaves none for device {idle} "
                f"({self.devices[idle]}) at speeds {self.speeds}; pass a larger batch, or name "
                "fewer devices"
            )
        found = list(self.module.parameters())
        if len(found) != len(self._weights) or any(map(is_not, found, self._weights)):
            raise InvalidInput("the module got other parameters; make a new DataParallel")
        return shares

    def _take(self, values: Any, shares: Sequence[int], index: int) -> Any:
        first, device = sum(shares[:index]), self.devices[index]
        return map_tensors(
            lambda tensor: tensor[first : first + shares[index]].to(device, non_blocking=True),
            values,
        )

    def _run(self, task: Callable[[int], Any]) -> list[Any]:
        """Run a task for each replica in a thread of its own; raise an error once all ended."""
        modes = ThreadModes.current()
        for index in range(1, len(self._replicas)):
            self._replicas[index] = self._replicate(index)
        places = [
            StageDevice(
                device, torch.cuda.current_stream(device) if device.type == "cuda" else None
            )
            for device in self.devices
        ]

        def run(index: int) -> Any:
            with modes.activate(), places[index].activate():
                return task(index)

        # Leaving the block waits for all threads, also when one of them failed.
        with ThreadPoolExecutor(len(self.devices), "replica") as threads:
            started = [threads.submit(run, index) for index in range(len(self.devices))]
        return [future.result() for future in started]

    def _collect(self, replica: nn.Module) -> list[Tensor]:
        """Return a replica's gradients on the first device, in buckets; called in its thread."""
        return [
            torch.cat([_gradient(weight).reshape(-1) for weight in bucket]).to(self.devices[0])
            for bucket in _in_buckets(replica)
        ]

    def _add(self, replica: nn.Module, buckets: Sequence[Tensor]) -> None:
        """Add a replica's buckets to the gradients of the module."""
        if replica is self.module:
            return
        weight_of = dict(zip(replica.parameters(), self._weights, strict=True))
        for bucket, flat in zip(_in_buckets(replica), buckets, strict=True):
            parts = flat.split([own.numel() for own in bucket])
            for own, part in zip(bucket, parts, strict=True):
                weight = weight_of[own]
                part = part.view_as(weight)
                weight.grad = part.clone() if weight.grad is None else weight.grad.add_(part)


def divide_samples(samples: int, speeds: Sequence[float]) -> list[int]:
    """Return shares in proportion to speeds, by largest remainders: they sum up to the samples."""
    exact = [samples * speed / math.fsum(speeds) for speed in speeds]
    shares = [math.floor(each) for each in exact]
    order = sorted(range(len(speeds)), key=lambda index: shares[index] - exact[index])
    for index in order[: samples - sum(shares)]:
        shares[index] += 1
    return shares


def shares_memory(device: torch.device, other: torch.device) -> bool:
    """Return True if replicas on these devices use the same weights."""
    return device == other


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.is_sparse:
        raise InvalidInput(
            f"the gradient of a weight of shape {tuple(weight.shape)} is sparse, and buckets are "
            "dense; build its embedding with sparse=False"
        )
    return weight.grad


def _in_buckets(replica: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters that have gradients, by type and of limited size together."""
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for weight in replica.parameters():
        if weight.grad is not None:
            kinds.setdefault(weight.grad.dtype, []).append(weight)
    return [
        bucket
        for same in kinds.values()
        for bucket in split_by_size(same, lambda weight: weight.nbytes, BUCKET_BYTES)
    ]
