"""Registry of the tracers, each a function from a model and its frontier to a traced model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, fx, nn

from ...core.errors import CaptureError, InvalidInput
from ..captured import Captured
from ..observation.forward_observation import (
    ForwardObservation,
    TracingTarget,
    explain_function_owners,
)
from ..observation.module_chain import find_chain_break
from ..program.cuts import find_cuts
from ..program.layers import assign_layers
from ..program.mode_dependent import follow_mode
from ..program.program import Program, tensors_of, value_of
from ..sample import tensor_spec
from .attention import erase_copies_behind_attention, restore_causal_attention
from .export import trace_with_export
from .frontier import keep_outermost
from .leaf_modules import restore_leaves
from .opaque_calls import build_opaque_program
from .symbolic import trace_sequential, trace_symbolically

Mode = Literal["auto", "export", "trace"]

Tracer = Callable[[TracingTarget, Mapping[str, str]], Program]
"""Traces around the opaque modules, given by path with the reasons."""


def select_tracers(
    model: nn.Module, flat: tuple[Tensor, ...], mode: str
) -> list[tuple[str, Tracer]]:
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
        raise InvalidInput(f"unknown tracer {mode!r}; choose from {', '.join(named)}")
    return named[mode]


def _sequential(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    return trace_sequential(subject, {**explain_function_owners(subject.seen), **opaque})


def _trace(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    owners = explain_function_owners(subject.seen)
    if "" in owners:
        raise CaptureError(f"torch.fx: forward of the model itself {owners['']}")
    return trace_symbolically(subject, keep_outermost({**owners, **opaque}))


def _whole(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    return build_opaque_program(subject, opaque[""])


def _export(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    program = trace_with_export(subject, opaque)
    # In this order: leaves first, so that their dropout is not taken for frozen; masks while they
    # are still operations; what is left of dropout last.
    restore_leaves(program)
    restore_causal_attention(program)
    erase_copies_behind_attention(program)
    follow_mode(program)
    return program


def build_captured(program: Program, seen: ForwardObservation) -> Captured:
    program.graph.lint()
    program.references, program.stateful = seen.references, seen.stateful
    program.changed = frozenset(seen.changed)
    program.attributes_read = seen.attributes_read
    # Between traced layers a tensor in a global is like any other, but a number stays what it was.
    # A module that is called as written reads both by itself, and finds what its own process has
    # put there.
    called = program.opaque or program.mode == "sequential"
    lost = seen.globals if called else seen.counters
    if lost and "" not in program.opaque:
        raise CaptureError(f"forward changes the variable {lost[0]} outside the model")
    program.frozen_modules = frozenset(m for m in program.model.modules() if not m.training)
    layers = assign_layers(program)
    for node in (*program.graph.nodes, *program.flat_outputs):
        for tensor in tensors_of(value_of(node)) if isinstance(node, fx.Node) else ():
            tensor_spec(node.name, tensor)  # raises for a shape that depends on data
    program.chain_break = find_chain_break(program, layers, seen)
    return Captured(program, layers, find_cuts(program, layers))
