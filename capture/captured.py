"""A captured model, as passed to the profiler and the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..core.errors import CaptureError
from ..core.graph.graph import Boundary, Graph, explain_not_rebuildable
from ..core.graph.tensors import TensorSpec
from .observation.nested_values import collect_constants, insert_tensors
from .program.cuts import Cut
from .program.layers import Layers, explain_kept_functions
from .program.program import Program
from .program.segment import Segment, SegmentSpec, mutates_inputs
from .report import CaptureAttempt, CapturedLayer, CaptureReport
from .sample import CallStructure
from .serialize.graph_document import graph_document, list_parameters


@dataclass
class Captured:
    """A captured model: its `Graph` as data, and the means to run any interval of its layers.

    Attributes:
        cuts: The values live between layers.
        attempts: Tracers that failed before, with their errors.
        evaluation: The model captured in evaluation mode, if that needs a graph of its own.
        inside: For children of an ``nn.Sequential`` that are called whole: the model with their
            operations, at the sample's shapes, where that can be cut alike. Splitting of layers
            over devices needs it.
        checked: How the capture was compared with the model, in words.
    """

    program: Program
    layers: Layers
    cuts: list[Cut]
    attempts: list[tuple[str, CaptureError]] = field(default_factory=list)
    evaluation: Captured | None = None
    inside: Captured | None = None
    checked: str = "not compared with the model"

    @functools.cached_property
    def graph(self) -> Graph:
        return graph_document(self.program, self.layers, self.cuts)

    @property
    def roots(self) -> list[nn.Module]:
        """Return the modules from which the model's tensors are reached, its own among them.

        Whoever replaces a tensor does so under all of them, or its memory is never freed.
        """
        programs = [self.program, *([self.evaluation.program] if self.evaluation else [])]
        return [root for program in programs for root in (program.model, program.holder)]

    @property
    def structure(self) -> CallStructure:
        """Return the names of the model's inputs, in flat order."""
        return self.program.structure

    @property
    def fixed_inputs(self) -> tuple[TensorSpec, ...] | None:
        """Return the inputs as captured if no other shapes are sound; `None` if any are.

        A program of `torch.export` may hold the sample's sizes as numbers, also where it fails for
        no other size.
        """
        both = [self, *([self.evaluation] if self.evaluation is not None else [])]
        is_fixed = any(each.program.mode == "export" for each in both)
        return self.graph.inputs if is_fixed else None

    def report(self) -> CaptureReport:
        """Report how the model was captured, layer by layer, and what was tried before."""
        graph = self.graph
        kept = explain_kept_functions(self.program, self.layers)
        return CaptureReport(
            model=graph.model,
            mode=graph.mode,
            attempts=tuple(
                CaptureAttempt(tracer=tracer, refusal=str(refusal))
                for tracer, refusal in self.attempts
            ),
            checked=self.checked,
            layers=tuple(
                CapturedLayer(
                    name=layer.name,
                    module_type=layer.module_type,
                    how="opaque" if layer.opaque else "traced",
                    why=layer.opaque or kept.get(index, ""),
                )
                for index, layer in enumerate(graph.layers)
            ),
            num_cuts=len(graph.boundaries),
            num_legal_cuts=sum(boundary.legal for boundary in graph.boundaries),
            fixed_mode=graph.fixed_mode,
            not_rebuildable=" ".join(explain_not_rebuildable(graph)),
            notes=graph.notes,
        )

    def segment(
        self,
        first: int,
        last: int,
        *,
        enter: Callable[[Any], Any] | None = None,
        leave: Callable[[Any], Any] | None = None,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        checkpoints: Sequence[tuple[int, int]] = (),
        enter_checkpoint: Callable[[Any], Any] | None = None,
        copy_changed: Callable[[Any], Any] | None = None,
        blocks: bool = False,
    ) -> Segment:
        """Build a module of the layers from ``first`` up to, not including, ``last``.

        The first segment takes the model's flat inputs, any other the values live before it; the
        last one returns the model's flat outputs, any other the values live after it. ``received``
        and ``sent`` select among the live values by position. ``enter`` is applied to every input,
        ``leave`` to every output that crosses a cut. ``checkpoints``, ``enter_checkpoint``,
        ``copy_changed`` and ``blocks`` are those of `SegmentSpec`.
        """
        end = last == len(self.layers)
        inputs = self.program.inputs if first == 0 else self._live(first, received)
        outputs = self.program.flat_outputs if end else self._live(last, sent)
        cuts = [cut.boundary.after + 1 for cut in self.cuts if cut.boundary.legal]
        leave_cut = None if end else leave
        made = SegmentSpec(
            self.program,
            self.layers,
            first,
            last,
            inputs,
            outputs,
            enter,
            leave_cut,
            cuts,
            checkpoints,
            enter_checkpoint,
            copy_changed,
            blocks,
        ).build()
        if self.evaluation is not None:
            made.set_evaluation(
                self.evaluation.segment(
                    first,
                    last,
                    enter=enter,
                    leave=leave,
                    received=received,
                    sent=sent,
                    blocks=blocks,
                )
            )
        return made

    def _live(self, position: int, chosen: Sequence[int] | None) -> list[Any]:
        nodes = self.cuts[position - 1].nodes
        return list(nodes) if chosen is None else [nodes[index] for index in chosen]

    def mutates_inputs(self, first: int, last: int) -> bool:
        """Return True if these layers may change their inputs in place."""
        return mutates_inputs(self.program, self.layers, first, last) or (
            self.evaluation is not None and self.evaluation.mutates_inputs(first, last)
        )

    def unflatten_output(self, flat: Sequence[Any]) -> Any:
        """Rebuild the model's own output structure from its flat outputs."""
        if self.program.output is not None:
            return insert_tensors(self.program.output, list(flat))
        return pytree.tree_unflatten(list(flat), self.program.out_spec)


def is_compatible(training: Captured, evaluation: Captured) -> bool:
    """Return True if every segment of one graph can replace the same segment of the other."""
    return is_cut_alike(training, evaluation) and _outputs(training) == _outputs(evaluation)


def is_cut_alike(one: Captured, other: Captured) -> bool:
    """Return True if another graph can be cut wherever one can, into stages that hold no more."""
    return (
        one.layers.names == other.layers.names
        and all(
            not ours.boundary.legal
            or (theirs.boundary.legal and _forms(ours.boundary) == _forms(theirs.boundary))
            for ours, theirs in zip(one.cuts, other.cuts, strict=True)
        )
        and _reads_no_more(one, other)
    )


def _forms(boundary: Boundary) -> list[tuple[tuple[int, ...], str]]:
    return [(tensor.shape, tensor.dtype) for tensor in boundary.tensors]


def _outputs(captured: Captured) -> tuple[object, ...]:
    program = captured.program
    form = collect_constants(program.output) if program.output is not None else program.out_spec
    return form, len(program.flat_outputs)


def _reads_no_more(training: Captured, evaluation: Captured) -> bool:
    # A layer must not read a parameter or buffer in evaluation that it does not read in training:
    # another stage may hold it.
    held = {
        record.names: set(record.layers)
        for record in list_parameters(training.program, training.layers)
    }
    return all(
        set(record.layers) <= held[record.names]
        for record in list_parameters(evaluation.program, evaluation.layers)
    )
