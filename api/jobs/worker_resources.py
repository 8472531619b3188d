"""Resources that a machine offers to jobs: its processors and the kinds of its GPUs."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ...core.cluster.accelerators import find_by_driver_name
from ...core.errors import InvalidInput
from .messages import CPU, CUDA

DRIVER = Path("/dev/nvidiactl")
"""Without this file there is no NVIDIA GPU, and torch need not be asked."""

QUERY_TIMEOUT_S = 120.0
LIST_GPUS = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
)
"""Run in a child process: importing torch takes seconds, and its memory is never released."""

INVITATION = (
    "restart the server with --scheduler tls://HOST:8786, and on a machine that has one run: "
    "stagewright worker --scheduler tls://HOST:8786 --resources {needs}=1"
)
"""How to add a worker to a server that runs jobs on its own machine."""


def detect_resources(names: list[str] | None = None) -> dict[str, float]:
    """Return one of each resource of this machine: ``cpu``, ``cuda`` and the kinds of its GPUs.

    A worker runs one job at a time, whatever number of GPUs there is. Their names are those that
    torch reports.
    """
    found = device_names() if names is None else names
    kinds = [CPU] * (find_spec("torch") is not None)
    if found:
        kinds += [CUDA, *map(device_kind_of, found)]
    return dict.fromkeys(kinds, 1.0)


def device_names() -> list[str]:
    """Return the names of the GPUs torch sees; empty without torch or driver."""
    if not DRIVER.exists() or find_spec("torch") is None:
        return []
    try:
        asked = subprocess.run(
            # -P: a file named torch.py in the working directory is not imported.
            [sys.executable, "-P", "-c", LIST_GPUS],
            capture_output=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        return [str(name) for name in json.loads(asked.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def device_kind_of(name: str) -> str:
    """Return a GPU's name in the catalogue, else the last word of the driver's (``H200``)."""
    known = find_by_driver_name(name)
    if known is not None and known.backend != CPU:
        return known.name
    words = re.findall(r"[\w.]+", name)
    return words[-1] if words else CUDA


def parse_resources(text: str) -> dict[str, float]:
    """Parse resources such as ``H200=1,cuda=1``. Raises: InvalidInput."""
    offers = {}
    for part in text.split(","):
        kind, _, number = part.strip().partition("=")
        if not re.fullmatch(r"[\w.+-]{1,40}", kind) or not re.fullmatch(r"\d{1,4}", number or "1"):
            raise InvalidInput(
                f"invalid resource {part.strip()!r}; write for example H200=1,cuda=1"
            )
        offers[kind] = float(number or 1)
    return offers


def measuring_place(scheduler: str) -> str:
    """Return a name for where measurements are made: this machine's processors or a scheduler."""
    return scheduler if "://" in scheduler else f"{os.cpu_count()} x {_processor()}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
