"""Manifest of a checkpoint: everything but the tensors' values; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue

from ...core.document import Document, Record
from ...core.graph.tensors import ELEMENT_SIZE_BYTES, Dimension, DType

RECORD = "checkpoint.json"
"""File name of the manifest in a step's folder."""

MODEL, OPTIMIZER, RANDOM = "model", "optim", "rng"
"""Prefixes of the keys under which tensors are stored."""

ALLOW_NON_FINITE = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")
"""Non-finite numbers are allowed: a best loss starts at infinity, and a run may diverge."""


class SavedTensor(Record):
    """Shape and dtype of a stored tensor."""

    shape: tuple[Dimension, ...] = ()
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_SIZE_BYTES[self.dtype]


class SavedState(Record):
    """Optimizer state of one parameter.

    Attributes:
        group: Index of its hyperparameters in `SavedOptimizer.groups`.
        slots: Tensors by slot, such as ``exp_avg``; empty before the first step.
        values: State kept as plain numbers.
    """

    model_config = ALLOW_NON_FINITE

    group: int = Field(ge=0)
    slots: dict[str, SavedTensor] = Field(default_factory=dict)
    values: dict[str, JsonValue] = Field(default_factory=dict)


class SavedOptimizer(Record):
    """Optimizer state by parameter, independent of the plan.

    Attributes:
        kind: The optimizer's class name.
        groups: Distinct sets of hyperparameters.
        parameters: State by canonical name; parameters unknown to the optimizer are absent.
    """

    model_config = ALLOW_NON_FINITE

    kind: str
    groups: tuple[dict[str, JsonValue], ...]
    parameters: dict[str, SavedState]


class Checkpoint(Document):
    """Manifest of one saved step.

    Attributes:
        step: Step number given when saving.
        ranks: Number of processes that saved it.
        pipeline_steps: The pipeline's own ``steps``, which seed keyed dropout.
        plan: Content id of the plan it was trained under, if known.
        model: Parameters and persistent buffers by canonical name.
        aliases: Canonical name of a tied tensor, by each of its other names.
        optimizer: `None` if saved without an optimizer.
        random: Kinds of random generators saved by each rank; empty if not requested.
        extra: Values added by the caller: epoch, schedulers, position in the data.
        files: Size in bytes of every file next to the manifest.
    """

    SCHEMA: ClassVar[Literal["stagewright.checkpoint/1"]] = "stagewright.checkpoint/1"
    model_config = ALLOW_NON_FINITE

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
        """Return the canonical names under which a tensor with these names was saved.

        Empty if it was not saved; several if it was saved as several tensors.
        """
        found = (self.aliases.get(name, name) for name in names)
        return tuple(dict.fromkeys(name for name in found if name in self.model))

    def tensors(self, *, optimizer: bool = True) -> dict[str, SavedTensor]:
        """Return all stored tensors by key, the model's first."""
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
