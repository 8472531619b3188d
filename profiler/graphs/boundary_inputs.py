"""Synthetic inputs of a rebuilt graph's layer, with the memory layout of real ones.

Values that follow from the model's inputs without any weight (position ids, masks) are computed;
all others are random numbers, or zeros where they are integers, which are valid as indices of
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.program.mutation import is_random, region_of
from ...capture.program.program import Program, storage_key, value_of
from ..layers.layer_run import LayerRun, bytes_of, mapped
from ..models.families import make_sample
from .memory_needed import within_budget
from .random_values import made_up
from .rebuilt_capture import Rebuilt, cannot_be_done

MAX_COMPUTED_BYTES = 2**30
"""Larger values are made up even where they could be computed."""
MAX_HELD_BYTES = 2**32
"""Of computed values and what they are computed from, at once."""


class BoundaryValues:
    """Source of made-up values that each layer reads.

    The values computed and the model's inputs take at most ``budget_bytes`` at once; what does not
    fit is made up when a layer reads it.
    """

    def __init__(
        self,
        rebuilt: Rebuilt,
        runs: Iterable[LayerRun],
        device: torch.device,
        generator: torch.Generator,
        budget_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._rebuilt, self._device, self._generator = rebuilt, device, generator
        wanted = {node for run in runs for node in run.reads}
        program = rebuilt.captured.program
        budget_bytes = min(budget_bytes, MAX_HELD_BYTES)
        known = within_budget(_computable(program), program.inputs, wanted, budget_bytes)
        self._known = self._compute(known, wanted)

    def of(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Any]:
        """Values for these nodes; those that are views of one memory are so here, too."""
        memory: dict[int, Tensor] = {}
        return {
            node: self._known[node]
            if node in self._known
            else self._made_up(value_of(node), memory)
            for node in nodes
        }

    def _made_up(self, like: Any, memory: dict[int, Tensor]) -> Any:
        def make(tensor: Tensor) -> Tensor:
            # Values that share a storage in the model share one here: a layer that changes one in
            # place changes the others.
            key = storage_key(tensor)
            if key not in memory:
                memory[key] = self._filled(tensor)
            base = memory[key].untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
            # `set_`, not `as_strided`: two views of one storage may differ in dtype.
            return empty.set_(base, tensor.storage_offset(), tensor.shape, tensor.stride())

        return mapped(make, like)

    def _filled(self, like: Tensor) -> Tensor:
        """Memory as large as a value's, read as that value's dtype."""
        count = like.untyped_storage().nbytes() // like.element_size()
        memory = torch.empty(count, dtype=like.dtype, device=self._device)
        if not (like.is_floating_point() or like.is_complex()):
            # Integers are 0, a valid index; booleans True: a mask of False would hide everything.
            return memory.fill_(like.dtype == torch.bool)
        if like.element_size() == 1:
            # torch does not draw normal numbers of the 8-bit floating types.
            return memory.fill_(1.0)
        return memory.normal_(generator=self._generator)

    def _compute(self, known: Sequence[fx.Node], wanted: set[fx.Node]) -> dict[fx.Node, Any]:
        """Compute the model's inputs and the nodes that follow from them, buffers and constants."""
        program, sample = self._rebuilt.captured.program, self._rebuilt.graph.sample
        assert sample is not None, "reading a rebuildable graph checks that"
        inputs, _ = make_sample(sample, self._device)
        values: dict[fx.Node, Any] = {
            node: inputs[name]
            for node, name in zip(program.inputs, program.structure.names, strict=True)
        }
        # Later nodes overwrite earlier ones, which leaves the last.
        last_use = {source: node for node in known for source in node.all_input_nodes}
        with torch.no_grad():
            for node in known:
                try:
                    values[node] = self._value(node, values)
                except Exception as error:
                    raise cannot_be_done(node.name, error) from error
                for source in node.all_input_nodes:
                    if last_use[source] is node and source not in wanted:
                        values.pop(source, None)
        return {node: value for node, value in values.items() if node in wanted}

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            attribute = self._rebuilt.captured.program.attribute(str(node.target))
            if isinstance(attribute, Tensor):
                return made_up(self._rebuilt.state[id(attribute)], self._device, self._generator)
            return attribute
        arguments = fx.map_arg(node.args, values.__getitem__)
        keywords = fx.map_arg(node.kwargs, values.__getitem__)
        return node.target(*arguments, **keywords)  # type: ignore[operator]


def _computable(program: Program) -> list[fx.Node]:
    """Nodes, in order, that depend on no parameter and no random number, and are not large."""
    # Tied parameters are listed under every name: a node may read any of them.
    parameters = {name for name, _ in program.model.named_parameters(remove_duplicate=False)}
    known = set(program.inputs)
    found = []
    for node in program.graph.nodes:
        if node.op == "get_attr":
            small = bytes_of(value_of(node)) <= MAX_COMPUTED_BYTES
            possible = small and str(node.target) not in parameters
        else:
            possible = (
                node.op == "call_function"
                and not is_random(node)
                and not _draws_inside(node, program)
                and all(source in known for source in node.all_input_nodes)
                and bytes_of(value_of(node)) <= MAX_COMPUTED_BYTES
            )
        if possible:
            known.add(node)
            found.append(node)
    return found


def _draws_inside(node: fx.Node, program: Program) -> bool:
    region = region_of(node, program)
    return region is not None and any(map(is_random, region[0].nodes))
