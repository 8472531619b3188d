"""Published models by name: their families and configurations.

`tests/profiler/models/test_presets.py` compares what they build with the published numbers of
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import TypeAdapter

from ..errors import InvalidInput
from ..models.families import ModelSpec


@dataclass(frozen=True)
class Preset:
    """A published model.

    ``num_parameters`` is as published, or of the published checkpoint; tied weights count once.
    ``sequence_length`` is that of its training, in tokens, if the publication says.
    """

    spec: ModelSpec
    num_parameters: int
    source: str
    sequence_length: int | None = None


def find_preset(name: str) -> Preset:
    """Return the published model of a name or alias; `InvalidInput` for others lists all."""
    found = PRESETS.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        near = get_close_matches(name.lower(), [*PRESETS, *ALIASES], n=1)
        raise InvalidInput(
            f"unknown model {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known models: {', '.join(PRESETS)}"
        )
    return found


_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


_Row = tuple[str, int | None, int, *tuple[int, ...]]


def _build_family(
    family: str, settings: str, rows: Mapping[str, _Row], **same_for_all: bool
) -> dict[str, Preset]:
    """Build the published models of one family by name.

    A row is a model's source, tokens per sample, parameters (of image models: torchvision's) and
    the named ``settings`` in their order; all others keep the family's defaults.
    """
    found = {}
    for name, (source, sequence_length, num_parameters, *row) in rows.items():
        config = {**dict(zip(settings.split(), row, strict=True)), **same_for_all}
        spec = _SPEC.validate_python({"family": family, "config": config})
        found[name] = Preset(spec, num_parameters, source, sequence_length)
    return found


GPT2 = "Radford et al. 2019, table 2; checkpoints of openai-community on Hugging Face"
GPT3 = "Brown et al. 2020, table 2.1, with dense attention in every layer"
LLAMA = "Touvron et al. 2023, LLaMA, table 2"
LLAMA2 = "Touvron et al. 2023, Llama 2, table 1; config.json of meta-llama on Hugging Face"
LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3"
LLAMA31 = "config.json of meta-llama on Hugging Face (3.1 to 3.3); 8,192 tokens in pre-training"
MISTRAL = "Jiang et al. 2023, Mistral 7B, table 1; config.json of mistralai on Hugging Face"
QWEN25 = "Qwen Team 2024, Qwen2.5 Technical Report, table 1; 4,096 tokens in pre-training"
QWEN2 = "Yang et al. 2024, Qwen2 Technical Report, table 1; 4,096 tokens in pre-training"
MIXTRAL = "Jiang et al. 2024, Mixtral, table 1"
MIXTRAL2 = "config.json of mistralai/Mixtral-8x22B-v0.1 on Hugging Face"
BERT = "Devlin et al. 2019, section 3"
T5 = "Raffel et al. 2020, section 3.7"
VIT = "Dosovitskiy et al. 2021, table 1"
RESNET = "He et al. 2016, table 1"

PRESETS: dict[str, Preset] = {
    **_build_family(
        "gpt2",
        "n_embd n_layer n_head n_positions",
        {
            "gpt2": (GPT2, 1024, 124_439_808, 768, 12, 12, 1024),
            "gpt2-medium": (GPT2, 1024, 354_823_168, 1024, 24, 16, 1024),
            "gpt2-large": (GPT2, 1024, 774_030_080, 1280, 36, 20, 1024),
            "gpt2-xl": (GPT2, 1024, 1_557_611_200, 1600, 48, 25, 1024),
            "gpt3-175b": (GPT3, 2048, 174_600_000_000, 12288, 96, 96, 2048),
        },
    ),
    **_build_family(
        "llama",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings vocab_size",
        {
            "llama-7b": (LLAMA, 2048, 6_738_415_616, 4096, 11008, 32, 32, 32, 2048, 32000),
            "llama-13b": (LLAMA, 2048, 13_015_864_320, 5120, 13824, 40, 40, 40, 2048, 32000),
            "llama-65b": (LLAMA, 2048, 65_285_660_672, 8192, 22016, 80, 64, 64, 2048, 32000),
            "llama-2-7b": (LLAMA2, 4096, 6_738_415_616, 4096, 11008, 32, 32, 32, 4096, 32000),
            "llama-2-13b": (LLAMA2, 4096, 13_015_864_320, 5120, 13824, 40, 40, 40, 4096, 32000),
            "llama-2-70b": (LLAMA2, 4096, 68_976_648_192, 8192, 28672, 80, 64, 8, 4096, 32000),
            "llama-3-8b": (LLAMA3, 8192, 8_030_261_248, 4096, 14336, 32, 32, 8, 8192, 128256),
            "llama-3-70b": (LLAMA3, 8192, 70_553_706_496, 8192, 28672, 80, 64, 8, 8192, 128256),
            "llama-3.1-8b": (LLAMA31, 8192, 8_030_261_248, 4096, 14336, 32, 32, 8, 131072, 128256),
            "llama-3.1-70b": (
                LLAMA31,
                8192,
                70_553_706_496,
                8192,
                28672,
                80,
                64,
                8,
                131072,
                128256,
            ),
            "llama-3.1-405b": (
                LLAMA31,
                8192,
                405_853_388_800,
                16384,
                53248,
                126,
                128,
                8,
                131072,
                128256,
            ),
            # Mistral has the layers of Llama; up to 4,096 tokens its attention is the same, too.
            "mistral-7b": (MISTRAL, 4096, 7_241_732_096, 4096, 14336, 32, 32, 8, 32768, 32000),
        },
    ),
    **_build_family(
        "llama",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings vocab_size",
        {
            "llama-3.2-1b": (LLAMA31, 8192, 1_235_814_400, 2048, 8192, 16, 32, 8, 131072, 128256),
            "llama-3.2-3b": (LLAMA31, 8192, 3_212_749_824, 3072, 8192, 28, 24, 8, 131072, 128256),
        },
        tie_word_embeddings=True,
    ),
    **_build_family(
        "qwen2",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings vocab_size",
        {
            "qwen2-0.5b": (QWEN2, 4096, 494_032_768, 896, 4864, 24, 14, 2, 32768, 151936),
            "qwen2.5-0.5b": (QWEN25, 4096, 494_032_768, 896, 4864, 24, 14, 2, 32768, 151936),
            "qwen2.5-1.5b": (QWEN25, 4096, 1_543_714_304, 1536, 8960, 28, 12, 2, 32768, 151936),
            "qwen2.5-3b": (QWEN25, 4096, 3_085_938_688, 2048, 11008, 36, 16, 2, 32768, 151936),
        },
        tie_word_embeddings=True,
    ),
    **_build_family(
        "qwen2",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings vocab_size",
        {
            "qwen2-7b": (QWEN2, 4096, 7_615_616_512, 3584, 18944, 28, 28, 4, 32768, 152064),
            "qwen2-72b": (QWEN2, 4096, 72_706_203_648, 8192, 29568, 80, 64, 8, 32768, 152064),
            "qwen2.5-7b": (QWEN25, 4096, 7_615_616_512, 3584, 18944, 28, 28, 4, 32768, 152064),
            "qwen2.5-14b": (QWEN25, 4096, 14_770_033_664, 5120, 13824, 48, 40, 8, 32768, 152064),
            "qwen2.5-32b": (QWEN25, 4096, 32_763_876_352, 5120, 27648, 64, 40, 8, 32768, 152064),
            "qwen2.5-72b": (QWEN25, 4096, 72_706_203_648, 8192, 29568, 80, 64, 8, 32768, 152064),
        },
        tie_word_embeddings=False,
    ),
    **_build_family(
        "mixtral",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings",
        {
            "mixtral-8x7b": (MIXTRAL, 4096, 46_702_792_704, 4096, 14336, 32, 32, 8, 32768),
            "mixtral-8x22b": (MIXTRAL2, 4096, 140_620_634_112, 6144, 16384, 56, 48, 8, 65536),
        },
    ),
    **_build_family(
        "bert",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads",
        {
            "bert-base": (BERT, 512, 109_514_298, 768, 3072, 12, 12),
            "bert-large": (BERT, 512, 335_174_458, 1024, 4096, 24, 16),
        },
    ),
    **_build_family(
        "t5",
        "d_model d_ff num_layers num_decoder_layers num_heads",
        {"t5-large": (T5, 512, 737_668_096, 1024, 4096, 24, 24, 16)},
    ),
    **_build_family(
        "vit",
        "hidden_size intermediate_size num_hidden_layers num_attention_heads patch_size",
        {
            "vit-base": (VIT, None, 86_567_656, 768, 3072, 12, 12, 16),
            "vit-large": (VIT, None, 304_326_632, 1024, 4096, 24, 16, 16),
            "vit-huge": (VIT, None, 632_045_800, 1280, 5120, 32, 16, 14),
        },
    ),
    **_build_family(
        "resnet",
        "depth",
        {
            "resnet18": (RESNET, None, 11_689_512, 18),
            "resnet34": (RESNET, None, 21_797_672, 34),
            "resnet50": (RESNET, None, 25_557_032, 50),
            "resnet101": (RESNET, None, 44_549_160, 101),
            "resnet152": (RESNET, None, 60_192_808, 152),
        },
    ),
}
"""Published models by name; `_build_family` explains the rows."""

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
    "llama-3.3-70b": "llama-3.1-70b",
    "vit-l-16": "vit-large",
    "vit-b-16": "vit-base",
}
