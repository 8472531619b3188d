"""A model again out of a graph without code: the same operations, random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ..models.families import make_sample
from .graph_module import Skeleton, skeleton
from .random_values import made_up


@dataclass(frozen=True)
class RebuiltModel:
    """A model that runs, and one micro-batch for it.

    Attributes:
        model: Takes the graph's inputs by name and returns what the captured model did, mappings
            as dictionaries and sequences as tuples. Parameters and buffers have the captured
            model's names, so its ``state_dict`` can be loaded.
        sample: Random inputs by name.
    """

    model: fx.GraphModule
    sample: dict[str, Tensor]


def rebuild(graph: Graph, *, device: torch.device | str = "cpu", seed: int = 0) -> RebuiltModel:
    """Build a module from a graph's allow-listed operations, with random weights.

    Nothing is read but the graph. It is checked operation by operation when it runs; whoever does
    not trust a graph runs it in a process of its own (see `profiler.child`).

    Args:
        graph: Captured with ``rebuildable`` set.
        device: Where weights and inputs are made.
        seed: Of weights and inputs.

    Raises:
        InvalidInput: It cannot be rebuilt; the message says why and what to do instead.
    """
    device = torch.device(device)
    parts = skeleton(graph, device)
    for node in parts.graph.nodes:
        if node.op == "output":
            node.args = (_nested(node.args[0], graph.output_paths),)
    _give_values(parts, device, seed)
    module = parts.module()
    for root in (parts.model, parts.holder):
        _adopt(module, root, persistent=root is parts.model)
    _reorder(module, [entry.names[0] for entry in graph.state])
    assert graph.sample is not None, "reading a rebuildable graph checks that"
    inputs, _ = make_sample(graph.sample.model_copy(update={"seed": seed}), device)
    return RebuiltModel(module, inputs)


def _give_values(parts: Skeleton, device: torch.device, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    real: dict[int, Tensor] = {}
    for module in (*parts.model.modules(), *parts.holder.modules()):
        for table in (module._parameters, module._buffers, dict(vars(module))):
            for name, tensor in list(table.items()):
                if isinstance(tensor, Tensor):
                    key = id(tensor)
                    if key not in real:
                        real[key] = made_up(parts.state[key], device, generator)
                    setattr(module, name, real[key])


def _adopt(module: fx.GraphModule, root: nn.Module, *, persistent: bool) -> None:
    """Register the tensors no operation reads, and keep constants out of the ``state_dict``."""
    for path, owner in root.named_modules():
        target: nn.Module = module
        for part in path.split(".") if path else ():
            if part not in target._modules:
                target.add_module(part, nn.Module())
            target = target.get_submodule(part)
        if target is owner:
            continue
        for name, parameter in owner._parameters.items():
            target.register_parameter(name, parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                kept = name not in owner._non_persistent_buffers_set
                target.register_buffer(name, buffer, persistent=kept)
        if not persistent:
            target._non_persistent_buffers_set |= set(target._buffers) & set(vars(owner))


def _reorder(module: fx.GraphModule, names: Sequence[str]) -> None:
    """Children and tensors in the captured model's order: of tied names, the first one counts."""
    rank: dict[str, int] = {}
    for position, name in enumerate(names):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            rank.setdefault(".".join(parts[:length]), position)
    for path, owner in list(module.named_modules()):
        prefix = f"{path}." if path else ""
        tables: tuple[dict[str, Any], ...] = (owner._modules, owner._parameters, owner._buffers)
        for table in tables:
            ordered = sorted(table, key=lambda own: rank.get(prefix + own, len(names)))
            for own in ordered:
                table[own] = table.pop(own)


def _nested(values: Sequence[Any], paths: Sequence[Sequence[str | int]]) -> Any:
    """Put flat values where their paths say.

    Raises:
        InvalidInput: The paths do not describe one nested value.
    """
    if len(paths) == 1 and not paths[0]:
        return values[0]
    branches: dict[str | int, tuple[list[Any], list[Sequence[str | int]]]] = {}
    for value, path in zip(values, paths, strict=True):
        if not path:
            raise InvalidInput("a value is returned alone and with others", field="/output_paths")
        found = branches.setdefault(path[0], ([], []))
        found[0].append(value)
        found[1].append(path[1:])
    nested = {key: _nested(*found) for key, found in branches.items()}
    if all(isinstance(key, int) for key in nested):
        return tuple(nested.values())
    return {str(key): value for key, value in nested.items()}
