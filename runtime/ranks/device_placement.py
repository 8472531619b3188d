"""Choice of the device on which a rank works, and of what its process group can carry there."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from ...capture.capture import default_device
from ...core.errors import InvalidInput

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"

QUEUEING = {"cuda"}
"""Device types that run work later than the host launches it; tests add the CPU's."""


def queues_work(device: torch.device) -> bool:
    """Return True if the host launches a device's work without waiting for it."""
    return device.type in QUEUEING


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait for a copy to a GPU.

    Only from pinned memory is such a copy asynchronous. torch keeps that memory until it is done.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device, non_blocking=True)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def prepare_cuda() -> None:
    """Set what CUDA and NCCL read when they start, unless the caller's environment does.

    Operations of NCCL occupy the GPU until their peer takes part, and that peer may be waiting for
    work that this process has yet to launch. Two of CUDA's habits would let such an operation hold
    that work up. Loading a kernel when it is first launched may wait until the GPU is idle, so all
    are loaded at the start (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading).
    And streams that share one of the connections to the GPU wait for each other's launches; there
    are 8 by default, and a rank has a stream for its own work, two for every peer and one for every
    group of replicas.

    The allocator is the third: out of memory, it waits for the GPU before it frees blocks. The
    plan's reserve is there to keep it from that; where it happens all the same, no rank can go on,
    and all end with `RankFailed` after the group's timeout.

    NCCL connects ranks when it makes a communicator, and not in the first step that uses an
    algorithm (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if not torch.cuda.is_initialized():  # later they have no effect
        os.environ.setdefault(CONNECTIONS, "32")
        os.environ.setdefault(LOADING, "EAGER")


def check_connections() -> None:
    """Refuse a ``CUDA_DEVICE_MAX_CONNECTIONS`` of 1, which other frameworks ask for."""
    if os.environ.get(CONNECTIONS) == "1":
        raise InvalidInput(
            f"{CONNECTIONS} is 1, so that a receive for which no sender is ready would hold up "
            "the work that the sender waits for; unset it"
        )


def take_gpu() -> None:
    """Make the GPU with this process's ``LOCAL_RANK`` torch's current device.

    NCCL takes the current device for what has none of its own, such as barriers and objects. Every
    process would otherwise use the first GPU. Call it before the process group is created.

    Raises:
        InvalidInput: This machine has fewer GPUs than processes.
    """
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    # Some launchers show each process only its own GPU, by number or UUID, which is then the first
    # for all of them. Under torchrun the number 0 is process 0's.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if gpus == 1 and shown and (shown != "0" or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"):
        local = 0
    if local >= gpus:
        raise InvalidInput(
            f"process {local} of this machine has no GPU: torch finds {gpus}, numbered from 0; "
            f"start at most {gpus} processes a machine (torchrun --nproc-per-node {gpus}), or run "
            'on the CPU with init_process_group(backend="gloo")'
        )
    torch.cuda.set_device(local)


def uses_nccl(group: dist.ProcessGroup | None) -> bool:
    """Return True if a group carries tensors of GPUs over NCCL."""
    found = group or dist.group.WORLD
    assert found is not None, "there is no process group"
    return "cuda:nccl" in distributed_c10d._world.pg_backend_config[found]


def waits_on_device(group: dist.ProcessGroup | None) -> bool:
    """Return True if a device waits for a group's operations, and not the host that starts them."""
    return queues_work(torch.device("cuda" if uses_nccl(group) else "cpu"))


def choose_device(
    model: nn.Module, group: dist.ProcessGroup | None, wanted: torch.device | str | None = None
) -> torch.device:
    """Return the device of a rank's stages, on which its group can carry tensors.

    A GPU becomes torch's current device: NCCL takes that for what has no device of its own.

    Args:
        model: With NCCL it may be on the CPU or on meta: its stages go to the current GPU.
        group: The ranks' group; the default group if `None`.
        wanted: The device asked for; `None` to choose one.

    Raises:
        InvalidInput: The group's backend cannot carry tensors of the device, or CUDA was started
            with settings under which a step can block, or every process with its first GPU.
    """
    device = _find_device(model, group, wanted)
    if device.type == "cuda":
        check_connections()
        _check_start(device, wanted)
        torch.cuda.set_device(device)
    return device


def _check_start(device: torch.device, wanted: torch.device | str | None) -> None:
    """Check what `init_process_group` would have seen to, had it been called in time."""
    remedy = "call stagewright.init_process_group before anything else uses CUDA"
    if (loading := os.environ.get(LOADING, "not set")) != "EAGER":
        raise InvalidInput(
            f"{LOADING} is {loading}, so that loading a kernel may wait for a receive whose sender "
            f"waits for that kernel; {remedy}, or set it to EAGER"
        )
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if 0 < local < gpus and device.index == 0 and wanted is None:
        raise InvalidInput(
            f"process {local} of this machine would share the first of its {gpus} GPUs with "
            f"process 0; {remedy}, or pass device="
        )


def _find_device(
    model: nn.Module, group: dist.ProcessGroup | None, wanted: torch.device | str | None
) -> torch.device:
    device = torch.device(wanted) if wanted is not None else default_device(model)
    if device.type != "cuda" and uses_nccl(group):
        if wanted is not None:
            raise InvalidInput(
                f"NCCL carries tensors of GPUs only, and device= is {wanted}; leave it out, or "
                'call init_process_group(backend="gloo")'
            )
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "meta":
        return torch.device("cpu")
    if device.type == "cuda":
        if not uses_nccl(group):
            raise InvalidInput(
                f"the stages would run on {device}, whose tensors gloo does not carry between "
                'stages; call init_process_group(backend="nccl"), or pass device="cpu"'
            )
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    return device
