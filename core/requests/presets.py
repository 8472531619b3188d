"""Published models by name: their families and configurations.

`tests/profiler/models/test_presets.py` compares what they build with the published numbers of
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import InvalidInput
from ..models.families import GPT2Config, GPT2Spec, ModelSpec, ResNetConfig, ResNetSpec
from ..models.transformer_families import (
    BertConfig,
    BertSpec,
    LlamaConfig,
    LlamaSpec,
    MixtralConfig,
    MixtralSpec,
    Qwen2Config,
    Qwen2Spec,
    T5Config,
    T5Spec,
    ViTConfig,
    ViTSpec,
)


@dataclass(frozen=True)
class Preset:
    """A published model.

    Attributes:
        spec: Family and configuration.
        num_parameters: As published, or of the published checkpoint; tied weights count once.
        source: Publication of the configuration.
        sequence_length: Tokens per training sample in that publication, if it says.
    """

    spec: ModelSpec
    num_parameters: int
    source: str
    sequence_length: int | None = None


def find_preset(name: str) -> Preset:
    """Return the published model of a name or alias.

    Raises:
        InvalidInput: The name is unknown; the message lists all.
    """
    found = PRESETS.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        near = get_close_matches(name.lower(), [*PRESETS, *ALIASES], n=1)
        raise InvalidInput(
            f"unknown model {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known models: {', '.join(PRESETS)}"
        )
    return found


def _gpt2(
    width: int, layers: int, heads: int, parameters: int, source: str, length: int = 1024
) -> Preset:
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=length)
    return Preset(GPT2Spec(family="gpt2", config=config), parameters, source, length)


def _llama(
    width: int,
    inner: int,
    layers: int,
    heads: int,
    parameters: int,
    source: str,
    *,
    length: int,
    key_value_heads: int | None = None,
    vocabulary: int = 32000,
) -> Preset:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        max_position_embeddings=length,
    )
    return Preset(LlamaSpec(family="llama", config=config), parameters, source, length)


def _qwen2(
    width: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool, size: int
) -> Preset:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )
    source = "Yang et al. 2024, Qwen2 Technical Report, table 1; 4,096 tokens in pre-training"
    return Preset(Qwen2Spec(family="qwen2", config=config), size, source, 4096)


def _mixtral(
    width: int, inner: int, layers: int, heads: int, length: int, size: int, source: str
) -> Preset:
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=length,
    )
    return Preset(MixtralSpec(family="mixtral", config=config), size, source, 4096)


def _bert(width: int, layers: int, heads: int, size: int) -> Preset:
    config = BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return Preset(
        BertSpec(family="bert", config=config), size, "Devlin et al. 2019, section 3", 512
    )


def _vit(width: int, layers: int, heads: int, patch: int, size: int) -> Preset:
    config = ViTConfig(
        patch_size=patch,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return Preset(ViTSpec(family="vit", config=config), size, "Dosovitskiy et al. 2021, table 1")


def _resnet(depth: int, size: int) -> Preset:
    config = ResNetConfig.model_validate({"depth": depth})
    return Preset(ResNetSpec(family="resnet", config=config), size, "He et al. 2016, table 1")


GPT2_SOURCE = "Radford et al. 2019, table 2; checkpoints of openai-community on Hugging Face"
GPT3_SOURCE = "Brown et al. 2020, table 2.1, with dense attention in every layer"
LLAMA_SOURCE = "Touvron et al. 2023, LLaMA, table 2"
LLAMA2_SOURCE = "Touvron et al. 2023, Llama 2, table 1; config.json of meta-llama on Hugging Face"
LLAMA3_SOURCE = "Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3"
T5_LARGE = T5Config(d_model=1024, d_ff=4096, num_layers=24, num_decoder_layers=24, num_heads=16)

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt2(768, 12, 12, 124_439_808, GPT2_SOURCE),
    "gpt2-medium": _gpt2(1024, 24, 16, 354_823_168, GPT2_SOURCE),
    "gpt2-large": _gpt2(1280, 36, 20, 774_030_080, GPT2_SOURCE),
    "gpt2-xl": _gpt2(1600, 48, 25, 1_557_611_200, GPT2_SOURCE),
    "gpt3-175b": _gpt2(12288, 96, 96, 174_600_000_000, GPT3_SOURCE, 2048),
    "llama-7b": _llama(4096, 11008, 32, 32, 6_738_415_616, LLAMA_SOURCE, length=2048),
    "llama-13b": _llama(5120, 13824, 40, 40, 13_015_864_320, LLAMA_SOURCE, length=2048),
    "llama-65b": _llama(8192, 22016, 80, 64, 65_285_660_672, LLAMA_SOURCE, length=2048),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 6_738_415_616, LLAMA2_SOURCE, length=4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 13_015_864_320, LLAMA2_SOURCE, length=4096),
    "llama-2-70b": _llama(
        8192, 28672, 80, 64, 68_976_648_192, LLAMA2_SOURCE, length=4096, key_value_heads=8
    ),
    "llama-3-8b": _llama(
        4096, 14336, 32, 32, 8_030_261_248, LLAMA3_SOURCE,
        length=8192, key_value_heads=8, vocabulary=128256,
    ),
    "llama-3-70b": _llama(
        8192, 28672, 80, 64, 70_553_706_496, LLAMA3_SOURCE,
        length=8192, key_value_heads=8, vocabulary=128256,
    ),
    "qwen2-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "qwen2-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    "qwen2-72b": _qwen2(8192, 29568, 80, 64, 8, 152064, False, 72_706_203_648),
    "mixtral-8x7b": _mixtral(
        4096, 14336, 32, 32, 32768, 46_702_792_704, "Jiang et al. 2024, Mixtral, table 1"
    ),
    "mixtral-8x22b": _mixtral(
        6144, 16384, 56, 48, 65536, 140_620_634_112,
        "config.json of mistralai/Mixtral-8x22B-v0.1 on Hugging Face",
    ),
    "bert-base": _bert(768, 12, 12, 109_514_298),
    "bert-large": _bert(1024, 24, 16, 335_174_458),
    "t5-large": Preset(
        T5Spec(family="t5", config=T5_LARGE), 737_668_096, "Raffel et al. 2020, section 3.7", 512
    ),
    "vit-base": _vit(768, 12, 12, 16, 86_567_656),
    "vit-large": _vit(1024, 24, 16, 16, 304_326_632),
    "vit-huge": _vit(1280, 32, 16, 14, 632_045_800),
    "resnet18": _resnet(18, 11_689_512),
    "resnet34": _resnet(34, 21_797_672),
    "resnet50": _resnet(50, 25_557_032),
    "resnet101": _resnet(101, 44_549_160),
    "resnet152": _resnet(152, 60_192_808),
}  # fmt: skip
"""Published models by name. Parameter counts of image models are torchvision's."""

ALIASES = {
    "gpt2-small": "gpt2",
    "gpt-3": "gpt3-175b",
    "gpt3": "gpt3-175b",
    "llama-70b": "llama-2-70b",
    "llama2-7b": "llama-2-7b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "vit-l-16": "vit-large",
    "vit-b-16": "vit-base",
}
