"""Usual splits of transformers' layers over several devices, by the names of their weights.

For profiles that do not say how their layers split. As in Megatron-LM (Shoeybi et al. 2019): of a
block, the products that widen are cut by columns, those behind them by rows, heads and hidden
units with them. Embeddings and heads are cut by the vocabulary. In between, devices hold parts of
the sequence (Korthikanti et al. 2022), if its length can be divided: the output of each product cut
by rows is summed and scattered, and gathered in front of each group cut by columns, and the reverse
in the backward; else sums are all-reduced, and all devices hold whole activations.
"""

from __future__ import annotations

import math
from collections import defaultdict

from ..graph.graph import Parameter
from ..graph.tensors import TensorSpec
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
            found.append(
                TensorSplit(degree=degree, layers=layers, divided=_list_divided(profile, degree))
            )
    return tuple(found)


def _list_divided(profile: Profile, degree: int) -> tuple[str, ...]:
    """Return the activations between layers whose rows can be divided."""
    names = {
        tensor.name: None
        for index in range(1, len(profile.layers))
        if (tensor := _find_hidden(profile, index)) is not None and _has_rows(tensor, degree)
    }
    return tuple(names)


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
    others = [parameter for parameter in parameters if parameter not in split]
    in_front = _find_hidden(profile, index)
    hidden = in_front.size_bytes if in_front else 0
    in_parts = in_front is not None and _has_rows(in_front, degree)
    if any(parameter.numel % degree for parameter in split):
        return _whole(entry, f"{degree} does not divide its weights")
    if not split:
        if in_parts and entry.layer.module_type.endswith(("Norm", "Dropout")):
            return _split_rows(entry, others, degree)
        has_weights = any(parameter.kind == "parameter" for parameter in others)
        reason = "its weights have no usual names" if has_weights else "it has no weights"
        return _whole(entry, reason)
    saved = sum(parameter.size_bytes for parameter in split)
    held = entry.layer.parameter_bytes - saved + saved // degree
    if rows and in_parts:
        return _split_block_and_rows(entry, rows, hidden, held, others, degree)
    if rows:
        return _split_block(profile, entry, rows, hidden, held, degree)
    # A head that is tied to the embedding has its weight's name.
    is_embedding = split[0].layers[0] == index and bool(EMBEDDINGS & set(modules))
    made = (
        _split_embedding(entry, in_parts, degree)
        if is_embedding
        else _split_head(entry, in_front, degree)
    )
    return made.model_copy(
        update={
            "parameter_bytes": held,
            "saved_activation_bytes": entry.saved_activation_bytes,
            "workspace_bytes": _split_workspace(entry, hidden, degree),
        }
    )


def _split_embedding(entry: LayerProfile, in_parts: bool, degree: int) -> SplitLayer:
    """Split a table by its rows; devices sum what they find."""
    if not in_parts:
        return SplitLayer(
            compute_share=1 / degree, forward_reduced_bytes=entry.output_bytes, forward_reductions=1
        )
    return SplitLayer(
        compute_share=1 / degree,
        forward_gathered_bytes=entry.output_bytes,
        backward_gathered_bytes=entry.output_bytes,
        gathers=2,
    )


def _split_head(entry: LayerProfile, in_front: TensorSpec | None, degree: int) -> SplitLayer:
    """Split the product in front of a cross-entropy, which reads its output in parts."""
    hidden = in_front.size_bytes if in_front else 0
    positions = math.prod(in_front.shape[:-1]) if in_front else 0
    in_parts = in_front is not None and _has_rows(in_front, degree)
    return SplitLayer(
        compute_share=1 / degree,
        # The largest value of a position, then three sums, in float32.
        forward_reduced_bytes=4 * 4 * positions,
        forward_reductions=2 if positions else 0,
        backward_reduced_bytes=0 if in_parts else hidden,
        backward_reductions=0 if in_parts else 1,
        forward_gathered_bytes=hidden if in_parts else 0,
        backward_gathered_bytes=hidden if in_parts else 0,
        gathers=2 if in_parts else 0,
    )


def _split_rows(entry: LayerProfile, weights: list[Parameter], degree: int) -> SplitLayer:
    """Split a norm or dropout along the sequence: devices sum the gradients of its weights."""
    return SplitLayer(
        compute_share=1 / degree,
        parameter_bytes=entry.layer.parameter_bytes,
        saved_activation_bytes=math.ceil(entry.saved_activation_bytes / degree),
        workspace_bytes=math.ceil(entry.workspace_bytes / degree),
        **_sum_gradients(weights),
    )


def _split_workspace(entry: LayerProfile, hidden: int, degree: int) -> int:
    """Return the workspace of a part: whole activations and their gradient, and a part of the rest.

    The rest are gradients of weights and what is inside the layer.
    """
    whole = min(2 * hidden, entry.workspace_bytes)
    return whole + math.ceil((entry.workspace_bytes - whole) / degree)


def _sum_gradients(weights: list[Parameter]) -> dict[str, int]:
    sizes = [weight.size_bytes for weight in weights if weight.trainable]
    return {"backward_reduced_bytes": sum(sizes), "backward_reductions": len(sizes)}


def _split_block_and_rows(
    entry: LayerProfile, rows: int, hidden: int, held: int, others: list[Parameter], degree: int
) -> SplitLayer:
    """Split a block, and what is between its products along the sequence."""
    kept = min(rows * hidden, entry.saved_activation_bytes)
    return SplitLayer(
        compute_share=1 / degree,
        parameter_bytes=held,
        saved_activation_bytes=kept + math.ceil((entry.saved_activation_bytes - kept) / degree),
        workspace_bytes=_split_workspace(entry, hidden, degree),
        forward_gathered_bytes=2 * rows * hidden,
        backward_gathered_bytes=2 * rows * hidden,
        gathers=4 * rows,
        **_sum_gradients(others),
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
    saved = entry.saved_activation_bytes
    kept = min(kept, saved)
    return SplitLayer(
        compute_share=replicated + (1 - replicated) / degree,
        parameter_bytes=held,
        saved_activation_bytes=kept + math.ceil((saved - kept) / degree),
        workspace_bytes=_split_workspace(entry, hidden, degree),
        forward_reduced_bytes=rows * hidden,
        backward_reduced_bytes=rows * hidden,
        forward_reductions=rows,
        backward_reductions=rows,
        reasons=("norms and sums between products are not split",),
    )


def _find_hidden(profile: Profile, index: int) -> TensorSpec | None:
    """Return the activations in front of a layer, or behind the first: the largest tensor."""
    tensors = profile.boundaries[max(index - 1, 0)].tensors if profile.boundaries else ()
    return max(
        (tensor for tensor in tensors if tensor.requires_grad),
        key=lambda tensor: tensor.size_bytes,
        default=None,
    )


def _has_rows(tensor: TensorSpec, degree: int) -> bool:
    """Return True if devices can hold equal parts of a sequence, or of tokens."""
    return len(tensor.shape) > 2 and tensor.shape[-2] % degree == 0


def _whole(entry: LayerProfile, reason: str) -> SplitLayer:
    return SplitLayer(
        parameter_bytes=entry.layer.parameter_bytes,
        saved_activation_bytes=entry.saved_activation_bytes,
        workspace_bytes=entry.workspace_bytes,
        reasons=(reason,),
    )
