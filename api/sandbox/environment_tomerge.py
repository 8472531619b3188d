"""What of the server's environment a child is given: nothing that could be a secret."""

from __future__ import annotations

import os

HANDED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND",
    "OMP_PLACES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
"""Variables that change how torch runs; every other stays with the server."""


def child_environment() -> dict[str, str]:
    """Variables of a child that measures or estimates."""
    given = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    return {
        **given,
        "USER": "nobody",  # torch asks who it is, and would look for a list of users
        "LOGNAME": "nobody",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
