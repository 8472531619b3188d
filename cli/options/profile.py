"""What ``stagewright profile`` takes beside a model: the type, flag and help of each option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

LINKS = "Links between devices"

Loss = Annotated[str | None, Option(help="package.module:function of output and target; the loss.")]
Target = Annotated[
    str | None,
    Option(help="package.module:function that returns the target; with --family a tensor."),
]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; the model is moved there.")]
Threads = Annotated[int | None, Option(help="CPU threads of the measured model.")]
Neighbours = Annotated[
    int | None, Option(help="Processes kept busy alike on other cores meanwhile.")
]
Budget = Annotated[float | None, Option(help="Seconds to spend on repeats.")]
Autocast = Annotated[str | None, Option(help="Run under torch.autocast: bf16 or fp16.")]
Compiled = Annotated[
    bool | None,
    Option("--compile/--no-compile", help="Compile every layer with torch.compile first."),
]
Deduplicate = Annotated[
    bool | None,
    Option(
        "--deduplicate/--no-deduplicate",
        help="Measure one of the layers that do the same, or each.",
    ),
]
Links = Annotated[
    bool,
    Option(
        "--links",
        help="Measure the links between devices instead; no model.",
        rich_help_panel=LINKS,
    ),
]
Ranks = Annotated[
    int | None,
    Option(min=2, help="CPU ranks to start, instead of a rank a device.", rich_help_panel=LINKS),
]
Timeout = Annotated[
    float,
    Option(min=1, help="Seconds a rank waits for another.", rich_help_panel=LINKS),
]
Output = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        help="Write the result to this file: profile.json, or cluster.json with --links.",
    ),
]
