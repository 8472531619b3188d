"""Operations that depend on training mode, made to follow the mode again after tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from .mutation import region_of
from .program import Program, path_of

aten = torch.ops.aten


class AttentionDropout(nn.Module):
    """Scaled dot-product attention whose dropout follows the module's mode."""

    def __init__(self, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool) -> None:
        super().__init__()
        self.dropout_p, self.is_causal, self.scale, self.gqa = dropout_p, is_causal, scale, gqa

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            self.dropout_p if self.training else 0.0,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.gqa,
        )


def follow_mode(program: Program) -> None:
    """Turn frozen dropout into modules; list what stays frozen in ``program.fixed_mode``."""
    # torch.export freezes self.training into the arguments of its operators. A graph captured in
    # evaluation mode has lost its dropout altogether, so it is fixed as a whole.
    if not program.training:
        program.fixed_mode = ("captured in evaluation mode",)
        return
    fixed, frozen_in = [], []
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.dropout.default and argument(node, "train"):
            _insert(program, node, nn.Dropout(argument(node, "p")), node.args[:1])
        elif node.target is aten.scaled_dot_product_attention.default:
            _attention(program, node)
        elif _reads_mode(node, program):
            fixed.append(f"{node.target} in {path_of(node) or 'the model itself'}")
            frozen_in.append(path_of(node))
    program.fixed_mode, program.frozen_in = tuple(fixed), tuple(dict.fromkeys(frozen_in))


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an ATen call by name, or its default."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    raise KeyError(name)


def _attention(program: Program, node: fx.Node) -> None:
    dropout_p = argument(node, "dropout_p")
    if not dropout_p:
        return
    module = AttentionDropout(
        dropout_p,
        argument(node, "is_causal"),
        argument(node, "scale"),
        argument(node, "enable_gqa"),
    )
    tensors = tuple(argument(node, name) for name in ("query", "key", "value", "attn_mask"))
    _insert(program, node, module, tensors)


def _insert(program: Program, node: fx.Node, module: nn.Module, args: tuple[Any, ...]) -> None:
    name = f"_mode_{node.name}"
    module.stagewright_follows = path_of(node)  # type: ignore[assignment]
    program.holder.add_module(name, module)
    with program.graph.inserting_before(node):
        call = program.graph.call_module(name, args)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    program.graph.erase_node(node)


def _reads_mode(node: fx.Node, program: Program) -> bool:
    """Return True if an operation, or one in its region, depends on training mode."""
    region = region_of(node, program)
    if region is not None:
        return any(_reads_mode(inner, program) for inner in region[0].nodes)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    names = [declared.name for declared in schema.arguments]
    if "dropout" in names and not argument(node, "dropout"):  # a recurrent net without dropout
        return False
    if "dropout_p" in names:
        return bool(argument(node, "dropout_p"))
    return any(
        name in names and bool(argument(node, name))
        for name in ("train", "training", "use_input_stats")
    )
