"""The tracers by name, each from a model and its frontier to a traced model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn

from ...core.errors import CaptureError, InvalidInput
from ..captured import Captured
from ..observation.observe import function_owners
from ..program.cuts import find_cuts
from ..program.layers import assign_layers
from ..program.mode_dependent import follow_mode
from ..program.program import Program
from .attention import erase_copies_behind_attention, restore_causal_attention
from .export import export_program
from .frontier import outermost
from .leaf_modules import restore_leaves
from .opaque_model import whole_program
from .symbolic import sequential_program, traced_program
from .target import Subject

Mode = Literal["auto", "export", "trace"]

Tracer = Callable[[Subject, Mapping[str, str]], Program]
"""Traces around the modules given by path, which are called as written, with the reason."""


def tracers_for(model: nn.Module, flat: tuple[Tensor, ...], mode: str) -> list[tuple[str, Tracer]]:
    if type(model) is nn.Sequential and len(model) and len(flat) == 1 and mode == "auto":
        return [("sequential", _sequential)]
    both: list[tuple[str, Tracer]] = [("export", _export), ("trace", _trace)]
    named: dict[str, list[tuple[str, Tracer]]] = {
        "auto": both,
        "export": both[:1],
        "trace": both[1:],
        "sequential": [("sequential", _sequential)],
        "modules": [("modules", _whole)],
    }
    if mode not in named:
        raise InvalidInput(f"there is no tracer {mode!r}; there are {', '.join(named)}")
    return named[mode]


def _sequential(subject: Subject, opaque: Mapping[str, str]) -> Program:
    return sequential_program(subject, {**function_owners(subject.seen), **opaque})


def _trace(subject: Subject, opaque: Mapping[str, str]) -> Program:
    owners = function_owners(subject.seen)
    if "" in owners:
        raise CaptureError(f"torch.fx: forward of the model itself {owners['']}")
    return traced_program(subject, outermost({**owners, **opaque}))


def _whole(subject: Subject, opaque: Mapping[str, str]) -> Program:
    return whole_program(subject, opaque[""])


def _export(subject: Subject, opaque: Mapping[str, str]) -> Program:
    program = export_program(subject, opaque)
    restore_leaves(program)
    restore_causal_attention(program)
    erase_copies_behind_attention(program)
    follow_mode(program)
    return program


def with_layers(program: Program) -> Captured:
    program.graph.lint()
    program.frozen_modules = frozenset(m for m in program.model.modules() if not m.training)
    layers = assign_layers(program)
    return Captured(program, layers, find_cuts(program, layers))
