"""Keyed randomness: random numbers that depend only on the layer, the step and the micro-batch.

A model then draws equal numbers however it is cut: every run of a layer's operations begins with
generators seeded for it, whatever ran before in the process. The memory layout of random tensors
follows that of an operation's input, and whatever crosses a cut arrives contiguous; so values are
made contiguous at every possible cut, whether it is used or not.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .layers import Layers
from .program import Program


@dataclass(frozen=True)
class RandomKeys:
    """Key of a micro-batch's random numbers.

    The caller's seed is different for each replica of the whole pipeline. The generator of the
    layers' device is seeded along with the CPU's and Python's.
    """

    seed: int
    step: int
    microbatch: int
    device: torch.device

    def start(self, layer: str) -> None:
        """Seed the generators for a layer."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{layer}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") >> 1  # generators take 63 bits on every device
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].manual_seed(number)


def make_contiguous(value: Any) -> Any:
    """Return a tensor as it would arrive over a cut: contiguous."""
    return value.contiguous() if isinstance(value, Tensor) else value


class KeyedNodeCopier:
    """Copier of a program's nodes that adds the operations which key their random numbers.

    ``cuts`` are the positions of legal cuts, ascending. The first placeholder of the target graph,
    the keys, is created here.
    """

    def __init__(
        self, program: Program, layers: Layers, cuts: Sequence[int], graph: fx.Graph
    ) -> None:
        self._layers, self._cuts, self._graph = layers, cuts, graph
        self._keys = graph.placeholder("keys")
        self._starts = _starts(program, layers)
        self._over: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node, preceded by seeding the generators if it begins a run of its layer."""
        if node in self._starts:
            self._graph.call_method("start", (self._keys, self._starts[node]))
        return self._graph.node_copy(node, lambda source: self._read(source, copies[source], node))

    def _read(self, source: fx.Node, copy: fx.Node, node: fx.Node) -> fx.Node:
        """Return the node that the copy of ``node`` reads instead of ``source``."""
        user = self._layers.layer_of.get(node)
        if user is None or not self._may_be_cut(source, user):
            return copy
        if source not in self._over:
            self._over[source] = self._graph.call_function(make_contiguous, (copy,))
        return self._over[source]

    def _may_be_cut(self, source: fx.Node, user: int) -> bool:
        """Return True if a legal cut lies between a value and the layer that reads it."""
        if source.op == "get_attr" or source in self._layers.constant:
            return False
        made = self._layers.layer_of.get(source, 0)  # the model's inputs count as the first layer
        return bisect_right(self._cuts, user) > bisect_right(self._cuts, made)


def _starts(program: Program, layers: Layers) -> dict[fx.Node, str]:
    """Return the first node of each run of a layer's operations, with the run's name."""
    # Layers may alternate, so that one layer has several runs, each with a seed of its own.
    found: dict[fx.Node, str] = {}
    runs: Counter[int] = Counter()
    previous = -1
    for node in program.graph.nodes:
        layer = layers.layer_of.get(node, previous)
        if layer != previous:
            found[node] = f"{layers.names[layer]}/{runs[layer]}"
            runs[layer] += 1
            previous = layer
    return found
