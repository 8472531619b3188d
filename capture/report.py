"""Capture report: which layers were traced, which are opaque and why, and what was tried."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.document import Record
from ..core.errors import InvalidInput
from ..core.graph.graph import CaptureMode
from ..core.text_table import format_table, truncate


class CapturedLayer(Record):
    """A layer: ``traced`` into operations, or ``opaque``: called as its author wrote it, and why.

    For a traced layer ``why`` lists the custom functions it calls.
    """

    name: str
    module_type: str
    how: Literal["traced", "opaque"]
    why: str = ""


class CaptureAttempt(Record):
    """A tracer that failed, and its error."""

    tracer: str
    refusal: str


class CaptureReport(Record):
    """Report of a capture.

    Attributes:
        model: The model's class.
        mode: The tracer that succeeded.
        attempts: The tracers that failed before it.
        checked: How the result was compared with the model.
        layers: In execution order.
        num_cuts: Number of boundaries between layers.
        num_legal_cuts: Number of boundaries at which the model may be cut.
        fixed_mode: Operations that stay in training mode when the model is evaluated.
        not_rebuildable: Why the graph needs the model's code; empty if it does not.
        notes: Further remarks.
    """

    model: str
    mode: CaptureMode
    attempts: tuple[CaptureAttempt, ...] = ()
    checked: str
    layers: tuple[CapturedLayer, ...]
    num_cuts: int
    num_legal_cuts: int
    fixed_mode: tuple[str, ...] = ()
    not_rebuildable: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_opaque(self) -> int:
        """Return the number of layers that are, or contain, an opaque module."""
        return sum(layer.how == "opaque" for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: captured by {DESCRIPTIONS[self.mode]}",
            f"  {self.checked}",
            f"  {len(self.layers)} layers, {self.num_opaque} of them opaque; "
            f"{self.num_legal_cuts} of {self.num_cuts} cuts legal",
        ]
        lines += [f"  failed before: {a.tracer}: {plain_reason(a.refusal)}" for a in self.attempts]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {self.not_rebuildable}"] if self.not_rebuildable else []
        rows = [("layer", "module", "how", "why")]
        rows += [(layer.name, layer.module_type, layer.how, layer.why) for layer in self.layers]
        return "\n".join([*lines, "", format_table(rows)])


DESCRIPTIONS: dict[CaptureMode, str] = {
    "sequential": "calling the children of nn.Sequential one after the other",
    "export": "torch.export",
    "trace": "torch.fx symbolic tracing",
    "dynamo": "bytecode capture",
    "sample": "one run, valid for that sample only",
    "modules": "calling the whole model as one opaque layer",
}


MOST = 100
"""Most characters quoted of a tracer's error message."""

_PLAIN = (
    (r"random number was drawn", "it draws random numbers in Python"),
    (r"the shape of '.*' depends on data", "the shape of a value depends on its data"),
    (r"could not guard on data-dependent|inputs to control flow|_local_scalar_dense",
     "it branches on its data"),
    (r"extract specialized integer|number computed from data|data-dependent expression",
     "it computes a number from its data and goes on with it in Python"),
    (r"with two micro-batches in flight",
     "its forward changes what is still needed for the micro-batch before"),
    (r"is not among its own weights", "a layer reads a weight that is not its own"),
    (r"forward changes the variable",
     "its forward changes a variable outside the model, which layers may share"),
    (r"the traced model is not the model|the traced model fails where",
     "traced it would not be the same model: hooks, state kept in Python, random numbers or a "
     "custom derivative get lost"),
    (r"lies in a no_grad or autocast region",
     "what has to stay as written lies in a no_grad or autocast region"),
)  # fmt: skip
"""Patterns in tracers' error messages and what they mean, the most informative first."""

_PREFIX = re.compile(r"^(torch\.export: |torch\.fx: )?(CaptureError: )?")


def plain_reason(refusal: str) -> str:
    """Explain a tracer's error in a clause with "it"; quote its first line if it is unknown."""
    for pattern, meaning in _PLAIN:
        if re.search(pattern, refusal, re.IGNORECASE):
            return meaning
    first = _PREFIX.sub("", refusal.strip().partition("\n")[0])
    return truncate(first.replace("forward of the model itself ", "its own forward "), MOST)


def choose_reason(refusals: Sequence[str]) -> str:
    """Choose the most informative explanation among several errors for one model."""
    reasons = [plain_reason(refusal) for refusal in refusals]
    return next((meaning for _, meaning in _PLAIN if meaning in reasons), reasons[0])


@dataclass(frozen=True)
class CaptureRecipe:
    """The decisions of a capture, with which it can be repeated.

    ``opaque`` has the paths of the opaque modules, with the reasons; ``evaluation`` says whether
    evaluation has a graph of its own, ``stateful`` what modules change in every call, which takes
    two forwards to find out. ``inside`` is the recipe of `Captured.inside`, empty if there is none.
    """

    tracer: str
    opaque: dict[str, str] = field(default_factory=dict)
    evaluation: bool = False
    stateful: dict[str, str] = field(default_factory=dict)
    inside: str = ""

    def to_json(self) -> str:
        data = {"tracer": self.tracer, "opaque": self.opaque, "evaluation": self.evaluation}
        optional = {"stateful": self.stateful, "inside": self.inside}
        return json.dumps(data | {name: value for name, value in optional.items() if value})

    @classmethod
    def from_json(cls, text: str) -> CaptureRecipe:
        """Parse what `to_json` wrote.

        Raises:
            InvalidInput: The text is not a recipe.
        """
        try:
            data = json.loads(text)
            return cls(
                str(data["tracer"]),
                dict(data["opaque"]),
                bool(data["evaluation"]),
                dict(data.get("stateful", {})),
                str(data.get("inside", "")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"not a capture recipe: {error!r}") from None


def find_inside(recipe: str) -> str:
    """Return the recipe by which operations inside modules called whole are captured, if any."""
    return (CaptureRecipe.from_json(recipe).inside if recipe else "") or recipe
