"""Self-describing messages between processes: a header with shapes and dtypes, then tensors.

Nothing is agreed on beforehand, so that batches may have any size, a failed micro-batch carries
its error, and a receiver need not know how many micro-batches will come.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import ForeignError
from .microbatch import InFlightMicrobatch, Values

HEAD_BYTES = 1024
"""Size of the first message; nearly every header fits into it and needs no second message."""

LENGTH_BYTES = 8

FOREVER = timedelta(days=365)
"""Timeout of a receive: requests may not come for hours, and a dead sender fails it anyway."""


@dataclass(frozen=True)
class WireMessage:
    """Micro-batch addressed to a stage; the number of stages addresses the results.

    A connection's last message has no micro-batch.
    """

    stage: int
    microbatch: InFlightMicrobatch | None


class MicrobatchTransport:
    """Sender and receiver of messages; one thread sends, and one receives per sender.

    Tensors travel through CPU memory. Everything else is pickled, since ranks of one job trust
    each other.

    The group is of all ranks, with gloo; ``global_ranks`` are their numbers in the default group.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
        self._rank, self._group, self._global_ranks = rank, group, global_ranks

    def send(self, receiver: int, message: WireMessage) -> None:
        """Send a message and wait until it has left; `RuntimeError` if the receiver is gone."""
        microbatch = message.microbatch
        values: Values = ()
        number = error = None
        if microbatch is not None:
            if microbatch.ready is not None:
                microbatch.ready.synchronize()
            values, number = microbatch.values, microbatch.number
            error = self._pack_error(microbatch.error) if microbatch.error is not None else None
        # Tensors and other values separately; `others` keeps their order, None for each tensor.
        tensors = [v.cpu().contiguous() for v in values if isinstance(v, Tensor)]
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        others = [None if isinstance(value, Tensor) else (value,) for value in values]
        head = pickle.dumps((message.stage, number, error, shapes, others))
        self._send_bytes(head, receiver)
        for tensor in tensors:
            if tensor.numel():
                self._send(tensor, receiver)

    def receive(self, sender: int) -> WireMessage:
        """Wait for the next message of a sender; raise `RuntimeError` if it is gone."""
        stage, number, error, shapes, others = pickle.loads(self._receive_bytes(sender))
        tensors = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                self._receive(tensor, sender)
            tensors.append(tensor)
        if number is None:
            return WireMessage(stage, None)
        rest = iter(tensors)
        values = tuple(next(rest) if other is None else other[0] for other in others)
        found = None if error is None else pickle.loads(error)
        return WireMessage(stage, InFlightMicrobatch(number, values, error=found))

    def _pack_error(self, error: BaseException) -> bytes:
        """Pickle an error with its traceback as a note; as a `ForeignError` if it cannot be."""
        if error.__traceback__ is not None:  # raised here, not merely passed on
            text = "".join(traceback.format_exception(error))
            error.add_note(f"on rank {self._rank}:\n{text}")
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)  # an exception with its own __init__ often fails only here
        except Exception:  # noqa: BLE001 (whatever a class's own pickling raises)
            return pickle.dumps(ForeignError.of(error))
        return packed

    def _send_bytes(self, data: bytes, receiver: int) -> None:
        whole = len(data).to_bytes(LENGTH_BYTES, "big") + data
        first, rest = whole[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), whole[HEAD_BYTES:]
        self._send(_as_tensor(first), receiver)
        if rest:
            self._send(_as_tensor(rest), receiver)

    def _receive_bytes(self, sender: int) -> bytes:
        first = self._receive_exactly(HEAD_BYTES, sender)
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "big")
        rest = length - HEAD_BYTES
        whole = first + self._receive_exactly(rest, sender) if rest > 0 else first
        return whole[LENGTH_BYTES:length]

    def _receive_exactly(self, length: int, sender: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        self._receive(data, sender)
        return data.numpy().tobytes()

    def _send(self, tensor: Tensor, receiver: int) -> None:
        dist.send(tensor, self._global_ranks[receiver], group=self._group)

    def _receive(self, tensor: Tensor, sender: int) -> None:
        # Not dist.recv, whose timeout is the group's.
        work: Any = dist.irecv(tensor, self._global_ranks[sender], group=self._group)
        work.wait(FOREVER)


def _as_tensor(data: bytes) -> Tensor:
    # A mutable copy: torch warns about buffers that cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
