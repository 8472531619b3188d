"""``GPipe``: torchgpipe's pipeline for sequential modules, on this library's runtime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ..core.errors import InvalidInput
from ..runtime.local.run import LocalStage, run_stages
from ..runtime.local.streams import CopyStreams, StageDevice
from .batchnorm import DeferredBatchNorm, whole_batches
from .microbatch import TensorOrTensors, check, gather, scatter
from .partition import Form, PartitionRun
from .skip.skippable import skip_routes, verify_skippables

Device = torch.device | int | str
CHECKPOINT_MODES = ("always", "except_last", "never")


class BalanceError(InvalidInput):
    """Balance that does not fit the module."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}. To compute an optimal balance, use stagewright.torchgpipe.balance: "
            "balance = balance_by_time(torch.cuda.device_count(), module, sample)"
        )


class GPipe(nn.Module):
    """Pipeline parallelism with checkpointing for an ``nn.Sequential``, as in torchgpipe.

    ::

        model = nn.Sequential(a, b, c, d)
        model = GPipe(model, balance=[1, 1, 1, 1], chunks=8)
        output = model(input)

    The module is used, not copied: each partition moves to its device. Inputs and outputs of the
    module and of every partition are tensors or tuples of tensors.

    Args:
        module: The layers.
        balance: Number of layers in each partition; see `stagewright.torchgpipe.balance`.
        devices: Device of each partition; all CUDA devices if `None`. Surplus ones are ignored.
        chunks: Micro-batches per batch.
        checkpoint: Micro-batches to recompute in backward instead of keeping activations:
            ``always`` (all), ``except_last`` or ``never``. Only in training mode.
        deferred_batch_norm: Update running statistics once per batch, by converting batch
            normalisation to `DeferredBatchNorm`.

    Attributes:
        balance: Number of layers in each partition.
        devices: The device of each partition; outputs are on the last one.
        chunks: Micro-batches per batch.
        checkpoint: See the argument.
        partitions: The partitions, each an ``nn.Sequential``.

    Raises:
        TypeError: The module is not an ``nn.Sequential``, or stashed and popped skip tensors do
            not match.
        ValueError: An argument is invalid, or the module has a duplicate child or parameter.
        IndexError: There are fewer devices than partitions.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if balance is None:
            raise BalanceError("balance is required")
        self.chunks = _checked_chunks(chunks)
        self.checkpoint = _checked_mode(checkpoint)
        _check_module(module)
        verify_skippables(module)
        self.balance = list(balance)
        _check_balance(self.balance, len(module))
        self.devices = _devices(devices, len(self.balance))
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self.partitions = nn.ModuleList(_partitions(module, self.balance))
        for part, device in zip(self.partitions, self.devices, strict=True):
            part.to(device)
        self._routes = skip_routes(list(self.partitions))
        self._streams = CopyStreams()

    def __len__(self) -> int:
        """Return the number of layers in all partitions."""
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its index over all partitions."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers of all partitions."""
        for part in self.partitions:
            assert isinstance(part, nn.Sequential)
            yield from part

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Run a batch in micro-batches.

        Args:
            input: A tensor or a tuple of tensors, the batch first.

        Returns:
            The outputs of the last partition, concatenated along the first dimension.

        Raises:
            TypeError: The input or a partition's output is not a tensor or a tuple of tensors.
            Exception: The error of a layer.
        """
        check(input)
        if not self.partitions:
            return input
        batches = scatter(input, self.chunks)
        form = Form(isinstance(input, Tensor))
        stages = []
        for index, device in enumerate(self._streams.stage_devices(self.devices)):
            stage, form = self._stage(index, device, form, len(batches))
            stages.append(stage)
        with whole_batches(self.partitions):
            outputs = run_stages(stages, batches)
        return gather(outputs, form.is_atomic(0))

    def _stage(
        self, index: int, device: StageDevice, given: Form, num_microbatches: int
    ) -> tuple[LocalStage, Form]:
        """Return a partition as a stage of the runtime, and the form of its outputs."""
        part = self.partitions[index]
        assert isinstance(part, nn.Sequential)
        takes, leaves = self._routes.into(index), self._routes.out_of(index)
        returned = Form()
        # The last micro-batch is the first to run backward, soon after its forward: to drop its
        # activations in between would save little. Counted by the batch at hand, which may split
        # into fewer than `chunks`.
        recomputed = {"always": num_microbatches, "except_last": num_microbatches - 1, "never": 0}
        stage = LocalStage(
            PartitionRun(part, f"partition {index}", given, returned, takes, leaves),
            part,
            device,
            checkpointed=recomputed[self.checkpoint] if self.training else 0,
            takes=takes,
            leaves=leaves,
        )
        return stage, returned

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Raise `TypeError`: each partition has its own device."""
        _refuse_moving()

    def cpu(self) -> NoReturn:
        """Raise `TypeError`: each partition has its own device."""
        _refuse_moving()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert to a dtype; raise `TypeError` for devices, since each partition has its own."""
        moves = bool(args) and isinstance(args[0], torch.device | int | str | Tensor)
        if moves or "device" in kwargs or "tensor" in kwargs:
            _refuse_moving()
        return super().to(*args, **kwargs)


def _refuse_moving() -> NoReturn:
    raise TypeError(
        "denied to move parameters and buffers, because GPipe places each partition on its own "
        "device; give devices= when it is made"
    )


def _checked_chunks(chunks: Any) -> int:
    number = int(chunks)
    if number <= 0:
        raise InvalidInput(f"number of chunks must be positive integer, got {chunks!r}")
    return number


def _checked_mode(checkpoint: Any) -> str:
    mode = str(checkpoint)
    if mode not in CHECKPOINT_MODES:
        raise InvalidInput(
            f"checkpoint is not one of 'always', 'except_last', or 'never': got {checkpoint!r}"
        )
    return mode


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, got {type(module).__name__}; "
            "stagewright.Pipeline takes any module"
        )
    # `named_children` and `parameters` omit repetitions, so differing counts reveal them.
    if len(list(module.named_children())) != len(module):
        raise InvalidInput("module with duplicate children is not supported")
    apart = sum(len(list(child.parameters())) for child in module.children())
    if len(list(module.parameters())) != apart:
        raise InvalidInput(
            "module with duplicate parameters in distinct children is not supported; "
            "stagewright.Pipeline takes tied weights"
        )


def _check_balance(balance: list[int], num_layers: int) -> None:
    if sum(balance) != num_layers:
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {num_layers}, sum of balance: {sum(balance)})"
        )
    if any(count <= 0 for count in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {balance})")


def _devices(devices: Iterable[Device] | None, wanted: int) -> list[torch.device]:
    given = [
        torch.device(device)
        for device in (range(torch.cuda.device_count()) if devices is None else devices)
    ]
    if len(given) < wanted:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(given)}, partitions: "
            f"{wanted}); give one for each, the same one more than once if need be"
        )
    return given[:wanted]


def _partitions(module: nn.Sequential, balance: list[int]) -> Iterator[nn.Sequential]:
    # Layers keep their names, which are part of the keys of `state_dict`.
    children = iter(module.named_children())
    for count in balance:
        yield nn.Sequential(OrderedDict(next(children) for _ in range(count)))
