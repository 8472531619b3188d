"""What ``stagewright plan`` takes on the command line: the type, flag and help of each option."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.plan.plan import Pin


MODEL = "For a model's name instead of a profile"
STEP = "What a step is"
GOAL = "What to look for"
RULES = "What to keep to"
MEMORY = "Memory"
SEARCH = "How long to search"
RESULT = "Result"

Profiles = Annotated[
    list[str],
    Argument(
        metavar="PROFILE|MODEL",
        help="A file written by 'stagewright profile' or 'estimate'; with --batch-size "
        "several, of one model at several sizes of micro-batches. Or a published model's "
        "name, such as gpt2-xl or llama-70b: its costs are estimated.",
    ),
]
Devices = Annotated[
    str,
    Option(
        "--devices",
        "-d",
        help="4x24GB, 2xcpu, 4x8x80GB (4 nodes of 8), 2x80GB,4x24GB (two kinds), 8xH200 "
        "(a device of the catalogue), or a cluster file.",
        rich_help_panel=STEP,
    ),
]
Microbatch = Annotated[
    int | None,
    Option(help="Samples in a micro-batch; 1 if not given.", rich_help_panel=MODEL),
]
SequenceLength = Annotated[
    int | None,
    Option(
        help="Tokens of a sample; those of the model's publication if not given.",
        rich_help_panel=MODEL,
    ),
]
Precision = Annotated[
    str | None,
    Option(
        help="fp32, tf32, bf16 or fp16, of weights, gradients and activations; bf16 if not "
        "given, on CPUs fp32.",
        rich_help_panel=MODEL,
    ),
]
EstimateFor = Annotated[
    str | None,
    Option(
        metavar="KIND",
        help="The catalogue's device to estimate for, if --devices does not name it.",
        rich_help_panel=MODEL,
    ),
]
Calibrate = Annotated[
    list[Path] | None,
    Option(
        metavar="PROFILE",
        help="Calibrate the estimate by this measured profile. May be repeated.",
        rich_help_panel=MODEL,
    ),
]
Microbatches = Annotated[
    int | None,
    Option(
        "--microbatches",
        "-m",
        help="Micro-batches per training step; 8 if not given, for a model's name at least as "
        "many as devices. With --batch-size, which it has to divide, the size of micro-batches "
        "follows.",
        rich_help_panel=STEP,
    ),
]
BatchSize = Annotated[
    int | None,
    Option(
        help="Samples per training step: the size of micro-batches is chosen too. For speed "
        "none is chosen below the sizes profiled; others are estimated in proportion.",
        rich_help_panel=STEP,
    ),
]
Schedule = Annotated[
    str,
    Option(
        help="gpipe, 1f1b, interleaved_1f1b, looped_bfs, zero_bubble, "
        "interleaved_zero_bubble, zbv or dualpipev.",
        rich_help_panel=STEP,
    ),
]
Chunks = Annotated[
    int,
    Option(help="Stages a device, for the schedules that take several.", rich_help_panel=STEP),
]
ExtraInFlight = Annotated[
    int,
    Option(
        help="Micro-batches a stage may run ahead beyond its warm-up (1f1b), where that is faster.",
        rich_help_panel=STEP,
    ),
]
Objective = Annotated[
    str,
    Option(
        help="What to minimise: step_time, throughput, latency (forward only), memory, "
        "devices, balance_time, balance_size or pipedream.",
        rich_help_panel=GOAL,
    ),
]
Stages = Annotated[
    int | None,
    Option(
        help="Exactly this many stages; otherwise the best number is found.",
        rich_help_panel=GOAL,
    ),
]
MaxStages = Annotated[int | None, Option(help="At most this many stages.", rich_help_panel=GOAL)]
MaxReplicas = Annotated[
    str,
    Option(
        metavar="N|any",
        help="At most this many devices a stage, which share its micro-batches.",
        rich_help_panel=GOAL,
    ),
]
Recompute = Annotated[
    str | None,
    Option(
        help="never, auto or always: keep a stage's inputs only and run its forward again. "
        "never if not given, auto for a model's name.",
        rich_help_panel=GOAL,
    ),
]
Order = Annotated[
    str,
    Option(
        help="given, or any to reorder branches that do not depend on each other (in Python "
        "and over HTTP: layer_order).",
        rich_help_panel=GOAL,
    ),
]
Skips = Annotated[
    str,
    Option(
        help="relay, or direct where values that a later stage reads may go past those between.",
        rich_help_panel=GOAL,
    ),
]
Together = Annotated[
    list[str] | None,
    Option(
        metavar="FIRST:LAST",
        help="Layers from one to the other share a stage. May be repeated.",
        rich_help_panel=RULES,
    ),
]
NoCutAfter = Annotated[
    list[str] | None,
    Option(
        metavar="LAYER",
        help="No stage ends with this layer. May be repeated.",
        rich_help_panel=RULES,
    ),
]
Pins = Annotated[
    list[str] | None,
    Option(
        metavar="LAYER=STAGE|@KIND",
        help="A layer's stage, counted from 0, or its kind of device. May be repeated.",
        rich_help_panel=RULES,
    ),
]
Tied = Annotated[
    str,
    Option(
        help="priced: layers that share a weight may be apart, at the price of summing its "
        "gradients; together: they may not.",
        rich_help_panel=RULES,
    ),
]
Optimizer = Annotated[
    str,
    Option(
        help="none, sgd, momentum or adam: the state it keeps takes memory.",
        rich_help_panel=MEMORY,
    ),
]
MemoryFraction = Annotated[
    float,
    Option(help="Share of each device's memory that may be used.", rich_help_panel=MEMORY),
]
Gap = Annotated[
    float,
    Option(
        help="Good enough: 0.01 stops once no plan can be more than 1 % better.",
        rich_help_panel=SEARCH,
    ),
]
Deadline = Annotated[
    float | None,
    Option(
        metavar="SECONDS",
        min=0.0,
        help="Take the best plan found until then; none is exit code 6.",
        rich_help_panel=SEARCH,
    ),
]
Output = Annotated[
    Path | None,
    Option("--output", "-o", help="Write the plan to this file.", rich_help_panel=RESULT),
]


def number_or_any(text: str) -> int | None:
    """A number of replicas; `None` for ``any``.

    Raises:
        InvalidInput: Neither a number nor ``any``.
    """
    if text == "any":
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            f"--max-replicas takes a number or 'any', not {text!r}", field="/max_replicas"
        ) from None


def pair(text: str) -> tuple[str, str]:
    """Two layers that share a stage, from ``FIRST:LAST``.

    Raises:
        InvalidInput: The text is not two names.
    """
    first, colon, last = text.partition(":")
    if not (first and colon and last) or ":" in last:
        raise InvalidInput(
            f"--together takes two layer names as FIRST:LAST, not {text!r}", field="/together"
        )
    return first, last


def pins(texts: Sequence[str]) -> tuple[Pin, ...]:
    """Where layers have to be, from ``LAYER=STAGE`` or ``LAYER=@KIND``.

    Raises:
        InvalidInput: A text is neither.
    """
    return tuple(_pin(text) for text in texts)


def _pin(text: str) -> Pin:
    from ...core.plan.plan import Pin

    layer, _, place = text.rpartition("=")
    if layer and place.startswith("@") and len(place) > 1:
        return Pin(layer=layer, kind=place[1:])
    if layer and place.isascii() and place.isdigit():
        return Pin(layer=layer, stage=int(place))
    raise InvalidInput(
        f"--pin takes LAYER=STAGE, stages counted from 0, or LAYER=@KIND, not {text!r}",
        field="/pins",
    )
