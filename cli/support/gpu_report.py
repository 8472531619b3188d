"""Report on torch and its CUDA devices, for ``stagewright doctor``."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from ...core.units import format_bytes

QUERY = ("uuid", "driver_version", "clocks.sm", "clocks.max.sm", "pcie.link.gen.current",
         "pcie.link.width.current")  # fmt: skip
"""Fields asked of ``nvidia-smi --query-gpu``; torch reports none of them but the UUID."""

QUERY_TIMEOUT_S = 10.0
"""A driver that is resetting a device can block ``nvidia-smi`` indefinitely."""


@dataclass(frozen=True)
class CudaDevice:
    """CUDA device as torch sees it; unknown values are `None` or empty.

    Clock and PCIe link are those of now, lower while the device is idle. It accesses the memory of
    its ``peers`` directly, by NVLink or PCIe.
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
    """The installed torch; ``error`` is the reason if it cannot be imported."""

    version: str = ""
    error: str = ""
    cuda_version: str | None = None
    cuda_devices: tuple[CudaDevice, ...] = ()
    distributed_backends: tuple[str, ...] = ()
    num_threads: int | None = None


def examine_torch() -> TorchReport:
    """Import torch and report its version, backends and devices."""
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
    queried = parse_query(_query())
    devices = []
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
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not those of nvidia-smi.
        devices.append(replace(device, **queried.get(f"GPU-{properties.uuid}", {})))
    return tuple(devices)


def _free_bytes(torch: Any, index: int) -> int | None:
    try:
        # This creates a context on the device, which fails if its memory is full.
        return int(torch.cuda.mem_get_info(index)[0])
    except RuntimeError:
        return None


def _query() -> str:
    """Return the output of ``nvidia-smi``; empty if it fails or is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_query(text: str) -> dict[str, dict[str, Any]]:
    """Parse the fields of each `CudaDevice` by UUID, without those the driver does not report."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY):
            continue
        uuid, driver, clock, highest, generation, lanes = cells
        # The driver writes "[N/A]" for what a device does not report.
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
    """Format the report as lines of text."""
    if torch is None:
        return ["torch        not installed: planning works; measuring and running do not"]
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
        facts.append(f"peer access to {', '.join(f'cuda:{peer}' for peer in device.peers)}")
    return f"cuda:{device.index}".ljust(13) + ", ".join(facts)
