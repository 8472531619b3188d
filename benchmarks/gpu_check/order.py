"""Stages of the GPU check in the order of their value, each with a time limit of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODEL_NAMES = (
    "gpt2-medium",
    "resnet50",
    "llama-1b",
    "vit-large",
    "bert-large",
    "unet",
    "efficientnet-b4",
    "switch-base",
)
"""What the check is about; less than all of them does not pass it."""

MODEL = "model-"
"""Start of the name of every stage that measures a model."""


@dataclass(frozen=True)
class Stage:
    """A program to run in a process of its own.

    Attributes:
        name: The name on the command line, and of the file with its result.
        limit_s: When it is killed, with all processes it started.
        arguments: Python's, to which the driver adds the device and where to write the result.
    """

    name: str
    limit_s: float
    arguments: tuple[str, ...]


def _stage(name: str, limit_s: float) -> Stage:
    module = name.replace("-", "_")
    return Stage(name, limit_s, ("-m", f"benchmarks.gpu_check.stages.{module}"))


STAGES: tuple[Stage, ...] = (
    _stage("smoke", 90),
    _stage("two-stages", 180),
    _stage("recording", 90),
    _stage("killed-rank", 150),
    _stage("calibration", 180),
    _stage("marked-tests", 300),
    *(Stage(MODEL + name, 240, ("-m", "benchmarks.gpu_check.study", name)) for name in MODEL_NAMES),
    _stage("torch-throughput", 150),
    _stage("device-table", 120),
)

GROUPS = {"models": tuple(MODEL + name for name in MODEL_NAMES)}
"""Names on the command line that stand for several stages."""


def choose(names: str, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages named, separated by commas, in their own order.

    Raises:
        ValueError: There is no such stage.
    """
    wanted: set[str] = set()
    for name in filter(None, names.split(",")):
        wanted.update(GROUPS.get(name, (name,)))
    unknown = wanted - {stage.name for stage in stages}
    if unknown:
        known = ", ".join([stage.name for stage in stages] + list(GROUPS))
        raise ValueError(f"there is no stage {', '.join(sorted(unknown))}; there are {known}")
    return [stage for stage in stages if stage.name in wanted]
