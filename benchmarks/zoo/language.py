"""Text models from ``transformers`` configurations: no weights are loaded, sizes are small.

Every sample carries labels where the model takes them, so that a loss comes out beside the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .architecture import Architecture

VOCABULARY, WIDTH, HEADS, BLOCKS, BATCH, TOKENS = 64, 32, 4, 2, 2, 12

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The names most configurations use."""

GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

GPT2_SIZES = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS,
    "n_positions": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

SEQ2SEQ_SIZES = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": BLOCKS, "decoder_layers": BLOCKS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

T5_SIZES = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": BLOCKS,
    "num_heads": HEADS, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip


def tokens() -> Tensor:
    """Never the padding token."""
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def causal() -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> dict[str, Tensor]:
    """Return two texts, the second three tokens shorter."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, -3:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def seq2seq() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def from_config(name: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return ``transformers``' class ``model`` with configuration class ``name``."""

    def build() -> nn.Module:
        config = getattr(transformers, name)(**sizes)
        built: nn.Module = getattr(transformers, model)(config)
        return built

    return build


def _row(
    name: str, config: str, model: str, sample: Callable[[], Any], **sizes: Any
) -> Architecture:
    return Architecture(name, "transformers", from_config(config, model, **sizes), sample)


ARCHITECTURES = (
    _row("gpt2", "GPT2Config", "GPT2LMHeadModel", causal, **GPT2_SIZES),
    _row("llama", "LlamaConfig", "LlamaForCausalLM", causal, **SIZES, **GROUPED),
    _row(
        "qwen2-tied", "Qwen2Config", "Qwen2ForCausalLM", causal, **SIZES, **GROUPED,
        tie_word_embeddings=True,
    ),
    _row(
        "qwen2-moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", causal, **SIZES, **GROUPED,
        **EXPERTS, shared_expert_intermediate_size=32, output_router_logits=True,
    ),
    _row(
        "mixtral", "MixtralConfig", "MixtralForCausalLM", causal, **SIZES, **GROUPED,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    ),
    _row("bert", "BertConfig", "BertForMaskedLM", masked, **SIZES),
    _row("t5", "T5Config", "T5ForConditionalGeneration", seq2seq, **T5_SIZES),
    _row("mistral", "MistralConfig", "MistralForCausalLM", causal, **SIZES, **GROUPED,
         sliding_window=8),
    _row("opt", "OPTConfig", "OPTForCausalLM", causal, **SIZES, ffn_dim=64,
         word_embed_proj_dim=WIDTH),
    _row("gpt-neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", causal, **SIZES),
    _row("gpt-j", "GPTJConfig", "GPTJForCausalLM", causal, **GPT2_SIZES, rotary_dim=4),
    _row("phi", "PhiConfig", "PhiForCausalLM", causal, **SIZES),
    _row("gemma", "GemmaConfig", "GemmaForCausalLM", causal, **SIZES, **GROUPED, head_dim=8),
    _row("gemma2", "Gemma2Config", "Gemma2ForCausalLM", causal, **SIZES, **GROUPED, head_dim=8,
         sliding_window=8),
    _row("qwen3-moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", causal, **SIZES, **GROUPED,
         **EXPERTS, head_dim=8),
    _row("falcon", "FalconConfig", "FalconForCausalLM", causal, **SIZES, alibi=False),
    _row("bloom", "BloomConfig", "BloomForCausalLM", causal, vocab_size=VOCABULARY,
         hidden_size=WIDTH, n_layer=BLOCKS, n_head=HEADS, use_cache=False),
    _row("distilbert", "DistilBertConfig", "DistilBertForMaskedLM", masked, vocab_size=VOCABULARY,
         dim=WIDTH, hidden_dim=64, n_layers=BLOCKS, n_heads=HEADS, max_position_embeddings=64),
    _row("roberta", "RobertaConfig", "RobertaForMaskedLM", masked, **SIZES),
    _row("albert", "AlbertConfig", "AlbertForMaskedLM", masked, **SIZES, embedding_size=16),
    _row("electra", "ElectraConfig", "ElectraForMaskedLM", masked, **SIZES, embedding_size=16),
    _row("deberta-v2", "DebertaV2Config", "DebertaV2ForMaskedLM", masked, **SIZES,
         relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _row("bart", "BartConfig", "BartForConditionalGeneration", seq2seq, **SEQ2SEQ_SIZES),
    _row("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", seq2seq, **SEQ2SEQ_SIZES),
    _row("longformer", "LongformerConfig", "LongformerForMaskedLM", masked, **SIZES,
         attention_window=4),
    _row("mamba", "MambaConfig", "MambaForCausalLM", causal, vocab_size=VOCABULARY,
         hidden_size=WIDTH, num_hidden_layers=BLOCKS, state_size=4, use_cache=False),
    _row("rwkv", "RwkvConfig", "RwkvForCausalLM", causal, vocab_size=VOCABULARY,
         hidden_size=WIDTH, num_hidden_layers=BLOCKS, attention_hidden_size=WIDTH,
         use_cache=False),
    _row("fnet", "FNetConfig", "FNetForMaskedLM",
         lambda: {"input_ids": tokens(), "labels": tokens()}, **SIZES),
)  # fmt: skip
