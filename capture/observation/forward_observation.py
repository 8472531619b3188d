"""Findings of one eager forward: module calls, and what a tracer would flatten, freeze or lose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..sample import CallStructure
from .python_state import ChangeKind

CallKey = tuple[str, int]
"""A module's path and the number of its call."""

INPUT: CallKey = ("", -1)
"""Stands for the call that made the model's only input."""


@dataclass(frozen=True)
class TensorForm:
    """Shape, layout, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class RecordedCall:
    """One call of a module: what a stand-in must know to take its place.

    Attributes:
        output: Its value, with a `TensorPosition` for every tensor, whose forms are in ``forms``.
        given: Number of tensors it was called with.
        plain: Whether a graph can hold its other arguments.
        written: Positions of tensor arguments it changed in place.
        returned: Position of the argument whose memory each output shares, or `None`.
        problem: Why it cannot be replaced; empty if it can.
    """

    output: Any = None
    forms: tuple[TensorForm, ...] = ()
    given: int = 0
    plain: bool = True
    written: tuple[int, ...] = ()
    returned: tuple[int | None, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class AttributeChange:
    """A change of an attribute during a forward.

    Attributes:
        kind: Kind of change.
        outside: Whether it was not made in the module's own call.
        tensors: The number of tensors that the attribute is or holds now.
        losses: The number of those that are single numbers with a gradient, as a loss is.
    """

    kind: ChangeKind
    outside: bool
    tensors: int = 0
    losses: int = 0


@dataclass
class ForwardObservation:
    """Findings of one eager forward.

    Attributes:
        calls: Every module call by path and number.
        received: The calls, or `INPUT`, whose value is the only argument of a call, unchanged, with
            gradients and autocast on or off as for the model itself.
        returned: The calls whose value the model returns, unchanged.
        reasons: Why a module must be opaque, by path; the model itself has the empty path.
        suspects: Modules that keep Python state between calls, which may be just a cache.
        mode_readers: Modules that read ``self.training``.
        attributes_read: Names of attributes that forward read; `None` if that is not known.
        functions: Custom autograd functions by class, with the modules that apply them.
        checkpointed: Arguments of ``torch.utils.checkpoint`` for modules that their parent
            checkpoints.
        recomputed: Modules that recompute, or are recomputed by their parent.
        changed: Attributes that the forward changed, by path and name.
        stateful: Names of the state in Python that modules change in every call, by their paths.
        references: Parameters and buffers that a module's calls read although they are not its
            own, by name, with whether the calls changed them.
        globals: Variables outside the model that every step changes, or globals its code writes.
        counters: Those whose value every step changes, like a counter's.
        remarks: Behaviour that the capture does not reproduce, without effect on the numbers.
    """

    calls: dict[CallKey, RecordedCall] = field(default_factory=dict)
    received: dict[CallKey, set[CallKey]] = field(default_factory=dict)
    returned: set[CallKey] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    mode_readers: set[str] = field(default_factory=set)
    attributes_read: set[str] | None = None
    functions: dict[type, set[str]] = field(default_factory=dict)
    checkpointed: dict[str, dict[str, Any]] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    changed: dict[tuple[str, str], AttributeChange] = field(default_factory=dict)
    stateful: dict[str, str] = field(default_factory=dict)
    references: dict[nn.Module, dict[str, bool]] = field(default_factory=dict)
    globals: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the full names of attributes that hold numbers with a gradient, as losses do."""
        return tuple(full_name(*place) for place, how in self.changed.items() if how.losses)

    def blame(self, path: str, reason: str) -> None:
        """Record why a module must be opaque; the first reason counts."""
        self.reasons.setdefault(path, reason)


@dataclass(frozen=True)
class TracingTarget:
    """A model with its sample and the observation of an eager forward: what a tracer takes."""

    model: nn.Module
    structure: CallStructure
    flat: tuple[Tensor, ...]
    seen: ForwardObservation


def full_name(path: str, name: str) -> str:
    """Return the name of a module's attribute from the model's root."""
    return f"{path}.{name}" if path else name


def explain_function_owners(seen: ForwardObservation) -> dict[str, str]:
    """Return why modules that apply custom autograd functions must be opaque, by path."""
    return {
        path: f"applies the custom autograd function {function.__name__!r}"
        for function, paths in seen.functions.items()
        for path in sorted(paths)
    }
