"""The processes a pipeline runs on: as many as its plan has devices."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ...capture.capture import default_device
from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.schedule import Schedule
from ...core.units import count

DEFAULT_TIMEOUT_S = 300.0


def init_process_group(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """``torch.distributed.init_process_group`` from torchrun's variables, with a timeout.

    In a job that torchrun restarts use `runtime.elastic.join`: torch's store keeps the keys of the
    attempt before.

    Args:
        backend: ``nccl`` where there are GPUs, ``gloo`` elsewhere, unless given.
        timeout_s: How long a rank waits for another before it asks who is missing.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))


def end_process(code: int = 0) -> NoReturn:
    """End this process at once, with what it has printed.

    For the end of a script that lost a rank. At a normal exit gloo takes its connections apart,
    and one whose other end is gone may wait for it, or abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_world(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    """See that there is a process group, with a rank for every device of the schedule.

    Raises:
        InvalidInput: ``torch.distributed`` is not initialised.
        PlanMismatch: There are more ranks or fewer.
    """
    wanted = len(schedule.ranks)
    if not dist.is_initialized():
        raise InvalidInput(
            "call torch.distributed.init_process_group first, and start one process a device: "
            f"torchrun --nproc-per-node {wanted} train.py"
        )
    ranks = dist.get_world_size(group)
    if ranks != wanted:
        raise PlanMismatch(
            f"the plan has {count(schedule.num_stages, 'stage')} on {count(wanted, 'device')}, "
            f"but {count(ranks, 'rank')} started; start {wanted}, or plan for "
            f"{count(ranks, 'device')}"
        )


def device_for(model: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Where a model is; one on the meta device goes where its ranks' messages are."""
    device = default_device(model)
    if device.type != "meta":
        return device
    on_gpu = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
