"""Small models of many kinds, with a sample each, for tests of graphs without code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.core.models.families import ResNetConfig, ResNetSpec
from stagewright.profiler.models.families import build_model
from tests.torch_models import make_case


class Recurrent(nn.Module):
    """Words to scores through a recurrent net with dropout between its layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.net = kind(16, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.net(self.words(words))[0])
        return scores


class Inception(nn.Module):
    """Three branches side by side, joined, normalised, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))
        self.branches = nn.ModuleList(
            [nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding="same"), pooled]
        )
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        joined = torch.cat([branch(image) for branch in self.branches], 1)
        joined = functional.relu(self.norm(joined), inplace=True)
        scores: Tensor = self.head(functional.adaptive_avg_pool2d(joined, 1).flatten(1))
        return scores


class Awkward(nn.Module):
    """Tied weights, a module called twice, constants, buffers, nested outputs, unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.again = nn.Linear(16, 16)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 3.0]))
        self.register_buffer("seen", torch.zeros(16), persistent=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        mixed = self.first(left) + self.second(right) * self.scale[1]
        mixed = torch.relu_(self.drop(mixed) + torch.tensor([[0.25]]))
        self.seen += mixed.detach().mean(0)
        with torch.no_grad():
            side = left.cumsum(0).sigmoid()
        out = self.again(self.again(mixed)).masked_fill(left > 2, float("-inf"))
        return {"out": out.clamp(min=-9.0), "more": (mixed.mean(), side * 2), "same": right}


def _transformer(name: str, sample: dict[str, Tensor], **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    family = name.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, name)(config), sample


WORDS = {"vocab_size": 64}
DECODER = {
    **WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def _words(*shape: int, high: int = 64) -> Tensor:
    return torch.randint(0, high, shape)


def gpt2() -> tuple[nn.Module, Any]:
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    words = _words(2, 12)
    return _transformer("GPT2LMHeadModel", {"input_ids": words, "labels": words}, **WORDS, **sizes)


def llama() -> tuple[nn.Module, Any]:
    return _transformer("LlamaForCausalLM", {"input_ids": _words(2, 12)}, **DECODER)


def qwen2_tied() -> tuple[nn.Module, Any]:
    sample = {"input_ids": _words(2, 12)}
    return _transformer("Qwen2ForCausalLM", sample, **DECODER, tie_word_embeddings=True)


def mixtral() -> tuple[nn.Module, Any]:
    sample = {"input_ids": _words(2, 12)}
    return _transformer("MixtralForCausalLM", sample, **DECODER, num_local_experts=4)


def bert() -> tuple[nn.Module, Any]:
    mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    sample = {"input_ids": _words(2, 12), "attention_mask": mask, "labels": _words(2, high=2)}
    return _transformer("BertForSequenceClassification", sample, **WORDS, **ENCODER)


def t5() -> tuple[nn.Module, Any]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sample = {"input_ids": _words(2, 12), "labels": _words(2, 8)}
    more = {"use_cache": False, "decoder_start_token_id": 0}
    return _transformer("T5ForConditionalGeneration", sample, **WORDS, **sizes, **more)


def vit() -> tuple[nn.Module, Any]:
    sample = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return _transformer("ViTForImageClassification", sample, **ENCODER, image_size=32, patch_size=8)


def whisper() -> tuple[nn.Module, Any]:
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
        "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    sample = {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": _words(2, 8)}
    return _transformer("WhisperForConditionalGeneration", sample, **WORDS, **sizes)


def clip() -> tuple[nn.Module, Any]:
    text = {**ENCODER, **WORDS, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**ENCODER, "image_size": 32, "patch_size": 8}
    sample = {"input_ids": _words(2, 8), "pixel_values": torch.randn(2, 3, 32, 32)}
    return _transformer(
        "CLIPModel", sample, text_config=text, vision_config=vision, projection_dim=16
    )


def resnet() -> tuple[nn.Module, Any]:
    spec = ResNetSpec(family="resnet", config=ResNetConfig(depth=18, width=8, num_classes=10))
    return build_model(spec), {"x": torch.randn(2, 3, 32, 32)}


def unet() -> tuple[nn.Module, Any]:
    case = make_case("unet")
    return case.model, case.sample


def mlp() -> tuple[nn.Module, Any]:
    case = make_case("mlp")
    return case.model, case.sample


def lstm() -> tuple[nn.Module, Any]:
    return Recurrent(nn.LSTM), {"words": _words(2, 6)}


def gru() -> tuple[nn.Module, Any]:
    return Recurrent(nn.GRU), {"words": _words(2, 6)}


def inception() -> tuple[nn.Module, Any]:
    return Inception(), (torch.randn(2, 3, 16, 16),)


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(2, 6, 16),)


def awkward() -> tuple[nn.Module, Any]:
    return Awkward(), {"left": torch.randn(4, 16), "right": torch.randn(4, 16)}


def nested() -> tuple[nn.Module, Any]:
    """Sequences within a sequence: called whole when traced, leaf by leaf in the graph."""
    inner = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Sequential(nn.Dropout(0.3)))
    block = nn.Sequential(nn.Conv2d(3, 4, 3), inner, nn.MaxPool2d(2))
    model = nn.Sequential(block, nn.Sequential(nn.Flatten(), nn.Linear(36, 8)), nn.Linear(8, 2))
    return model, (torch.randn(4, 3, 8, 8),)


MODELS: tuple[Callable[[], tuple[nn.Module, Any]], ...] = (
    gpt2, llama, qwen2_tied, mixtral, bert, t5, vit, whisper, clip, resnet, unet, mlp, lstm, gru,
    inception, encoder, awkward, nested,
)  # fmt: skip
