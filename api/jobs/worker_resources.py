"""What a machine offers to jobs: its processors, and the kinds of its GPUs."""

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
"""Where there is none, torch need not be asked."""

ASK_TIMEOUT_S = 120.0
ASK = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
)
"""In a process of its own: torch takes seconds to import, and memory for good."""


def detect_resources(names: list[str] | None = None) -> dict[str, float]:
    """What this machine offers: ``cpu``; with GPUs also ``cuda`` and each kind it knows.

    One of each, since a worker runs one job at a time.

    Args:
        names: Of GPUs, as torch has them; asked of torch if not given.
    """
    found = device_names() if names is None else names
    kinds = [CPU] * (find_spec("torch") is not None)
    if found:
        kinds += [CUDA, *map(device_kind_of, found)]
    return dict.fromkeys(kinds, 1.0)


def device_names() -> list[str]:
    """The GPUs torch sees here; none where torch or the driver is missing."""
    if not DRIVER.exists() or find_spec("torch") is None:
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", ASK],
            capture_output=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
        return [str(name) for name in json.loads(asked.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def device_kind_of(name: str) -> str:
    """``NVIDIA H200`` → ``H200``: the catalogue's name, else the last word of the driver's."""
    known = find_by_driver_name(name)
    if known is not None and known.backend != CPU:
        return known.name
    words = re.findall(r"[\w.]+", name)
    return words[-1] if words else CUDA


def parse_resources(text: str) -> dict[str, float]:
    """``H200=1,cuda=1`` as what a worker offers.

    Raises:
        InvalidInput: It does not read so.
    """
    offers = {}
    for part in text.split(","):
        kind, _, number = part.strip().partition("=")
        if not re.fullmatch(r"[\w.+-]{1,40}", kind) or not re.fullmatch(r"\d{1,4}", number or "1"):
            raise InvalidInput(f"cannot read {part.strip()!r}; write kinds like H200=1,cuda=1")
        offers[kind] = float(number or 1)
    return offers


def measuring_place(scheduler: str) -> str:
    """This machine's processors, or the fleet behind a scheduler."""
    return scheduler if "://" in scheduler else f"{os.cpu_count()} x {_processor()}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
