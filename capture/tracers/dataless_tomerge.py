"""What is put right in a graph captured on the meta device, where no kernel ever ran."""

from __future__ import annotations

import torch
from torch import fx

from ..program.mode_dependent import argument
from ..program.program import VALUE, Program, value_of

aten = torch.ops.aten

_VIEWS = (aten.transpose.int, aten.reshape.default, aten.view.default)


def erase_copies_behind_attention(program: Program) -> None:
    """Erase ``contiguous()`` behind attention, where a real kernel's memory is so already.

    Fused attention lays its result out token by token; without data it is computed in steps that
    lay it out head by head, and the author's ``transpose(1, 2).contiguous()`` becomes a copy that
    no device makes. Attention with dropout is left alone: the CPU computes that in steps, too.
    """
    for node in list(program.graph.nodes):
        if node.target is not aten.contiguous.default or not value_of(node).is_meta:
            continue
        laid_out = node.all_input_nodes[0]
        if _is_fused(_viewed(laid_out)):
            laid_out.meta[VALUE] = node.meta[VALUE]
            node.replace_all_uses_with(laid_out)
            program.graph.erase_node(node)


def _viewed(node: fx.Node) -> fx.Node:
    """What a node is a view of, as far as shapes and order of dimensions go."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_fused(node: fx.Node) -> bool:
    attention = aten.scaled_dot_product_attention.default
    return node.target is attention and not argument(node, "dropout_p")
