"""Recovery of attention's fast causal path from materialised causal masks.

``transformers`` builds the mask as a tensor while being exported, which forces attention onto a
slower kernel; run eagerly, the same model passes ``is_causal=True``.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..program.constants import constant_nodes, evaluate
from ..program.mode_dependent import argument
from ..program.program import VALUE, Program, value_of

MAX_MASK_BYTES = 2**28
"""Largest mask that is computed to see whether it is causal."""


def restore_causal_attention(program: Program) -> None:
    """Replace constant causal masks by ``is_causal=True``; leave any other mask."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    calls = [node for node in program.graph.nodes if node.target is attention]
    if not calls:
        return
    constant = constant_nodes(program)
    causal: dict[fx.Node, bool] = {}
    for call in calls:
        mask = argument(call, "attn_mask")
        if not isinstance(mask, fx.Node) or argument(call, "is_causal"):
            continue
        if mask not in causal:
            causal[mask] = _is_causal(program, mask, constant)
        if causal[mask]:
            _use_causal_flag(call)


def _is_causal(program: Program, mask: fx.Node, constant: set[fx.Node]) -> bool:
    fake = mask.meta.get(VALUE)
    if not isinstance(fake, Tensor) or fake.numel() * fake.element_size() > MAX_MASK_BYTES:
        return False
    value = evaluate(program, mask, constant)
    if value is None or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return False
    lower = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).tril()
    allowed = value if value.dtype == torch.bool else value == 0
    blocked = value.logical_not() if value.dtype == torch.bool else value <= -1e4
    return bool((allowed == lower).all() and (blocked == lower.logical_not()).all())


def _use_causal_flag(call: fx.Node) -> None:
    names = [declared.name for declared in call.target._schema.arguments]  # type: ignore[union-attr]
    values = {name: argument(call, name) for name in names}
    values.update(attn_mask=None, is_causal=True)
    call.args = tuple(values.pop(name) for name in ("query", "key", "value"))
    call.kwargs = values


aten = torch.ops.aten

_VIEWS = (aten.transpose.int, aten.reshape.default, aten.view.default)


def erase_copies_behind_attention(program: Program) -> None:
    """Erase ``contiguous()`` after attention if a real kernel's output is contiguous already."""
    # Fused attention lays its result out token by token. On the meta device it is decomposed into
    # steps that lay it out head by head, and the author's transpose(1, 2).contiguous() becomes a
    # copy that no device makes. With dropout the CPU decomposes it, too, so that stays.
    for node in list(program.graph.nodes):
        if node.target is not aten.contiguous.default or not value_of(node).is_meta:
            continue
        laid_out = node.all_input_nodes[0]
        if _is_fused(_viewed(laid_out)):
            laid_out.meta[VALUE] = node.meta[VALUE]
            node.replace_all_uses_with(laid_out)
            program.graph.erase_node(node)


def _viewed(node: fx.Node) -> fx.Node:
    """Return the node that a chain of transposes and reshapes is a view of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_fused(node: fx.Node) -> bool:
    attention = aten.scaled_dot_product_attention.default
    return node.target is attention and not argument(node, "dropout_p")
