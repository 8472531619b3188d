"""What a checkpoint says of itself: everything but the numbers in its tensors, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue

from ...core.document import Document, Record
from ...core.graph.tensors import ELEMENT_SIZE_BYTES, Dimension, DType

RECORD = "checkpoint.json"
"""The record's file in the folder of a step."""

MODEL, OPTIMIZER, RANDOM = "model", "optim", "rng"
"""First parts of the keys under which tensors are stored."""

NOT_FINITE = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")
"""A best loss starts at infinity, and a run that diverged is saved as it is."""


class SavedTensor(Record):
    """Shape and dtype of a stored tensor."""

    shape: tuple[Dimension, ...] = ()
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_SIZE_BYTES[self.dtype]


class SavedState(Record):
    """What the optimizer keeps for one parameter.

    Attributes:
        group: Index of its hyperparameters in `SavedOptimizer.groups`.
        slots: Its tensors by slot, such as ``exp_avg``; empty before its first step.
        values: What is kept as plain numbers.
    """

    model_config = NOT_FINITE

    group: int = Field(ge=0)
    slots: dict[str, SavedTensor] = Field(default_factory=dict)
    values: dict[str, JsonValue] = Field(default_factory=dict)


class SavedOptimizer(Record):
    """An optimizer, parameter by parameter, so that it does not depend on the plan.

    Attributes:
        kind: The optimizer's class name.
        groups: The different sets of hyperparameters.
        parameters: By canonical name; parameters the optimizer was not given are absent.
    """

    model_config = NOT_FINITE

    kind: str
    groups: tuple[dict[str, JsonValue], ...]
    parameters: dict[str, SavedState]


class Checkpoint(Document):
    """One saved step.

    Attributes:
        step: As given by who saved it.
        ranks: Processes that saved it.
        pipeline_steps: Those a pipeline had taken (its ``steps``), which keyed dropout follows.
        plan: Content id of the plan it was trained under, if known.
        model: Parameters and persistent buffers by canonical name.
        aliases: Every other name of a tied tensor, and its canonical one.
        optimizer: `None` if none was given.
        random: The kinds of random generator saved on each rank; empty if none was asked for.
        extra: What the caller added: epoch, schedulers, position in the data.
        files: Size in bytes of every file beside the record.
    """

    SCHEMA: ClassVar[Literal["stagewright.checkpoint/1"]] = "stagewright.checkpoint/1"
    model_config = NOT_FINITE

    schema_version: Literal["stagewright.checkpoint/1"] = SCHEMA
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    pipeline_steps: int | None = Field(None, ge=0)
    plan: str | None = None
    model: dict[str, SavedTensor]
    aliases: dict[str, str] = Field(default_factory=dict)
    optimizer: SavedOptimizer | None = None
    random: tuple[tuple[Literal["cpu", "cuda"], ...], ...] = ()
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)

    def names_for(self, names: Iterable[str]) -> tuple[str, ...]:
        """Under which canonical names a tensor with these names was saved.

        None if it was not saved, several if it was saved as different tensors.
        """
        found = (self.aliases.get(name, name) for name in names)
        return tuple(dict.fromkeys(name for name in found if name in self.model))

    def tensors(self, *, optimizer: bool = True) -> dict[str, SavedTensor]:
        """Every stored tensor by its key, the model's first."""
        found = {model_key(name): tensor for name, tensor in self.model.items()}
        if self.optimizer is not None and optimizer:
            for name, state in self.optimizer.parameters.items():
                for slot, tensor in state.slots.items():
                    found[slot_key(name, slot)] = tensor
        return found


def model_key(name: str) -> str:
    return f"{MODEL}.{name}"


def slot_key(name: str, slot: str) -> str:
    return f"{OPTIMIZER}.{name}.{slot}"


def random_key(rank: int, generator: str) -> str:
    return f"{RANDOM}.{rank}.{generator}"
