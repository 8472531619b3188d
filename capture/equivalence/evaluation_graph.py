"""Compatibility of a separate evaluation graph with the training graph."""

from __future__ import annotations

from ...core.graph.graph import Boundary
from ..captured import Captured
from ..observation.nested_values import collect_constants
from ..serialize.graph_document import list_parameters


def is_compatible(training: Captured, evaluation: Captured) -> bool:
    """Return True if every segment of one graph can replace the same segment of the other."""
    # A layer must not read a parameter or buffer in evaluation that it does not read in training:
    # another stage may hold it.
    return (
        training.layers.names == evaluation.layers.names
        and all(
            not ours.boundary.legal
            or (theirs.boundary.legal and _forms(ours.boundary) == _forms(theirs.boundary))
            for ours, theirs in zip(training.cuts, evaluation.cuts, strict=True)
        )
        and _outputs(training) == _outputs(evaluation)
        and _reads_no_more(training, evaluation)
    )


def _forms(boundary: Boundary) -> list[tuple[tuple[int, ...], str]]:
    return [(tensor.shape, tensor.dtype) for tensor in boundary.tensors]


def _outputs(captured: Captured) -> tuple[object, ...]:
    program = captured.program
    form = collect_constants(program.output) if program.output is not None else program.out_spec
    return form, len(program.flat_outputs)


def _reads_no_more(training: Captured, evaluation: Captured) -> bool:
    held = {
        record.names: set(record.layers)
        for record in list_parameters(training.program, training.layers)
    }
    return all(
        set(record.layers) <= held[record.names]
        for record in list_parameters(evaluation.program, evaluation.layers)
    )
