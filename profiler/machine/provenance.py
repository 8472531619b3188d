"""Where and how numbers were measured."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from ...core.options import ProfilingOptions
from ...core.profile import Clocks, Provenance


def provenance(
    device: torch.device, options: ProfilingOptions, clocks: Clocks | None = None
) -> Provenance:
    """The device and software of this measurement."""
    return Provenance(
        device=str(device),
        device_name=device_name(device),
        torch_version=torch.__version__,
        stagewright_version=version("stagewright"),
        num_threads=torch.get_num_threads() if options.num_threads is None else options.num_threads,
        busy_neighbours=options.busy_neighbours,
        autocast=options.autocast,
        compiled=options.compile,
        cuda_version=torch.version.cuda or "" if device.type == "cuda" else "",
        driver=_driver(device),
        clocks=clocks,
    )


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str:
    """Version of the kernel's NVIDIA driver; empty if it does not say."""
    if device.type != "cuda":
        return ""
    try:
        text = Path("/sys/module/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.strip()
