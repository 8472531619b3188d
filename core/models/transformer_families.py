"""Transformer families of the package ``transformers``, named by its ``model_type``.

Fields are those of its configuration classes that determine shapes, under the same names, with
small defaults. Nothing here names a class, a path or code to load.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..document import Record

Vocabulary = Annotated[int, Field(ge=2, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**20)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=512)]
Heads = Annotated[int, Field(ge=1, le=512)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _divides(whole: int, whole_name: str, part: int, part_name: str) -> None:
    if whole % part:
        raise ValueError(f"{whole_name} ({whole}) must be a multiple of {part_name} ({part})")


class LlamaConfig(Record):
    """Decoder with rotary positions, RMS norm and a gated MLP (Touvron et al. 2023).

    ``num_key_value_heads`` below ``num_attention_heads`` is grouped-query attention.
    """

    vocab_size: Vocabulary = 32000
    hidden_size: Width = 512
    intermediate_size: Width = 1376
    num_hidden_layers: Depth = 8
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads = 8
    max_position_embeddings: Length = 2048
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides(self.hidden_size, "hidden_size", self.num_attention_heads, "num_attention_heads")
        _divides(
            self.num_attention_heads,
            "num_attention_heads",
            self.num_key_value_heads,
            "num_key_value_heads",
        )
        return self


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


class BertConfig(Record):
    """Encoder with a masked-language-model head (Devlin et al. 2019)."""

    vocab_size: Vocabulary = 30522
    hidden_size: Width = 256
    intermediate_size: Width = 1024
    num_hidden_layers: Depth = 4
    num_attention_heads: Heads = 4
    max_position_embeddings: Length = 512
    dropout: Probability = 0.1

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides(self.hidden_size, "hidden_size", self.num_attention_heads, "num_attention_heads")
        return self


class T5Config(Record):
    """Encoder and decoder with relative positions (Raffel et al. 2020)."""

    vocab_size: Vocabulary = 32128
    d_model: Width = 256
    d_kv: Annotated[int, Field(ge=1, le=1024)] = 64
    d_ff: Width = 1024
    num_layers: Depth = 4
    num_decoder_layers: Depth = 4
    num_heads: Heads = 4
    dropout: Probability = 0.1


class ViTConfig(Record):
    """Image classifier over patches (Dosovitskiy et al. 2021)."""

    image_size: Annotated[int, Field(ge=1, le=4096)] = 224
    patch_size: Annotated[int, Field(ge=1, le=512)] = 16
    num_channels: Annotated[int, Field(ge=1, le=64)] = 3
    hidden_size: Width = 192
    intermediate_size: Width = 768
    num_hidden_layers: Depth = 4
    num_attention_heads: Heads = 3
    num_labels: Vocabulary = 1000
    dropout: Probability = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides(self.hidden_size, "hidden_size", self.num_attention_heads, "num_attention_heads")
        _divides(self.image_size, "image_size", self.patch_size, "patch_size")
        return self


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
