"""Models that can be named instead of sent: a family and its configuration.

Configurations are checked here, without torch; `profiler.models.families` builds the modules.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..document import Record
from .transformer_families import BertSpec, LlamaSpec, MixtralSpec, Qwen2Spec, T5Spec, ViTSpec

Size = Annotated[int, Field(ge=1, le=2**20)]
Probability = Annotated[float, Field(ge=0, le=1)]


class MLPConfig(Record):
    """A stack of linear layers with ReLU between them."""

    input_size: Size = 64
    hidden_size: Size = 128
    output_size: Size = 10
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 8
    dropout: Probability = 0.0


class ResNetConfig(Record):
    """A residual network for images (He et al. 2016); 50 has 25.6 million parameters."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    num_classes: Size = 1000
    width: Annotated[int, Field(ge=1, le=1024)] = 64
    in_channels: Annotated[int, Field(ge=1, le=64)] = 3


class UNetConfig(Record):
    """An encoder and decoder joined by long skip connections (Ronneberger et al. 2015)."""

    in_channels: Annotated[int, Field(ge=1, le=64)] = 3
    num_classes: Annotated[int, Field(ge=1, le=1024)] = 2
    width: Annotated[int, Field(ge=1, le=256)] = 32
    depth: Annotated[int, Field(ge=1, le=6)] = 4


class GPT2Config(Record):
    """GPT-2 with a tied language-model head, built by ``transformers``; defaults are small."""

    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Annotated[int, Field(ge=1, le=16384)] = 768
    n_layer: Annotated[int, Field(ge=1, le=256)] = 12
    n_head: Annotated[int, Field(ge=1, le=256)] = 12
    dropout: Probability = 0.1

    @model_validator(mode="after")
    def _check(self) -> GPT2Config:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        return self


class MLPSpec(Record):
    family: Literal["mlp"]
    config: MLPConfig = MLPConfig()


class ResNetSpec(Record):
    family: Literal["resnet"]
    config: ResNetConfig = ResNetConfig()


class UNetSpec(Record):
    family: Literal["unet"]
    config: UNetConfig = UNetConfig()


class GPT2Spec(Record):
    family: Literal["gpt2"]
    config: GPT2Config = GPT2Config()


ModelSpec = Annotated[
    MLPSpec
    | ResNetSpec
    | UNetSpec
    | GPT2Spec
    | LlamaSpec
    | Qwen2Spec
    | MixtralSpec
    | BertSpec
    | T5Spec
    | ViTSpec,
    Field(discriminator="family"),
]
"""A model asked for by family and configuration, e.g. ``{"family": "gpt2", "config": {}}``."""
