"""One row of the capture table, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal[
    "equal", "equal, with opaque layers", "equal in training", "refused", "WRONG", "failed",
    "not built",
]  # fmt: skip
Mode = Literal["equal", "refused", "WRONG", ""]


@dataclass
class Row:
    """Result of one architecture.

    Attributes:
        verdict: ``equal in training`` refuses evaluation mode; ``refused`` is an error of the
            library's own; ``failed`` a crash, a time-out, or any other error; ``not built`` a drawn
            architecture that does not even run eagerly.
        reason: First line of the error, or what differs and by how much.
        mode: How it was captured, as `Graph` says.
        opaque: Name of each opaque layer, and why it is one.
        outputs: Largest relative difference from eager; likewise ``gradients`` and ``buffers``.
        parameters: Likewise, after steps of SGD.
        eval: Whether evaluation mode is honoured; ``refused`` if it raises instead of being wrong.
        notes: What the graph tells its reader.
        capture_s: Time of `trace`, its own gate included.
    """

    name: str
    kind: str
    trap: str = ""
    verdict: Verdict = "failed"
    reason: str = ""
    mode: str = ""
    layers: int = 0
    cuts: int = 0
    legal_cuts: int = 0
    opaque: dict[str, str] = field(default_factory=dict)
    outputs: float | None = None
    gradients: float | None = None
    buffers: float | None = None
    parameters: float | None = None
    eval: Mode = ""
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.verdict in ("equal", "equal, with opaque layers")

    def note(self, kind: str, difference: float) -> None:
        """Keep the largest difference of outputs, gradients, buffers or parameters."""
        column = f"{kind}s"
        setattr(self, column, max(getattr(self, column) or 0.0, difference))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
