"""Check of traced calls against the list of operations that a rebuildable graph may contain."""

from __future__ import annotations

import operator

from torch import fx
from torch._ops import OpOverload

from ...core.graph.allowed_ops import GETITEM, OPERATORS
from .literals import NotSerializable

CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
"""Assertions that torch.export inserts; they compute nothing and are not serialized."""


def is_check(node: fx.Node) -> bool:
    return not node.users and getattr(node.target, "__name__", "").split(".")[0] in CHECKS


def allowed_target(node: fx.Node) -> str:
    """Return the listed name of the function that a node calls.

    Raises:
        NotSerializable: It is not on the list.
    """
    if node.target is operator.getitem:
        if not isinstance(node.args[1], int):
            raise NotSerializable("an element taken by something else than its number")
        return GETITEM
    name = str(node.target)
    if not isinstance(node.target, OpOverload):
        raise NotSerializable(
            f"a call of {getattr(node.target, '__name__', name)}, which is Python"
        )
    if name not in OPERATORS:
        raise NotSerializable(f"the operator {name}, which is not on the list")
    return name
