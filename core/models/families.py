"""Models that can be named instead of sent: a family and its configuration.

Configurations are checked here, without torch; `profiler.models.families` builds the modules. Those
of the package ``transformers`` are named by its ``model_type``; their fields are those of its
configuration classes that determine shapes, under the same names, with small defaults. One family,
``causal_lm``, is any of a list of language models, by the settings of its ``config.json``. Nothing
here names a class, a path or code to load.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from ..document import Notes, Record

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


CausalModelType = Literal[
    "qwen3", "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt_oss", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip
"""Causal language models of ``transformers`` that were captured, planned and compared with
themselves unsplit (docs/evidence/transformers.md)."""

MAX_SETTINGS, MAX_DEPTH, MAX_NUMBER, MAX_TEXT = 4096, 4, 2**31, 100


def _walk(value: JsonValue, depth: int = 0) -> Iterator[JsonValue]:
    """Yield a value and all that it holds."""
    if depth > MAX_DEPTH:
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
    yield value
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _walk(one, depth + 1)


def _check_settings(settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the settings if they are few, short and small enough for any published model."""
    for name, value in settings.items():
        found = list(_walk(value))
        if len(found) > MAX_SETTINGS:
            raise ValueError(f"{name} has {len(found)} values; at most {MAX_SETTINGS} are read")
        for one in found:
            if isinstance(one, int | float) and not abs(one) <= MAX_NUMBER:
                raise ValueError(
                    f"{name} has a number beyond {MAX_NUMBER}, the largest that is read"
                )
            if isinstance(one, str) and len(one) > MAX_TEXT:
                raise ValueError(f"{name} has {len(one)} letters; at most {MAX_TEXT} are read")
    return settings


SettingName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class CausalLMConfig(FamilyConfig):
    """Causal language model of a type that ``transformers`` has, by its ``config.json``.

    ``settings`` are other keys of that file, such as ``head_dim``, ``num_experts`` or
    ``rope_parameters``; what neither says is as ``transformers`` sets it for the model type.
    """

    model_type: CausalModelType = "qwen3"
    vocab_size: Vocabulary = 32000
    hidden_size: Width = 512
    intermediate_size: Width = 1376
    num_hidden_layers: Depth = 8
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)] = 2048
    settings: Annotated[dict[SettingName, JsonValue], AfterValidator(_check_settings)] = Field(
        default={}, max_length=64
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups is not None and heads % groups:
            raise ValueError(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({groups})"
            )
        twice = sorted(self.settings.keys() & type(self).model_fields.keys())
        if twice:
            raise ValueError(f"settings has {twice[0]}, which has a field of its own")
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


class CausalLMSpec(Record):
    """Causal language model; ``left_out`` names the parts of its file that the model here lacks."""

    family: Literal["causal_lm"]
    config: CausalLMConfig = CausalLMConfig()
    left_out: Notes = Field((), exclude_if=operator.not_)


ModelSpec = Annotated[
    MLPSpec
    | ResNetSpec
    | UNetSpec
    | GPT2Spec
    | LlamaSpec
    | Qwen2Spec
    | MixtralSpec
    | CausalLMSpec
    | BertSpec
    | T5Spec
    | ViTSpec,
    Field(discriminator="family"),
]
"""A model asked for by family and configuration, e.g. ``{"family": "gpt2", "config": {}}``."""


def list_left_out(spec: ModelSpec | None) -> Notes:
    """Return the parts of a model's file that the model built from it lacks, a sentence each."""
    return spec.left_out if isinstance(spec, CausalLMSpec) else ()
