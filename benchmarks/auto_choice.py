"""What `stagewright plan` chooses on two CPU ranks, beside 1F1B of the same micro-batches, as run.

README's model, eight small ones and four larger ones are profiled, planned twice by the command
line and trained by `stagewright run`, one plan and the other in turn. Where both plans are the
same, their times are, too, and nothing is run. Exits 1 where the choice takes over 3 % longer than
1F1B. Needs a quiet machine of two cores.

    python benchmarks/auto_choice.py --write docs/evidence/defaults.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import markdown_table, write_between_marks
from torch import Tensor, nn

ALLOWED = 1.03
RUNS = 3
STEPS = 3


class Residual(nn.Module):
    """A block of two products around a nonlinearity, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(self.up(x).relu())
        return added


def chain(count: int, *block: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a chain that repeats a few modules."""
    return nn.Sequential(*[make() for _ in range(count) for make in block])


def encoder(width: int) -> nn.Module:
    """Return a transformer block."""
    return nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)


def convolutions(channels: int, count: int) -> nn.Sequential:
    """Return a stem of three channels and a chain of 3 x 3 convolutions."""
    pair = (lambda: nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU)
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *chain(count, *pair))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "README's": (lambda: chain(16, lambda: nn.Linear(512, 512)), lambda: torch.randn(32, 512)),
    "4 x Linear(64)": (lambda: chain(4, lambda: nn.Linear(64, 64)), lambda: torch.randn(8, 64)),
    "32 x Linear(256)": (
        lambda: chain(32, lambda: nn.Linear(256, 256), nn.ReLU),
        lambda: torch.randn(32, 256),
    ),
    "8 x residual(128)": (lambda: chain(8, lambda: Residual(128)), lambda: torch.randn(64, 128)),
    "12 x encoder(64)": (lambda: chain(12, lambda: encoder(64)), lambda: torch.randn(4, 32, 64)),
    "6 x encoder(128)": (lambda: chain(6, lambda: encoder(128)), lambda: torch.randn(4, 64, 128)),
    "8 x convolution(16)": (lambda: convolutions(16, 8), lambda: torch.randn(4, 3, 32, 32)),
    "12 x convolution(32)": (lambda: convolutions(32, 12), lambda: torch.randn(4, 3, 32, 32)),
    "uneven": (
        lambda: nn.Sequential(nn.Linear(64, 2048), *chain(6, lambda: nn.Linear(2048, 2048))),
        lambda: torch.randn(16, 64),
    ),
    "8 x encoder(512)": (lambda: chain(8, lambda: encoder(512)), lambda: torch.randn(2, 64, 512)),
    "12 x residual(512)": (lambda: chain(12, lambda: Residual(512)), lambda: torch.randn(64, 512)),
    "12 x convolution(64)": (lambda: convolutions(64, 12), lambda: torch.randn(4, 3, 48, 48)),
    "6 x encoder(768)": (lambda: chain(6, lambda: encoder(768)), lambda: torch.randn(2, 48, 768)),
}
"""README's, eight small and four larger."""


def build(name: str) -> Any:
    """Return the functions that the command line is told to call for a model."""
    return MODELS[name]


def stagewright(*words: str, cwd: Path) -> str:
    """Run the command and return what it prints."""
    command = [sys.executable, "-m", "stagewright.cli", *words]
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


@dataclass(frozen=True)
class Row:
    """One model: the schedules of both plans, their steps as predicted and as run."""

    model: str
    chosen: str
    microbatches: int
    predicted: float
    measured: float | None
    """1F1B's step, in shares of which both are; `None` where both plans are the same."""

    @property
    def holds(self) -> bool:
        return self.measured is None or self.measured <= ALLOWED


def compare(name: str, folder: Path) -> Row:
    """Profile a model, plan it both ways, and run the plans in turn if they differ."""
    (folder / "its.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"from auto_choice import build as _build\nbuild, sample = _build({name!r})\n"
    )
    own = ("its:build", "--sample", "its:sample")
    stagewright("profile", *own, "-o", "profile.json", cwd=folder)

    def plan(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            stagewright("plan", "profile.json", "-d", "2xcpu", "--json", *words, cwd=folder)
        )
        return found

    chosen = plan("-o", "auto.json")
    count = chosen["num_microbatches"]
    plain = plan("-o", "1f1b.json", "--schedule", "1f1b", "--microbatches", str(count))
    predicted = chosen["step_time_s"] / plain["step_time_s"]
    if (chosen["schedule"], chosen["stages"]) == (plain["schedule"], plain["stages"]):
        return Row(name, chosen["schedule"], count, predicted, None)
    ratios = []
    for run in range(RUNS):
        steps = {}
        for which in ("auto", "1f1b") if run % 2 else ("1f1b", "auto"):
            words = ("run", f"{which}.json", *own, "--steps", str(STEPS), "--json")
            steps[which] = json.loads(stagewright(*words, cwd=folder))["measured_step_s"]
        ratios.append(steps["auto"] / steps["1f1b"])
    return Row(name, chosen["schedule"], count, predicted, statistics.median(ratios))


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    head = ("model", "chosen", "micro-batches", "predicted over 1F1B", "measured over 1F1B")
    cells = [
        (
            row.model,
            row.chosen,
            str(row.microbatches),
            f"{row.predicted:.3f}",
            "the same plan" if row.measured is None else f"{row.measured:.3f}",
        )
        for row in rows
    ]
    return markdown_table(head, cells, left=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    rows = []
    for name in MODELS:
        if given.only is None or given.only in name:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(name, Path(folder)))
            print(rows[-1], flush=True)
    print(table(rows))
    if given.write is not None:
        write_between_marks(given.write, "auto_choice.py", table(rows))
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
