"""Tensors in a host's memory, which a device cannot read until they are moved to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.nccl.host_group import HOST_BACKEND
from tests.nccl.launch_log import LOG
from tests.nccl.launches import HostRead

LOOKED_AT = {
    "__get__", "__len__", "dim", "size", "numel", "is_floating_point", "is_complex", "element_size",
    "detach", "reshape", "view", "contiguous", "split", "chunk", "tensor_split", "unbind", "narrow",
    "__getitem__", "expand", "cat", "is_pinned", "pin_memory", "stride", "is_contiguous", "cpu",
    "numpy",
}  # fmt: skip
"""What the host may do to them."""


class HostTensor(torch.Tensor):
    """The CPU plays the device; so what differs from it is the class.

    ``to(device, non_blocking=True)`` moves it. A copy for which the host waits is recorded.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__
        if name == "to" and isinstance(args[1], torch.device):
            if not (kwargs or {}).get("non_blocking"):
                LOG.add(HostRead("a blocking copy"))
            return args[0].as_subclass(torch.Tensor).clone()
        if name not in LOOKED_AT | {"to", "as_subclass"} and not _is_sent_by_gloo(name, kwargs):
            raise RuntimeError(f"{name} on a device, of a tensor that was not moved to it")
        return super().__torch_function__(function, types, args, kwargs or {})


def _is_sent_by_gloo(name: str, options: Any) -> bool:
    """Return True for messages of a group that carries what is in a host's memory."""
    return name == "send" and dist.get_backend(options["group"]) == HOST_BACKEND


def on_host(value: Any) -> Any:
    """Return a nest of tensors as in a host's memory."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.as_subclass(HostTensor), value
    )
