"""Replacement of exported operations by calls of the ``torch.nn`` leaf modules that ran them.

An exported graph freezes training mode into its operations. A call of the original module keeps
dropout and batch normalisation working, and every parameter under its own name.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, fx, nn

from ..program.mutation import is_random, is_region, mutated_inputs
from ..program.program import CALL, Program, path_of, value_of

_FAMILIES = (
    "activation", "batchnorm", "channelshuffle", "conv", "dropout", "flatten", "instancenorm",
    "linear", "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
)  # fmt: skip
ONE_TENSOR_FAMILIES = tuple(f"torch.nn.modules.{family}" for family in _FAMILIES)
"""Files of ``torch.nn`` whose modules map one tensor to one tensor, except `OTHER_SIGNATURES`."""

OTHER_SIGNATURES = (
    nn.Bilinear,
    nn.EmbeddingBag,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    nn.MultiheadAttention,
)


def restore_leaves(program: Program) -> None:
    """Replace each run of operations of one leaf call by a call of that leaf."""
    _read_state_directly(program)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    for call, group in groupby(nodes, key=lambda node: node.meta.get(CALL)):
        run = list(group)
        regions = any(is_region(node) for node in run)
        if call is not None and not regions and _is_plain_leaf(program.model, path_of(run[0])):
            _replace(program, run)
    program.graph.eliminate_dead_code(is_impure_node=lambda node: _keeps(node, program))
    program.graph.lint()


def _read_state_directly(program: Program) -> None:
    """Let reads of an updated tensor name the tensor itself instead of the update's result."""
    # An update in place returns the tensor it updates, and export chains later reads through it,
    # which would tie two calls of one module together.
    for node in program.graph.nodes:
        changed = mutated_inputs(node, program)
        if (
            node.op == "call_function"
            and not is_region(node)
            and node.target is not torch.ops.aten.batch_norm.default
            and len(changed) == 1
            and changed[0].op == "get_attr"
        ):
            node.replace_all_uses_with(changed[0])


def _keeps(node: fx.Node, program: Program) -> bool:
    """Return True if a node without users must stay because it has side effects."""
    if node.op in ("placeholder", "output", "call_module") or is_region(node):
        return True
    if is_random(node):  # the random numbers after it would be others
        return True
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _is_plain_leaf(model: nn.Module, path: str) -> bool:
    if not path:
        return False
    module = model.get_submodule(path)
    if any(True for _ in module.children()) or isinstance(module, OTHER_SIGNATURES):
        return False
    if getattr(module, "return_indices", False):
        return False
    return type(module).__module__ in ONE_TENSOR_FAMILIES


def _replace(program: Program, run: list[fx.Node]) -> None:
    inside = set(run)
    sources = {
        source
        for node in run
        for source in node.all_input_nodes
        if source not in inside and source.op != "get_attr"
    }
    results = [node for node in run if any(user not in inside for user in node.users)]
    if len(sources) != 1 or len(results) != 1:
        return
    values = (value_of(next(iter(sources))), value_of(results[0]))
    if not all(isinstance(value, Tensor) for value in values):
        return
    result = results[0]
    path = path_of(result)
    with program.graph.inserting_before(run[0]):
        call = program.graph.call_module(path, (next(iter(sources)),))
    call.meta = dict(result.meta)
    result.replace_all_uses_with(call)
    for node in reversed(run):
        program.graph.erase_node(node)
