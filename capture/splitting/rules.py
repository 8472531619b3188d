"""Rules by which operations are split: layouts of inputs in, layout of the output out.

A rule takes a `NodeCall` of whose inputs at least one is divided, or which may start a split, and
returns the `NodeSplit`; it raises `Unsplittable` where no exact split is known. To support another
operation add a rule to `FUNCTIONS` or `MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..observation.interception import HOOKS
from ..program.mode_dependent import AttentionDropout
from .elementwise_rules import (
    split_batch_norm,
    split_channelwise,
    split_concatenation,
    split_dropout,
    split_elementwise,
    split_group_norm,
    split_norm,
    split_norm_module,
    split_reduction,
    split_softmax,
    split_softmax_module,
)
from .layout import NodeCall, NodeSplit, base_name
from .product_rules import (
    split_addmm,
    split_attention,
    split_convolution_module,
    split_embedding_module,
    split_grouped_product,
    split_linear,
    split_linear_module,
    split_matmul,
)
from .shape_rules import (
    split_complex_view,
    split_expand,
    split_getitem,
    split_parts,
    split_repeat_interleave,
    split_slice,
    split_squeeze,
    split_transpose,
    split_unbind,
    split_unsqueeze,
    split_view,
)

Rule = Callable[[NodeCall], NodeSplit]

ELEMENTWISE = ("to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias")
"""Operators that treat elements by themselves, besides those that torch tags ``pointwise``."""


LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "argmax", "argmin")


DROPOUT = ("dropout", "feature_dropout")


FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, *LIKE), split_elementwise),
    **dict.fromkeys(REDUCTIONS, split_reduction),
    **dict.fromkeys(DROPOUT, split_dropout),
    "linear": split_linear,
    "addmm": split_addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), split_matmul),
    "scaled_dot_product_attention": split_attention,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), split_softmax),
    **dict.fromkeys(("layer_norm", "rms_norm"), split_norm),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), split_view),
    "expand": split_expand,
    **dict.fromkeys(("transpose", "permute", "t"), split_transpose),
    "unsqueeze": split_unsqueeze,
    "squeeze": split_squeeze,
    **dict.fromkeys(("slice", "select"), split_slice),
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), split_parts),
    "unbind": split_unbind,
    **dict.fromkeys(("view_as_complex", "view_as_real"), split_complex_view),
    "getitem": split_getitem,
    "repeat_interleave": split_repeat_interleave,
    **dict.fromkeys(("cat", "concat"), split_concatenation),
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), split_grouped_product),
    **dict.fromkeys(
        ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d"), split_channelwise
    ),
}
"""Rules of operators, by name without namespace and overload."""


MODULES: dict[type[nn.Module], Rule] = {
    nn.Linear: split_linear_module,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), split_convolution_module),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), split_batch_norm),
    nn.GroupNorm: split_group_norm,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), split_norm_module),
    nn.Embedding: split_embedding_module,
    nn.Softmax: split_softmax_module,
    **dict.fromkeys(
        (
            nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Identity, nn.ELU,
            nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.SELU, nn.CELU,
        ),
        split_elementwise,
    ),
    nn.Dropout: split_dropout,
    **dict.fromkeys((nn.Dropout2d, nn.Dropout3d), split_dropout),
    **dict.fromkeys(
        (
            nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample,
            nn.ZeroPad2d,
        ),
        split_channelwise,
    ),
}  # fmt: skip
"""Rules of modules that are called whole, by their exact type."""


STARTS = ("linear", "addmm", "matmul", "mm", "grouped_mm_fallback", "_grouped_mm")
"""Operators that may start a split: their output is divided though their inputs are whole."""


STARTING_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def find_rule(call: NodeCall) -> Rule | None:
    """Return the rule for an operation; `None` if there is none."""
    if call.node.op == "call_module":
        kind = type(call.module)
        if "forward" in vars(call.module) or any(getattr(call.module, each) for each in HOOKS):
            return None  # its own code, or a hook's, runs too
        if kind is AttentionDropout:
            return split_attention
        return MODULES.get(kind)
    if call.node.op != "call_function":
        return None
    if (rule := FUNCTIONS.get(base_name(call.node))) is not None:
        return rule
    tags = getattr(call.node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    return split_elementwise if torch.Tag.pointwise in tags and not is_random else None


def may_start(call: NodeCall) -> bool:
    """Return True if an operation whose inputs are whole may divide its output."""
    if call.node.op == "call_module":
        return isinstance(call.module, STARTING_MODULES)
    return call.node.op == "call_function" and base_name(call.node) in STARTS
