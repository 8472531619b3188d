"""Usual splits of transformers' layers over several devices, by the names of their weights.

For profiles that do not say how their layers split. As in Megatron-LM (Shoeybi et al. 2019): of a
block, the products that widen are cut by columns, those behind them by rows, heads and hidden
units with them; one all-reduce sums the output of each product cut by rows, and in the backward
the gradients of each group cut by columns. Embeddings and heads are cut by the vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict

from ..graph.graph import Parameter
from .profile import LayerProfile, Profile, SplitLayer, TensorSplit

COLUMNS = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "gate_proj", "up_proj",
    "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h", "wi", "wi_0", "wi_1", "query", "key", "value",
    "w1", "w3",
}  # fmt: skip
ROWS = {"o_proj", "out_proj", "down_proj", "c_proj", "fc2", "dense_4h_to_h", "wo", "w2"}
EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings"}
HEADS = {"lm_head", "embed_out"}
HEAD_FIELDS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")

DEGREES = (2, 4, 8)


def split_by_names(profile: Profile) -> tuple[TensorSplit, ...]:
    """Return how a transformer's layers split over 2, 4 and 8 devices; nothing for others."""
    owned: dict[int, list[Parameter]] = defaultdict(list)
    for entry in profile.parameters:
        for layer in entry.layers:
            owned[layer].append(entry)
    found = []
    for degree in DEGREES:
        if any(heads % degree for heads in _count_heads(profile)):
            continue
        layers = tuple(
            _split(profile, index, owned[index], degree) for index in range(len(profile.layers))
        )
        if any(layer.compute_share < 1 for layer in layers):
            found.append(TensorSplit(degree=degree, layers=layers))
    return tuple(found)


def _count_heads(profile: Profile) -> list[int]:
    config = profile.spec.config if profile.spec else None
    return [value for name in HEAD_FIELDS if (value := getattr(config, name, None))]


def _module(parameter: Parameter) -> str:
    """Return the name of the module that holds a weight: ``q_proj``."""
    parts = parameter.names[0].split(".")
    return parts[-2] if len(parts) > 1 else ""


def _split(profile: Profile, index: int, parameters: list[Parameter], degree: int) -> SplitLayer:
    entry = profile.layers[index]
    modules = [_module(parameter) for parameter in parameters]
    rows = sum(module in ROWS for module in modules) if COLUMNS & set(modules) else 0
    cut = COLUMNS | ROWS if rows else EMBEDDINGS | HEADS
    split = [p for p, module in zip(parameters, modules, strict=True) if module in cut]
    if not split or any(parameter.numel % degree for parameter in split):
        reason = "its weights have no usual names" if parameters else "it has no weights"
        return _whole(entry, reason if not split else f"{degree} does not divide its weights")
    saved = sum(parameter.size_bytes for parameter in split)
    held = entry.layer.parameter_bytes - saved + saved // degree
    hidden = _hidden_bytes(profile, index)
    if rows:
        return _split_block(profile, entry, rows, hidden, held, degree)
    # A head that is tied to the embedding has its weight's name.
    if split[0].layers[0] == index and EMBEDDINGS & set(modules):
        return SplitLayer(
            compute_share=1 / degree,
            parameter_bytes=held,
            saved_activation_bytes=entry.saved_activation_bytes,
            workspace_bytes=entry.workspace_bytes,
            forward_reduced_bytes=entry.output_bytes,
            forward_reductions=1,
        )
    return SplitLayer(
        compute_share=1 / degree,
        parameter_bytes=held,
        saved_activation_bytes=entry.saved_activation_bytes,
        workspace_bytes=entry.workspace_bytes,
        backward_reduced_bytes=hidden,
        backward_reductions=1,
        forward_gathered_bytes=entry.output_bytes,
        gathers=1,
        reasons=("its output is gathered, as the loss is not split",),
    )


def _split_block(
    profile: Profile, entry: LayerProfile, rows: int, hidden: int, held: int, degree: int
) -> SplitLayer:
    """Split a block; in front of each product cut by rows it has a norm that every device does."""
    norm = next((one for one in profile.layers if one.layer.module_type.endswith("Norm")), None)
    work_s = entry.forward.median_s + entry.backward.median_s
    whole_s = rows * (norm.forward.median_s + norm.backward.median_s) if norm else 0.0
    replicated = min(1.0, whole_s / work_s) if work_s else 0.0
    kept = rows * (norm.saved_activation_bytes if norm else 2 * hidden)
    saved, workspace = entry.saved_activation_bytes, entry.workspace_bytes
    kept, used = min(kept, saved), min(2 * hidden, workspace)
    return SplitLayer(
        compute_share=replicated + (1 - replicated) / degree,
        parameter_bytes=held,
        saved_activation_bytes=kept + math.ceil((saved - kept) / degree),
        workspace_bytes=used + math.ceil((workspace - used) / degree),
        forward_reduced_bytes=rows * hidden,
        backward_reduced_bytes=rows * hidden,
        forward_reductions=rows,
        backward_reductions=rows,
        reasons=("norms and sums between products are not split",),
    )


def _hidden_bytes(profile: Profile, index: int) -> int:
    """Return the bytes of the activations in front of a layer: the largest tensor with gradient."""
    if index == 0:
        return profile.layers[0].output_bytes
    tensors = profile.boundaries[index - 1].tensors
    return max((one.size_bytes for one in tensors if one.requires_grad), default=0)


def _whole(entry: LayerProfile, reason: str) -> SplitLayer:
    return SplitLayer(
        parameter_bytes=entry.layer.parameter_bytes,
        saved_activation_bytes=entry.saved_activation_bytes,
        workspace_bytes=entry.workspace_bytes,
        reasons=(reason,),
    )
