"""What `doctor` finds out about torch and its CUDA devices."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from ...core.units import format_bytes

ASKED = ("uuid", "driver_version", "clocks.sm", "clocks.max.sm", "pcie.link.gen.current",
         "pcie.link.width.current")  # fmt: skip
"""Of ``nvidia-smi --query-gpu``, which comes with the driver."""

PATIENCE_S = 10.0


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device as torch sees it; what cannot be found out is `None` or empty.

    Attributes:
        memory_bytes: All of it.
        free_bytes: What no process holds now.
        capability: CUDA compute capability, such as ``9.0``.
        driver: Version of NVIDIA's driver.
        clock_mhz: Of the multiprocessors, now; low while it idles.
        max_clock_mhz: Highest it may reach.
        pcie: Generation and lanes in use, such as ``gen 5 x16``; lower while it idles.
        peers: Other devices whose memory it reaches directly, by NVLink or PCIe.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    capability: str = ""
    driver: str = ""
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    pcie: str = ""
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TorchReport:
    """The torch found here; ``error`` says why it cannot be imported, if it cannot."""

    version: str = ""
    error: str = ""
    cuda_version: str | None = None
    cuda_devices: tuple[CudaDevice, ...] = ()
    distributed_backends: tuple[str, ...] = ()
    num_threads: int | None = None


def examine_torch() -> TorchReport:
    """Import torch and look."""
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return TorchReport(error=f"{type(error).__name__}: {error}")
    backends = {"gloo": "is_gloo_available", "nccl": "is_nccl_available"}
    distributed = torch.distributed
    return TorchReport(
        version=torch.__version__,
        cuda_version=torch.version.cuda,
        cuda_devices=_cuda_devices(torch),
        distributed_backends=tuple(
            name
            for name, available in backends.items()
            if distributed.is_available() and getattr(distributed, available)()
        ),
        num_threads=torch.get_num_threads(),
    )


def _cuda_devices(torch: Any) -> tuple[CudaDevice, ...]:
    count = torch.cuda.device_count()
    if not count:
        return ()
    asked = parse_query(_query())
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        device = CudaDevice(
            index=index,
            name=properties.name,
            memory_bytes=properties.total_memory,
            free_bytes=_free_bytes(torch, index),
            capability=f"{properties.major}.{properties.minor}",
            peers=tuple(
                other
                for other in range(count)
                if other != index and torch.cuda.can_device_access_peer(index, other)
            ),
        )
        found.append(replace(device, **asked.get(f"GPU-{properties.uuid}", {})))
    return tuple(found)


def _free_bytes(torch: Any, index: int) -> int | None:
    """Asking takes a context on the device, for which a full one has no room."""
    try:
        return int(torch.cuda.mem_get_info(index)[0])
    except RuntimeError:
        return None


def _query() -> str:
    """What ``nvidia-smi`` says; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_query(text: str) -> dict[str, dict[str, Any]]:
    """Fields of `CudaDevice` by a device's UUID; what the driver does not say is left out."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(ASKED):
            continue
        uuid, driver, clock, highest, generation, lanes = cells
        fields: dict[str, Any] = {"driver": driver}
        if clock.isdecimal():
            fields["clock_mhz"] = int(clock)
        if highest.isdecimal():
            fields["max_clock_mhz"] = int(highest)
        if generation.isdecimal() and lanes.isdecimal():
            fields["pcie"] = f"gen {generation} x{lanes}"
        found[uuid] = fields
    return found


def describe_torch(torch: TorchReport | None) -> list[str]:
    """Lines for a person."""
    if torch is None:
        return ["torch        not installed: planning works, measuring and running do not"]
    if torch.error:
        return [f"torch        installed, but importing it fails: {torch.error}"]
    threads = f", {torch.num_threads} CPU threads" if torch.num_threads else ""
    cuda = f", CUDA {torch.cuda_version}" if torch.cuda_version else ""
    return [
        f"torch        {torch.version}{cuda}{threads}",
        f"backends     {', '.join(torch.distributed_backends) or 'none'}",
        *(
            map(_describe_device, torch.cuda_devices)
            if torch.cuda_devices
            else ["cuda         no device"]
        ),
    ]


def _describe_device(device: CudaDevice) -> str:
    facts = [f"{device.name}, {format_bytes(device.memory_bytes)}"]
    if device.free_bytes is not None:
        facts.append(f"{format_bytes(device.free_bytes)} free")
    if device.clock_mhz is not None:
        of = f" of {device.max_clock_mhz}" if device.max_clock_mhz else ""
        facts.append(f"{device.clock_mhz}{of} MHz")
    if device.pcie:
        facts.append(f"PCIe {device.pcie}")
    if device.driver:
        facts.append(f"driver {device.driver}")
    if device.peers:
        facts.append(f"reaches {', '.join(f'cuda:{peer}' for peer in device.peers)} directly")
    return f"cuda:{device.index}".ljust(13) + ", ".join(facts)
