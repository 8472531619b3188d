"""How a model was captured: what was traced, what is called as written and why, what was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..core.document import Record
from ..core.graph.graph import CaptureMode, Graph
from ..core.graph.table import why_not_rebuildable
from ..core.text_table import text_table
from .plain_reasons_tomerge import plain_reason


class CapturedLayer(Record):
    """One layer.

    Attributes:
        name: The module's name.
        module_type: Its class.
        how: ``traced`` into operations, or ``opaque``: called as its author wrote it.
        why: Why it is opaque; of a traced layer, what in it is kept as it is.
    """

    name: str
    module_type: str
    how: Literal["traced", "opaque"]
    why: str = ""


class Attempt(Record):
    """A tracer that was tried in vain, and why it was refused."""

    tracer: str
    refusal: str


class CaptureReport(Record):
    """How a model was captured.

    Attributes:
        model: Its class.
        mode: The tracer that was accepted.
        attempts: Those tried before it.
        checked: How the result was compared with the model.
        layers: In execution order.
        num_cuts: Boundaries between layers.
        num_legal_cuts: Those where the model may be cut.
        fixed_mode: What stays in training mode when the model is switched to evaluation.
        not_rebuildable: Why the graph is of no use without the model's code; empty if it is.
        notes: What else a reader should know.
    """

    model: str
    mode: CaptureMode
    attempts: tuple[Attempt, ...] = ()
    checked: str
    layers: tuple[CapturedLayer, ...]
    num_cuts: int
    num_legal_cuts: int
    fixed_mode: tuple[str, ...] = ()
    not_rebuildable: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_opaque(self) -> int:
        """Layers that are opaque, or hold a module that is."""
        return sum(layer.how == "opaque" for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: captured by {DESCRIPTIONS[self.mode]}",
            f"  {self.checked}",
            f"  {len(self.layers)} layers, {self.num_opaque} of them opaque; "
            f"{self.num_legal_cuts} of {self.num_cuts} cuts legal",
        ]
        lines += [f"  tried before: {a.tracer}: {plain_reason(a.refusal)}" for a in self.attempts]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {self.not_rebuildable}"] if self.not_rebuildable else []
        rows = [("layer", "module", "how", "why")]
        rows += [(layer.name, layer.module_type, layer.how, layer.why) for layer in self.layers]
        return "\n".join([*lines, "", text_table(rows)])


DESCRIPTIONS: dict[CaptureMode, str] = {
    "sequential": "calling the children of nn.Sequential one after the other",
    "export": "torch.export",
    "trace": "torch.fx symbolic tracing",
    "dynamo": "bytecode capture",
    "sample": "one run, valid for that sample only",
    "modules": "calling its modules whole",
}


def capture_report(
    graph: Graph,
    attempts: Sequence[tuple[str, str]],
    checked: str,
    functions: Mapping[int, Sequence[str]] | None = None,
) -> CaptureReport:
    """The report of a captured graph.

    Args:
        graph: The graph.
        attempts: Tracers tried before, each with its refusal.
        checked: How it was compared with the model, in words.
        functions: Custom autograd functions that layers call, by the layer's index.
    """
    functions = functions or {}
    return CaptureReport(
        model=graph.model,
        mode=graph.mode,
        attempts=tuple(Attempt(tracer=tracer, refusal=why) for tracer, why in attempts),
        checked=checked,
        layers=tuple(
            CapturedLayer(
                name=layer.name,
                module_type=layer.module_type,
                how="opaque" if layer.opaque else "traced",
                why=layer.opaque or _kept(functions.get(index, ())),
            )
            for index, layer in enumerate(graph.layers)
        ),
        num_cuts=len(graph.boundaries),
        num_legal_cuts=sum(boundary.legal for boundary in graph.boundaries),
        fixed_mode=graph.fixed_mode,
        not_rebuildable=" ".join(why_not_rebuildable(graph)),
        notes=graph.notes,
    )


def _kept(functions: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(functions))
    return f"calls {names} with its own derivative, kept as it is" if names else ""
