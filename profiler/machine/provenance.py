"""Device of a measurement: whether it is here, and what to record of it and its software."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from ...core.errors import InvalidInput
from ...core.profile.profile import Clocks, Provenance, Tf32
from ...core.requests.requests import ProfilingOptions
from .memory import ON_CUDA


def check_device(device: str) -> str:
    """Return the device if this torch can use it, else raise `InvalidInput`."""
    if not device.startswith("cuda"):
        return device
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"this torch sees no CUDA device, so {device} cannot be measured here; "
            "measure on the device cpu, or where there is a GPU",
            field="/profiling/device",
        )
    count, (_, _, index) = torch.cuda.device_count(), device.partition(":")
    if int(index or 0) >= count:
        raise InvalidInput(
            f"there is no {device} here; the {count} CUDA devices are cuda:0 to cuda:{count - 1}",
            field="/profiling/device",
        )
    return device


def provenance(
    device: torch.device, options: ProfilingOptions, clocks: Clocks | None = None
) -> Provenance:
    """Describe the device and software of this measurement."""
    on_cuda = device.type in ON_CUDA
    return Provenance(
        device=str(device),
        device_name=device_name(device),
        torch_version=torch.__version__,
        stagewright_version=version("stagewright"),
        num_threads=torch.get_num_threads() if options.num_threads is None else options.num_threads,
        busy_neighbours=options.busy_neighbours,
        autocast=options.autocast,
        precision=options.precision,
        tf32=_tf32() if on_cuda else None,
        compiled=options.compile,
        cuda_version=torch.version.cuda or "" if on_cuda else "",
        driver=_driver() if on_cuda else "",
        clocks=clocks,
    )


def device_name(device: torch.device) -> str:
    if device.type in ON_CUDA:
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _tf32() -> Tf32:
    """Return which float32 operations run in tf32 with torch's settings on this GPU."""
    # The newer of torch's two settings: it can be read whichever of them was written.
    products = torch.backends.cuda.matmul.fp32_precision == "tf32"
    convolutions = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    if products:
        return "products and convolutions" if convolutions else "products"
    return "convolutions" if convolutions else "off"


def _driver() -> str:
    """Version of the kernel's NVIDIA driver; empty if it does not say."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
