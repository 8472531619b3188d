"""Flags of ``stagewright profile`` other than those that name the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

LINKS = "Links between devices"

Loss = Annotated[
    str | None, Option(help="Loss function of (output, target), as package.module:function.")
]
Target = Annotated[
    str | None,
    Option(
        help="package.module:function that returns the target; with --family, a tensor as for "
        "--input."
    ),
]
Device = Annotated[
    str | None, Option(help="cpu, cuda or cuda:N; the model is moved to this device.")
]
Threads = Annotated[int | None, Option(help="CPU threads for the measured model.")]
Neighbours = Annotated[
    int | None,
    Option(help="Number of other processes that keep cores equally busy during measurement."),
]
Budget = Annotated[float | None, Option(help="Time budget for repeats, in seconds.")]
Autocast = Annotated[str | None, Option(help="Run under torch.autocast: bf16 or fp16.")]
Compiled = Annotated[
    bool | None,
    Option("--compile/--no-compile", help="Compile every layer with torch.compile first."),
]
Deduplicate = Annotated[
    bool | None,
    Option(
        "--deduplicate/--no-deduplicate",
        help="Measure identical layers only once, or measure every layer.",
    ),
]
Links = Annotated[
    bool,
    Option(
        "--links",
        help="Measure the links between devices instead of a model.",
        rich_help_panel=LINKS,
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        min=2,
        help="Number of CPU ranks to start, instead of one rank per device.",
        rich_help_panel=LINKS,
    ),
]
Timeout = Annotated[
    float, Option(min=1, help="Seconds a rank waits for another.", rich_help_panel=LINKS)
]
Output = Annotated[
    Path | None,
    Option(
        "--output", "-o", help="Output file. Default: profile.json, or cluster.json with --links."
    ),
]
