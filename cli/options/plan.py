"""Flags of ``stagewright plan``, with their types and help, and parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.errors import InvalidInput
from ...formats.target_tables import TARGET_NAMES
from ..support.read_documents import build_record

if TYPE_CHECKING:
    from ...core.cluster.reserves import MemoryReserves
    from ...core.plan.plan import Pin


MODEL = "With a model name instead of a profile"
STEP = "Training step"
GOAL = "Objective and options"
RULES = "Constraints"
MEMORY = "Memory"
SEARCH = "Search"
RESULT = "Output"


def _option(group: str, help: str, *names: str, **settings: Any) -> Any:
    return Option(*names, help=help, rich_help_panel=group, **settings)


Profiles = Annotated[
    list[str],
    Argument(
        metavar="PROFILE|MODEL",
        help="A file written by 'stagewright profile' or 'estimate'; with --batch-size, "
        "several files of one model at different micro-batch sizes. Or a model whose costs are "
        "then estimated: the name of a published one, such as gpt2-xl or llama-70b, or a Hugging "
        "Face config.json or its folder.",
    ),
]
Devices = Annotated[
    str,
    _option(
        STEP,
        "4x24GB, 2xcpu, 4x8x80GB (4 nodes of 8), 2x80GB,4x24GB (two kinds), 8xH200 "
        "(an accelerator from the catalogue), or a cluster file.",
        "--devices",
        "-d",
    ),
]
Microbatch = Annotated[int | None, _option(MODEL, "Samples in a micro-batch. Default: 1.")]
SequenceLength = Annotated[
    int | None, _option(MODEL, "Tokens per sample. Default: the model's published length.")
]
Precision = Annotated[
    str | None,
    _option(
        MEMORY,
        "Recipe of training: fp32, bf16 (all in bf16), bf16_mixed (fp32 gradients and master "
        "weights), bf16_mixed_bf16_gradients, fp16_mixed, bf16_autocast or fp16_autocast; for "
        "estimates tf32, too. Default: the usual one of the profile's weights; estimates are "
        "bf16_mixed, or fp32 on CPUs.",
    ),
]
EstimateFor = Annotated[
    str | None,
    _option(
        MODEL,
        "Accelerator from the catalogue to estimate for, if --devices does not name one.",
        metavar="KIND",
    ),
]
Calibrate = Annotated[
    list[Path] | None,
    _option(
        MODEL, "Calibrate the estimate with this measured profile. Repeatable.", metavar="PROFILE"
    ),
]
Microbatches = Annotated[
    str,
    _option(
        STEP,
        "Micro-batches per training step; auto takes more until the bubble is under 10 % or "
        "more save little. With --batch-size, a number must divide the batch and fixes the "
        "micro-batch size.",
        "--microbatches",
        "-m",
        metavar="N|auto",
    ),
]
BatchSize = Annotated[
    int | None,
    _option(
        STEP,
        "Samples per training step; the micro-batch size is then chosen, too. When optimizing "
        "speed, no size below the smallest profiled is chosen; other sizes are estimated "
        "proportionally.",
    ),
]
Schedule = Annotated[
    str,
    _option(
        STEP,
        "gpipe, 1f1b, interleaved_1f1b, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv or "
        "dualpipev; auto takes the fastest, and 1f1b unless another is 2 % faster.",
    ),
]
Chunks = Annotated[
    str,
    _option(
        STEP,
        "Stages per device, for interleaved_1f1b, looped_bfs and interleaved_zero_bubble; auto "
        "takes the fastest of 2 to 8.",
        metavar="N|auto",
    ),
]
ExtraInFlight = Annotated[
    int,
    _option(
        STEP,
        "Additional micro-batches a stage may run ahead after its warm-up (1f1b), if that is "
        "faster.",
    ),
]
Objective = Annotated[
    str,
    _option(
        GOAL,
        "Quantity to optimize: step_time, throughput, latency (forward only), memory, devices, "
        "balance_time, balance_size or pipedream.",
    ),
]
Stages = Annotated[
    int | None, _option(GOAL, "Exact number of stages. Default: the best number is searched for.")
]
MaxStages = Annotated[int | None, _option(GOAL, "Maximum number of stages.")]
MaxReplicas = Annotated[
    str,
    _option(
        GOAL,
        "Maximum number of devices per stage; its micro-batches are shared among them.",
        metavar="N|any",
    ),
]
Tensor = Annotated[
    str,
    _option(
        GOAL,
        "Devices that split the layers of each replica between them (tensor parallelism); auto "
        "takes the fastest number of those that the profile knows.",
        metavar="N|auto",
    ),
]
Strategies = Annotated[
    str,
    _option(
        GOAL,
        "How the devices of a stage may share its parameters, comma-separated: replicate, zero1 "
        "(optimizer state shared) and fully_shard (weights and gradients too, gathered by layer in "
        "every micro-batch); zero1 goes before fully_shard.",
        metavar="NAME,...",
    ),
]
Recompute = Annotated[
    str | None,
    _option(
        GOAL,
        "Activation recomputation, which keeps only a stage's inputs: never, auto or always; or "
        "layers, which keeps every layer's inputs. Default: never; auto with a model name.",
    ),
]
Order = Annotated[
    str,
    _option(
        GOAL, "given, or any to reorder independent branches (layer_order in Python and over HTTP)."
    ),
]
Skips = Annotated[
    str,
    _option(GOAL, "relay, or direct to let values for a later stage bypass the stages in between."),
]
Target = Annotated[
    str | None,
    _option(
        RULES,
        "Plan under the rules of another runtime, so that 'stagewright export' can write the plan "
        f"for it: {', '.join(TARGET_NAMES)}. The result says what the rules cost.",
        "--for",
        metavar="TARGET",
    ),
]
Together = Annotated[
    list[str] | None,
    _option(
        RULES, "Keep these layers, from FIRST to LAST, in one stage. Repeatable.",
        metavar="FIRST:LAST",
    ),
]  # fmt: skip
NoCutAfter = Annotated[
    list[str] | None,
    _option(RULES, "Do not end a stage with this layer. Repeatable.", metavar="LAYER"),
]
Pins = Annotated[
    list[str] | None,
    _option(
        RULES,
        "Pin a layer to a stage, counted from 0, or to a kind of device. Repeatable.",
        metavar="LAYER=STAGE|@KIND",
    ),
]
Tied = Annotated[
    str,
    _option(
        RULES,
        "priced: layers that share a weight may be in different stages, at the cost of summing "
        "its gradients; together: they may not.",
    ),
]
CutAt = Annotated[
    str,
    _option(
        RULES, "layers, or blocks to cut only where a repeated block of the model begins or ends."
    ),
]
Regular = Annotated[
    str,
    _option(
        RULES,
        "grid: equally many replicas for every stage; equal_blocks: equally many blocks of the "
        "model besides; no: neither.",
    ),
]
RegularWithin = Annotated[
    float | None,
    _option(
        RULES,
        "With 0.02, take the plan that --regular asks for only if it is at most 2 % slower than "
        "the best of all. Default: always.",
        metavar="FRACTION",
    ),
]
Optimizer = Annotated[
    str,
    _option(
        MEMORY,
        "Optimizer whose state takes memory: none, sgd, momentum, adam (AdamW, too), adamw_8bit, "
        "adafactor or muon.",
    ),
]
MemoryFraction = Annotated[
    float | None,
    _option(
        MEMORY,
        "Fraction of each device's memory that may be used, before reserves.",
    ),
]
Reserves = Annotated[
    str | None,
    _option(
        MEMORY,
        "Memory of each device left to others: none, or such as "
        "context=0.7GB,communication=0.7GB,fragmentation=0.05. Default: the usual of the profile's "
        "device, none on CPUs.",
        metavar="NAME=SIZE,...",
    ),
]
Robust = Annotated[
    bool,
    _option(
        GOAL,
        "Take the plan whose worst case within the error bands of the profile and the links is "
        "best, instead of the best at the times they state.",
    ),
]
Gap = Annotated[
    float,
    _option(
        SEARCH, "Relative optimality gap: with 0.01, stop once no plan can be more than 1 % better."
    ),
]
Deadline = Annotated[
    float | None,
    _option(
        SEARCH,
        "Time limit; the best plan found by then is returned, or exit code 6 if there is none.",
        metavar="SECONDS",
        min=0.0,
    ),
]
Output = Annotated[Path | None, _option(RESULT, "Write the plan to this file.", "--output", "-o")]


def parse_reserves(text: str | None) -> MemoryReserves | None:
    """Parse reserves of memory: ``none``, or some terms; those left out are zero."""
    from ...core.cluster.reserves import MemoryReserves

    if text is None:
        return None
    values: dict[str, int | float] = {}
    for part in () if text == "none" else text.split(","):
        name, _, value = part.partition("=")
        try:
            if name == "fragmentation":
                values[name] = float(value)
            elif name in ("context", "communication"):
                values[f"{name}_bytes"] = _parse_bytes(value)
            else:
                raise ValueError
        except ValueError:
            raise InvalidInput(
                "--reserves takes none, or terms such as context=0.7GB, communication=512MiB and "
                f"fragmentation=0.05, not {part!r}",
                field="/reserves",
            ) from None
    reserves: MemoryReserves = build_record(MemoryReserves, **values)
    return reserves


def _parse_bytes(text: str) -> int:
    from ...core.cluster.shorthand import UNIT_BYTES

    unit = next((unit for unit in UNIT_BYTES if text.lower().endswith(unit)), "")
    return int(
        float(text.removesuffix(text[-len(unit) :]) if unit else text) * UNIT_BYTES.get(unit, 1)
    )


def parse_max_replicas(text: str) -> int | None:
    """Parse a number of replicas; return `None` for ``any``."""
    if text == "any":
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            f"--max-replicas takes a number or 'any', not {text!r}", field="/max_replicas"
        ) from None


def parse_tensor(text: str) -> int | str:
    """Parse a degree of tensor parallelism, or ``auto``."""
    count = parse_count(text, "--tensor")
    return "auto" if count is None else count


def parse_count(text: str, flag: str) -> int | None:
    """Parse the number of a flag; return `None` for ``auto``."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        field = {"--microbatches": "num_microbatches"}.get(flag, flag[2:])
        raise InvalidInput(
            f"{flag} takes a number or 'auto', not {text!r}", field=f"/{field}"
        ) from None


def parse_together(text: str) -> tuple[str, str]:
    """Parse the first and last of layers that share a stage, from ``FIRST:LAST``."""
    first, colon, last = text.partition(":")
    if not (first and colon and last) or ":" in last:
        raise InvalidInput(
            f"--together takes two layer names as FIRST:LAST, not {text!r}", field="/together"
        )
    return first, last


def parse_pin(text: str) -> Pin:
    """Parse the stage or kind a layer is pinned to, from ``LAYER=STAGE`` or ``LAYER=@KIND``."""
    from ...core.plan.plan import Pin

    # The last "=" separates: a layer's name may hold one, a stage and a kind cannot.
    layer, _, target = text.rpartition("=")
    if layer and target.startswith("@") and len(target) > 1:
        return Pin(layer=layer, kind=target[1:])
    if layer and target.isascii() and target.isdigit():
        return Pin(layer=layer, stage=int(target))
    raise InvalidInput(
        f"--pin takes LAYER=STAGE, with stages counted from 0, or LAYER=@KIND, not {text!r}",
        field="/pins",
    )
