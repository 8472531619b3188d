"""Cells of the conformance table and their outcomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Side = Literal["ours", "torch"]

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "zero_bubble": 1,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
    "forward_only": 1,
}
"""Every schedule, and how many stages it puts on a rank here."""

RANKS = (2, 4)

NUM_MICROBATCHES = 8
"""Enough for DualPipeV, which wants one a stage, and a multiple of the ranks."""

TOLERANCE = 1e-9
"""Relative, in norm, in double precision."""


@dataclass(frozen=True)
class Cell:
    """A model under a schedule on some ranks."""

    model: str
    schedule: str
    ranks: int

    @property
    def chunks(self) -> int:
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def trains(self) -> bool:
        return self.schedule != "forward_only"

    def __str__(self) -> str:
        return f"{self.model}, {self.schedule}, {self.ranks} ranks"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell on one side.

    Attributes:
        verdict: ``equal``, ``refused: ...``, ``wrong``, ``error`` or ``hang``; empty if not run.
        detail: What differs and by how much, or the error's first line.
    """

    verdict: str = ""
    detail: str = ""

    @property
    def word(self) -> str:
        return self.verdict.partition(":")[0]


@dataclass(frozen=True)
class Row:
    """A cell with both outcomes."""

    cell: Cell
    ours: Outcome
    torch: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            **asdict(self.cell),
            "stages": self.cell.stages,
            "ours": self.ours.verdict,
            "torch": self.torch.verdict,
            "ours_detail": self.ours.detail,
            "torch_detail": self.torch.detail,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """Return a row as it was printed."""
        return cls(
            Cell(data["model"], data["schedule"], data["ranks"]),
            Outcome(data["ours"], data["ours_detail"]),
            Outcome(data["torch"], data["torch_detail"]),
        )
