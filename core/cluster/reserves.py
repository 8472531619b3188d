"""Device memory that plans leave to others: what no profile shows, as named terms.

They are taken from the memory that torch reports of a device, which leaves out error correction
and what the driver keeps for itself, but not the context of a process.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from ..document import Record


class MemoryReserves(Record):
    """Memory of each device that a plan does not use.

    Attributes:
        context_bytes: CUDA's context, its loaded kernels and libraries.
        communication_bytes: Buffers of the communication library.
        fragmentation: Share of the device's memory that the caching allocator holds unused.
    """

    context_bytes: int = Field(0, ge=0, le=2**50)
    communication_bytes: int = Field(0, ge=0, le=2**50)
    fragmentation: float = Field(0.0, ge=0, lt=1)

    def of_device(self, memory_bytes: int) -> ReservedMemory:
        """Return what is reserved of a device with so much memory."""
        return ReservedMemory(
            context_bytes=self.context_bytes,
            communication_bytes=self.communication_bytes,
            fragmentation_bytes=math.ceil(memory_bytes * self.fragmentation),
        )


class ReservedMemory(Record):
    """The reserves of one device, in bytes; see `MemoryReserves`."""

    context_bytes: int = Field(0, ge=0)
    communication_bytes: int = Field(0, ge=0)
    fragmentation_bytes: int = Field(0, ge=0)

    @property
    def total_bytes(self) -> int:
        return self.context_bytes + self.communication_bytes + self.fragmentation_bytes


CONTEXT_BYTES = 666_632_192
"""CUDA context of a process with all of torch's kernels loaded, as `init_process_group` asks for
(CUDA_MODULE_LOADING=EAGER); 287,047,680 if they are loaded when used. Measured in pytorch#86509."""

COMMUNICATION_BYTES = 688 * 2**20
"""NCCL's buffers on an A100 with NVLink that exchanges with two and more others; 544 MiB with one.
Measured in NVIDIA/nccl#964. It grows with the channels of a link."""

FRAGMENTATION = {"measured": 0.03, "estimated": 0.06}
"""The allocator rounds requests up to 512 bytes and takes segments of 2 MiB, 20 MiB or multiples of
2 MiB from the device (torch's notes on CUDA semantics); measured sizes are rounded already.
Predictions of peaks were up to 10 % off for small models (docs/evidence/activation-memory.md), and
a device is rarely filled by activations alone."""


def usual_reserves(
    device: str, source: Literal["measured", "estimated"], num_devices: int
) -> MemoryReserves:
    """Return the reserves of devices like the one that was profiled; none on a CPU."""
    if device.partition(":")[0] != "cuda":
        return MemoryReserves()
    return MemoryReserves(
        context_bytes=CONTEXT_BYTES,
        communication_bytes=COMMUNICATION_BYTES if num_devices > 1 else 0,
        fragmentation=FRAGMENTATION[source],
    )
