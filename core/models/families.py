"""Models that can be named instead of sent: a family and its configuration.

Configurations are checked here, without torch; `profiler.models.families` builds the modules. Those
of the package ``transformers`` are named by its ``model_type``; their fields are those of its
configuration classes that determine shapes, under the same names, with small defaults. Nothing here
names a class, a path or code to load.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..document import Record

Size = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=2, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**20)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=512)]
Heads = Annotated[int, Field(ge=1, le=512)]
Probability = Annotated[float, Field(ge=0, le=1)]


class FamilyConfig(Record):
    """Base of the configurations, some of whose sizes must be multiples of others."""

    MULTIPLES: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Names of such sizes, each with that of its divisor."""

    @model_validator(mode="after")
    def _check_multiples(self) -> Self:
        for name, divisor in self.MULTIPLES:
            whole, part = getattr(self, name), getattr(self, divisor)
            if whole % part:
                raise ValueError(f"{name} ({whole}) must be a multiple of {divisor} ({part})")
        return self


class MLPConfig(FamilyConfig):
    """A stack of linear layers with ReLU between them."""

    input_size: Size = 64
    hidden_size: Size = 128
    output_size: Size = 10
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 8
    dropout: Probability = 0.0


class ResNetConfig(FamilyConfig):
    """A residual network for images (He et al. 2016); 50 has 25.6 million parameters."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    num_classes: Size = 1000
    width: Annotated[int, Field(ge=1, le=1024)] = 64
    in_channels: Annotated[int, Field(ge=1, le=64)] = 3


class UNetConfig(FamilyConfig):
    """An encoder and decoder joined by long skip connections (Ronneberger et al. 2015)."""

    in_channels: Annotated[int, Field(ge=1, le=64)] = 3
    num_classes: Annotated[int, Field(ge=1, le=1024)] = 2
    width: Annotated[int, Field(ge=1, le=256)] = 32
    depth: Annotated[int, Field(ge=1, le=6)] = 4


class GPT2Config(FamilyConfig):
    """GPT-2 with a tied language-model head, built by ``transformers``; defaults are small."""

    MULTIPLES = (("n_embd", "n_head"),)

    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Annotated[int, Field(ge=1, le=16384)] = 768
    n_layer: Annotated[int, Field(ge=1, le=256)] = 12
    n_head: Annotated[int, Field(ge=1, le=256)] = 12
    dropout: Probability = 0.1


class LlamaConfig(FamilyConfig):
    """Decoder with rotary positions, RMS norm and a gated MLP (Touvron et al. 2023).

    ``num_key_value_heads`` below ``num_attention_heads`` is grouped-query attention.
    """

    MULTIPLES = (
        ("hidden_size", "num_attention_heads"),
        ("num_attention_heads", "num_key_value_heads"),
    )

    vocab_size: Vocabulary = 32000
    hidden_size: Width = 512
    intermediate_size: Width = 1376
    num_hidden_layers: Depth = 8
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads = 8
    max_position_embeddings: Length = 2048
    tie_word_embeddings: bool = False


class Qwen2Config(LlamaConfig):
    """Llama with biases on queries, keys and values (Yang et al. 2024)."""

    vocab_size: Vocabulary = 151936


class MixtralConfig(LlamaConfig):
    """Llama whose MLP is a choice of experts for every token (Jiang et al. 2024)."""

    num_local_experts: Annotated[int, Field(ge=1, le=512)] = 8
    num_experts_per_tok: Annotated[int, Field(ge=1, le=512)] = 2

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is more than "
                f"num_local_experts ({self.num_local_experts})"
            )
        return self


class BertConfig(FamilyConfig):
    """Encoder with a masked-language-model head (Devlin et al. 2019)."""

    MULTIPLES = (("hidden_size", "num_attention_heads"),)

    vocab_size: Vocabulary = 30522
    hidden_size: Width = 256
    intermediate_size: Width = 1024
    num_hidden_layers: Depth = 4
    num_attention_heads: Heads = 4
    max_position_embeddings: Length = 512
    dropout: Probability = 0.1


class T5Config(FamilyConfig):
    """Encoder and decoder with relative positions (Raffel et al. 2020)."""

    vocab_size: Vocabulary = 32128
    d_model: Width = 256
    d_kv: Annotated[int, Field(ge=1, le=1024)] = 64
    d_ff: Width = 1024
    num_layers: Depth = 4
    num_decoder_layers: Depth = 4
    num_heads: Heads = 4
    dropout: Probability = 0.1


class ViTConfig(FamilyConfig):
    """Image classifier over patches (Dosovitskiy et al. 2021)."""

    MULTIPLES = (("hidden_size", "num_attention_heads"), ("image_size", "patch_size"))

    image_size: Annotated[int, Field(ge=1, le=4096)] = 224
    patch_size: Annotated[int, Field(ge=1, le=512)] = 16
    num_channels: Annotated[int, Field(ge=1, le=64)] = 3
    hidden_size: Width = 192
    intermediate_size: Width = 768
    num_hidden_layers: Depth = 4
    num_attention_heads: Heads = 3
    num_labels: Vocabulary = 1000
    dropout: Probability = 0.0


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


class LlamaSpec(Record):
    family: Literal["llama"]
    config: LlamaConfig = LlamaConfig()


class Qwen2Spec(Record):
    family: Literal["qwen2"]
    config: Qwen2Config = Qwen2Config()


class MixtralSpec(Record):
    family: Literal["mixtral"]
    config: MixtralConfig = MixtralConfig()


class BertSpec(Record):
    family: Literal["bert"]
    config: BertConfig = BertConfig()


class T5Spec(Record):
    family: Literal["t5"]
    config: T5Config = T5Config()


class ViTSpec(Record):
    family: Literal["vit"]
    config: ViTConfig = ViTConfig()


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
