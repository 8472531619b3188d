"""Bytes that training takes per parameter: recipes of precision, and states of optimizers.

A recipe says in which type layers compute, gradients are summed and the optimizer updates. It adds
to a profile's weights what its layers alone do not show: wider gradients, a second copy of the
weights, and the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ..document import Record

Recipe = Literal[
    "fp32",
    "bf16",
    "bf16_mixed",
    "bf16_mixed_bf16_gradients",
    "fp16_mixed",
    "bf16_autocast",
    "fp16_autocast",
]
"""Name of a recipe of precision."""

Optimizer = Literal["none", "sgd", "momentum", "adam", "adamw_8bit", "adafactor", "muon"]
"""Name of an optimizer; ``adam`` stands for AdamW, too."""

FloatType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RecipeEntry:
    """Types and bytes that a recipe of precision keeps of each parameter.

    Attributes:
        weights: Type of the weights that the model's modules hold.
        gradients: Type that gradients are summed in over micro-batches and replicas.
        copy_bytes: Bytes a parameter of the second copy of the weights: in float32 where the
            optimizer updates that, in 16 bits where autocast converts for every layer.
        moment_bytes: Bytes of each of the optimizer's moments.
        autocast: Type that ``torch.autocast`` converts to; `None` for none.
        scales_loss: Whether the loss is scaled, as gradients in float16 would underflow.
        text: The recipe in words.
        source: Where it is described.
    """

    weights: FloatType
    gradients: FloatType
    copy_bytes: int
    moment_bytes: int
    text: str
    source: str
    autocast: FloatType | None = None
    scales_loss: bool = False


AMP = "torch.amp documentation; Micikevicius et al. 2018, section 3.1"

RECIPES: dict[Recipe, RecipeEntry] = {
    "fp32": RecipeEntry(
        "float32", "float32", 0, 4,
        "float32 throughout", "torch's default",
    ),
    "bf16": RecipeEntry(
        "bfloat16", "bfloat16", 0, 2,
        "bfloat16 throughout, the optimizer's moments included",
        "torch.optim keeps moments in the parameters' type",
    ),
    "bf16_mixed": RecipeEntry(
        "bfloat16", "float32", 4, 4,
        "bfloat16 weights, float32 gradients and master weights",
        "Megatron-LM, Float16OptimizerWithFloat16Params with accumulate_allreduce_grads_in_fp32",
    ),
    "bf16_mixed_bf16_gradients": RecipeEntry(
        "bfloat16", "bfloat16", 4, 4,
        "bfloat16 weights and gradients, float32 master weights",
        "Rajbhandari et al. 2020 (ZeRO), section 3.1: 16 bytes a parameter with Adam",
    ),
    "fp16_mixed": RecipeEntry(
        "float16", "float32", 4, 4,
        "float16 weights, float32 gradients and master weights, scaled loss",
        "Micikevicius et al. 2018, sections 3.1 and 3.2", scales_loss=True,
    ),
    "bf16_autocast": RecipeEntry(
        "float32", "float32", 2, 4,
        "float32 weights and gradients, converted to bfloat16 once a step", AMP,
        autocast="bfloat16",
    ),
    "fp16_autocast": RecipeEntry(
        "float32", "float32", 2, 4,
        "float32 weights and gradients, converted to float16 once a step, scaled loss", AMP,
        autocast="float16", scales_loss=True,
    ),
}  # fmt: skip

BYTES: dict[FloatType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class OptimizerEntry:
    """State that an optimizer keeps for a parameter.

    Attributes:
        moments: Averages with an element for each of the parameter's, in the recipe's type.
        fixed: Bytes an element whatever the recipe.
        source: Where they come from.
    """

    moments: int
    source: str
    fixed: Fraction = Fraction(0)


OPTIMIZERS: dict[Optimizer, OptimizerEntry] = {
    "none": OptimizerEntry(0, "no update"),
    "sgd": OptimizerEntry(0, "torch.optim.SGD without momentum"),
    "momentum": OptimizerEntry(1, "torch.optim.SGD: momentum_buffer"),
    "adam": OptimizerEntry(2, "torch.optim.Adam and AdamW: exp_avg and exp_avg_sq"),
    "adamw_8bit": OptimizerEntry(
        0,
        "bitsandbytes AdamW8bit (Dettmers et al. 2022): two moments of a byte, and a float32 scale "
        "of each for every 256; tensors below 4,096 elements keep float32",
        fixed=2 + Fraction(2 * 4, 256),
    ),
    "adafactor": OptimizerEntry(
        0,
        "torch.optim.Adafactor (Shazeer and Stern 2018): sums of a matrix's rows and columns, less "
        "than 1 % of its elements from 256 x 256 on, are not counted",
    ),
    "muon": OptimizerEntry(
        1, "torch.optim.Muon: momentum_buffer; AdamW, which those not matrices need, keeps two"
    ),
}


class TrainingBytes(NamedTuple):
    """Bytes per trainable element beside weights and gradients in the weights' type.

    Attributes:
        gradients: What gradients take more.
        copies: The second copy of the weights.
        state: The optimizer's state; a fraction where scales are shared by many elements.
        master_copies: Part of ``copies`` that belongs to the optimizer.
    """

    gradients: int
    copies: int
    state: Fraction
    master_copies: int = 0

    def of_state(self, elements: Any) -> Any:
        """Return the bytes of the optimizer's state of so many elements, a number or an array."""
        return elements * self.state.numerator // self.state.denominator

    def of_update(self, elements: Any) -> Any:
        """Return the bytes that only the optimizer's update needs, which replicas may share."""
        return elements * self.master_copies + self.of_state(elements)

    def of(self, elements: Any) -> Any:
        """Return all bytes of so many elements."""
        return elements * (self.gradients + self.copies) + self.of_state(elements)


def training_bytes(precision: Recipe | None, optimizer: Optimizer) -> TrainingBytes:
    """Return what a recipe and an optimizer add; without a recipe, as for ``fp32``."""
    recipe, entry = RECIPES[precision or "fp32"], OPTIMIZERS[optimizer]
    copies = recipe.copy_bytes if optimizer != "none" or recipe.autocast else 0
    return TrainingBytes(
        gradients=BYTES[recipe.gradients] - BYTES[recipe.weights],
        copies=copies,
        state=entry.fixed + entry.moments * recipe.moment_bytes,
        master_copies=0 if recipe.autocast else copies,
    )


class BytesPerParameter(Record):
    """Bytes per trainable parameter that do not depend on micro-batches.

    Attributes:
        weights: In the type of the model's modules.
        gradients: In the type they are summed in.
        weight_copies: Master weights in float32, or those that autocast converts.
        optimizer: The optimizer's state.
    """

    weights: float = Field(ge=0)
    gradients: float = Field(ge=0)
    weight_copies: float = Field(0.0, ge=0)
    optimizer: float = Field(0.0, ge=0)

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.weight_copies + self.optimizer

    def __str__(self) -> str:
        parts = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("copy of the weights", self.weight_copies),
            ("optimizer", self.optimizer),
        ]
        listed = ", ".join(f"{name} {value:.3g}" for name, value in parts if value)
        return f"{self.total:.4g} bytes a parameter ({listed})"
