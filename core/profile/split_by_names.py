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
import re
from collections import defaultdict

from ..graph.graph import Parameter
from ..graph.tensors import TensorSpec
from .profile import LayerProfile, Profile, SplitLayer, TensorSplit

COLUMNS = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "gate_proj", "up_proj",
    "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h", "wi", "wi_0", "wi_1", "query", "key", "value",
    "q", "k", "v", "w1", "w3", "intermediate.dense",
}  # fmt: skip
ROWS = {
    "o_proj", "out_proj", "down_proj", "c_proj", "fc2", "dense_4h_to_h", "wo", "o", "w2",
    "attention.dense", "self_attention.dense", "output.dense",
}  # fmt: skip
"""Names of products, with that of the module around them where the name alone says nothing."""

EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared"}
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


def _find_product(parameter: Parameter) -> tuple[str, str]:
    """Return the path of the product that a parameter belongs to, and its usual name, or "".

    Experts' products are one: they run side by side, and their sum is exchanged once.
    """
    path = re.sub(r"\bexperts\.\d+", "experts", parameter.names[0]).split(".")
    if path[-1] in ("weight", "bias"):
        path.pop()
    known = COLUMNS | ROWS | EMBEDDINGS | HEADS
    usual = (".".join(path[-count:]) for count in (2, 1))
    return ".".join(path), next((name for name in usual if name in known), "")


def _is_cut(parameter: Parameter, name: str, cut: set[str]) -> bool:
    """Return True if devices hold parts; a bias behind a sum of rows is whole."""
    return name in cut and not (name in ROWS and _is_bias(parameter))


def _is_bias(parameter: Parameter) -> bool:
    return parameter.names[0].endswith(".bias")


def _split(profile: Profile, index: int, parameters: list[Parameter], degree: int) -> SplitLayer:
    entry = profile.layers[index]
    found = [_find_product(parameter) for parameter in parameters]
    usual = {name for _, name in found}
    rows = len({path for path, name in found if name in ROWS}) if COLUMNS & usual else 0
    cut = COLUMNS | ROWS if rows else EMBEDDINGS | HEADS
    split = [p for p, (_, name) in zip(parameters, found, strict=True) if _is_cut(p, name, cut)]
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
    if rows:
        block = (
            _split_block_and_rows(
                entry, rows, hidden, held, others, degree, _count_chosen(profile, found)
            )
            if in_parts
            else _split_block(profile, entry, rows, hidden, held, degree)
        )
        return _add_whole_products(block, split, others)
    # A head that is tied to the embedding has its weight's name.
    is_embedding = split[0].layers[0] == index and bool(EMBEDDINGS & usual)
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


def _count_chosen(profile: Profile, found: list[tuple[str, str]]) -> int:
    """Return the experts of a token if a layer has experts, else 0."""
    if not any("experts" in path.split(".") and name in ROWS for path, name in found):
        return 0
    config = profile.spec.config if profile.spec else None
    return getattr(config, "num_experts_per_tok", None) or 1


def _split_block_and_rows(
    entry: LayerProfile, rows: int, hidden: int, held: int, others: list[Parameter], degree: int,
    chosen: int,
) -> SplitLayer:  # fmt: skip
    """Split a block, and what is between its products along the sequence.

    What the experts that each token has ``chosen`` return is all-reduced before it is weighed.
    """
    kept = min(rows * hidden, entry.saved_activation_bytes)
    gathers = 2 * rows - (chosen > 0)
    summed = _sum_gradients(others)
    return SplitLayer(
        compute_share=1 / degree,
        parameter_bytes=held,
        saved_activation_bytes=kept + math.ceil((entry.saved_activation_bytes - kept) / degree),
        workspace_bytes=_split_workspace(entry, hidden, degree),
        forward_gathered_bytes=gathers * hidden,
        backward_gathered_bytes=gathers * hidden,
        gathers=2 * gathers,
        forward_reduced_bytes=chosen * hidden,
        forward_reductions=int(chosen > 0),
        backward_reduced_bytes=summed["backward_reduced_bytes"] + chosen * hidden,
        backward_reductions=summed["backward_reductions"] + (chosen > 0),
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


def _add_whole_products(
    block: SplitLayer, split: list[Parameter], others: list[Parameter]
) -> SplitLayer:
    """Return a block some of whose products have no usual names: every device does these."""
    least = min(parameter.numel for parameter in split if not _is_bias(parameter))
    unknown = [parameter.numel for parameter in others if parameter.numel >= least]
    if not unknown:
        return block
    share = sum(unknown) / (sum(unknown) + sum(parameter.numel for parameter in split))
    reason = "some of its weights have no usual names"
    return block.model_copy(
        update={
            "compute_share": share + (1 - share) * block.compute_share,
            "reasons": (*block.reasons, reason),
        }
    )


def _find_hidden(profile: Profile, index: int) -> TensorSpec | None:
    """Return the activations in front of a layer, or behind the first: the largest tensor.

    Of at most three dimensions, if there is one: more have scores of pairs of positions.
    """
    tensors = profile.boundaries[max(index - 1, 0)].tensors if profile.boundaries else ()
    return max(
        (tensor for tensor in tensors if tensor.requires_grad),
        key=lambda tensor: (len(tensor.shape) <= 3, tensor.size_bytes),
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
