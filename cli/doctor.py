"""``stagewright doctor``: what this machine and this installation can do."""

from __future__ import annotations

import importlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.units import format_bytes
from .extras import EXTRAS, MissingExtra, missing_packages
from .output import JsonFlag, emit, say_next


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device as torch sees it."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class TorchReport:
    """The torch found here; ``error`` says why it cannot be imported, if it cannot."""

    version: str = ""
    error: str = ""
    cuda_version: str | None = None
    cuda_devices: tuple[CudaDevice, ...] = ()
    distributed_backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything `doctor` looks at.

    Attributes:
        cores: Processors this process may run on.
        memory_bytes: Physical memory, or the container's limit where that is lower.
        torch: `None` where torch is not installed.
        missing: For each extra, the packages of it that are not installed.
    """

    stagewright: str
    python: str
    system: str
    cores: int
    memory_bytes: int
    torch: TorchReport | None
    missing: dict[str, tuple[str, ...]]


def command(as_json: JsonFlag = False) -> None:
    """Show what this machine and this installation can do."""
    report = examine()
    emit(json.dumps(asdict(report), indent=2) if as_json else describe(report))
    follow = "stagewright profile --help" if report.torch else MissingExtra("torch", "").install
    say_next(follow, quiet=as_json)


def examine() -> Report:
    """Look at Python, the machine, torch (imported only if installed) and the extras."""
    missing = {extra: missing_packages(extra) for extra in EXTRAS}
    return Report(
        stagewright=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        torch=None if "torch" in missing["torch"] else _examine_torch(),
        missing=missing,
    )


def describe(report: Report) -> str:
    """The report as lines for a person."""
    lines = [
        f"stagewright  {report.stagewright}",
        f"python       {report.python}",
        f"system       {report.system}",
        f"cores        {report.cores}",
        f"memory       {format_bytes(report.memory_bytes)}",
        *_describe_torch(report.torch),
    ]
    for extra, packages in report.missing.items():
        state = "installed"
        if packages:
            install = MissingExtra(extra, packages[0]).install
            state = f"without {', '.join(packages)}; run: {install}"
        lines.append(f"[{extra}]".ljust(13) + state)
    return "\n".join(lines)


def _describe_torch(torch: TorchReport | None) -> list[str]:
    if torch is None:
        return ["torch        not installed: planning works, measuring and running do not"]
    if torch.error:
        return [f"torch        installed, but importing it fails: {torch.error}"]
    devices = [
        f"cuda:{device.index}".ljust(13) + f"{device.name}, {format_bytes(device.memory_bytes)}"
        for device in torch.cuda_devices
    ]
    return [
        f"torch        {torch.version}",
        f"backends     {', '.join(torch.distributed_backends) or 'none'}",
        *(devices or ["cuda         no device"]),
    ]


def _examine_torch() -> TorchReport:
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return TorchReport(error=f"{type(error).__name__}: {error}")
    backends = {"gloo": "is_gloo_available", "nccl": "is_nccl_available"}
    distributed = torch.distributed
    return TorchReport(
        version=torch.__version__,
        cuda_version=torch.version.cuda,
        cuda_devices=tuple(
            CudaDevice(index, properties.name, properties.total_memory)
            for index in range(torch.cuda.device_count())
            for properties in [torch.cuda.get_device_properties(index)]
        ),
        distributed_backends=tuple(
            name
            for name, available in backends.items()
            if distributed.is_available() and getattr(distributed, available)()
        ),
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
