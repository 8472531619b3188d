"""Random numbers of a layer that depend on its name, the step and the micro-batch alone.

A model cut differently draws the same numbers then: every run of a layer's operations begins with
generators seeded for it, whatever ran before in the same process. How an operation lays its numbers
out in memory follows its input, and what crosses a cut arrives contiguous; so wherever a cut may
be, a value is made contiguous, cut or not.
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
    """What a micro-batch's random numbers depend on, besides the layer.

    Attributes:
        seed: The caller's; another one for other replicas of the whole pipeline.
        step: Of training.
        microbatch: Of the step.
        device: Where the layers run: its generator is seeded, and those of the CPU and of Python.
    """

    seed: int
    step: int
    microbatch: int
    device: torch.device

    def start(self, layer: str) -> None:
        """From here on draw the numbers of this layer."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{layer}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") >> 1  # generators take 63 bits on every device
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].manual_seed(number)


def start_layer(keys: RandomKeys, layer: str) -> None:
    """`RandomKeys.start` as an operation of a graph."""
    keys.start(layer)


def make_contiguous(value: Any) -> Any:
    """A value as it would come over a cut: contiguous."""
    return value.contiguous() if isinstance(value, Tensor) else value


class KeyedNodeCopier:
    """Adds to the copy of a program's nodes what makes their random numbers keyed.

    Args:
        program: Copied from.
        layers: Its layers.
        cuts: Positions where it may be cut, ascending.
        graph: Copied to; its first placeholder is made here.
    """

    def __init__(
        self, program: Program, layers: Layers, cuts: Sequence[int], graph: fx.Graph
    ) -> None:
        self._layers, self._cuts, self._graph = layers, cuts, graph
        self._keys = graph.placeholder("keys")
        self._starts = _starts(program, layers)
        self._over: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Add the copy of a node, with generators seeded where it is the first of its layer."""
        if node in self._starts:
            self._graph.call_function(start_layer, (self._keys, self._starts[node]))
        return self._graph.node_copy(node, lambda source: self._read(source, copies[source], node))

    def _read(self, source: fx.Node, copy: fx.Node, node: fx.Node) -> fx.Node:
        """What the copy of ``node`` reads in the place of ``copy``, that of ``source``."""
        user = self._layers.layer_of.get(node)
        if user is None or not self._may_be_cut(source, user):
            return copy
        if source not in self._over:
            self._over[source] = self._graph.call_function(make_contiguous, (copy,))
        return self._over[source]

    def _may_be_cut(self, source: fx.Node, user: int) -> bool:
        """Whether some cut may lie between a value and the layer that reads it."""
        if source.op == "get_attr" or source in self._layers.constant:
            return False
        made = self._layers.layer_of.get(source, 0)  # the model's inputs are there from the first
        return bisect_right(self._cuts, user) > bisect_right(self._cuts, made)


def _starts(program: Program, layers: Layers) -> dict[fx.Node, str]:
    """Where a run of a layer's operations begins in the whole program, and its name.

    Layers may take turns, so one may have several runs.
    """
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
