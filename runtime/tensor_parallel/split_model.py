"""Splitting of a captured model's layers over the ranks that share its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from ...capture.captured import Captured
from ...capture.program.cuts import Cut
from ...capture.program.mode_dependent import argument
from ...capture.program.mutation import is_random
from ...capture.program.segment import Segment, get_segments
from ...capture.splitting.find_split import ModelSplit, find_split, is_local, list_outputs
from ...capture.splitting.layout import Shard
from ...capture.splitting.rewrite import rewrite, take_part
from .exchange import ShardGroup
from .split_output import OutputParts


@dataclass(frozen=True)
class Division:
    """Division of a parameter or buffer over the ranks that share a stage.

    Attributes:
        layout: The dimension along which each rank holds a part.
        degree: Number of ranks.
        shape: Shape of the whole tensor.
    """

    layout: Shard
    degree: int
    shape: tuple[int, ...]

    def take(self, whole: Tensor, shard: int) -> Tensor:
        """Return a rank's part, with memory of its own."""
        layout = self.layout
        part = take_part(whole, layout.dim, layout.parts, shard, self.degree)
        return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class SplitModel:
    """A captured model that was split.

    Attributes:
        divided: Parameters and buffers of which ranks hold parts, by each of their names.
        reasons: Why products stay whole, by layer and operation.
        draws: Whether a layer that is shared may draw random numbers, equal on its ranks.
        draws_apart: Whether each rank draws dropout of its own attention heads, unlike any that
            the unsplit model draws.
        group: The ranks that share this rank's stages.
        output_parts: The model's outputs of which each rank holds a part; `None` if there are none.
    """

    divided: Mapping[str, Division]
    reasons: Mapping[tuple[int, str], str]
    draws: bool
    draws_apart: bool
    group: ShardGroup
    output_parts: OutputParts | None = None

    def join(self, name: str, part: Tensor) -> Tensor:
        """Return a tensor whole, if it is divided; called on all ranks that hold parts of it."""
        division = self.divided.get(name)
        return part if division is None else self.group.join(part.to_dense(), division.layout)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor, if it is divided."""
        division = self.divided.get(name)
        return whole if division is None else division.take(whole, self.group.shard)


def split_model(
    captured: Captured, degrees: Sequence[int], stages: Sequence[int], group: ShardGroup
) -> SplitModel:
    """Rewrite a captured model so that ranks compute their parts of its layers.

    ``degrees`` is how many ranks share each layer, ``stages`` the stage that it is in, outside of
    which values are whole. The captured graph keeps to the whole model.
    Weights keep their values until `divide_weights`.
    """
    _ = captured.graph  # computed now: the document describes the model before it is split
    both = [captured, *([captured.evaluation] if captured.evaluation is not None else [])]
    traced = [(each.program, each.layers, each.cuts) for each in both]
    split = find_split(traced, degrees, stages)
    apart = {node for node, change in split.changes.items() if change.draws}
    draws, exchange = _draws_random_numbers(captured, degrees, apart), group.exchange()
    for each in both:
        rewrite(each.program, each.layers, split, lambda layer: exchange)
        each.cuts = [_divide_cut(one, split, group.degree) for one in each.cuts]
    model = captured.program.model
    divided = {
        name: Division(weight.layout, weight.degree, tuple(tensor.shape))
        for name, tensor in _tensors_of(model)
        if (weight := split.weights.get(id(tensor))) is not None
    }
    layouts = list_outputs(captured.program, split)
    parts = OutputParts(layouts, group) if any(layouts) else None
    return SplitModel(divided, split.reasons, draws, bool(apart), group, parts)


def _divide_cut(cut: Cut, split: ModelSplit, degree: int) -> Cut:
    """Return a cut with the shapes of what a rank sends there."""
    if not cut.boundary.legal:
        return cut
    tensors = list(cut.boundary.tensors)
    for at, node in enumerate(cut.nodes):
        if is_local(node, split):
            layout = split.changes[node].layout
            assert isinstance(layout, Shard)
            shape = list(tensors[at].shape)
            shape[layout.dim] //= degree
            tensors[at] = tensors[at].model_copy(update={"shape": tuple(shape)})
    boundary = cut.boundary.model_copy(update={"tensors": tuple(tensors)})
    return replace(cut, boundary=boundary)


def _draws_random_numbers(
    captured: Captured, degrees: Sequence[int], apart: Collection[fx.Node]
) -> bool:
    """Return True if ranks that share a layer may draw random numbers that have to be equal."""
    program, layers = captured.program, captured.layers
    for node, layer in layers.layer_of.items():
        if degrees[layer] == 1 or node in apart:
            continue
        if node.op == "call_module" and _may_draw(program.attribute(str(node.target))):
            return True
        if node.op == "call_function" and is_random(node) and _has_rate(node):
            return True
    return False


def _has_rate(node: fx.Node) -> bool:
    """Return False for attention or dropout at a rate of 0."""
    names = {each.name for each in node.target._schema.arguments}  # type: ignore[union-attr]
    rates = [argument(node, name) for name in ("p", "dropout_p") if name in names]
    return not rates or any(rates)


_DRAWING = (
    nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
"""Torch's modules that draw random numbers, at some rates at least."""


def _may_draw(module: nn.Module) -> bool:
    # Modules that are called whole are torch's own leaves, captured dropout, or opaque.
    is_library = type(module).__module__.startswith("torch.nn.")
    if is_library and not isinstance(module, _DRAWING):
        return False
    rate = getattr(module, "p", getattr(module, "dropout_p", None))
    return rate != 0


@torch.no_grad()
def divide_weights(stages: Sequence[Segment], split: SplitModel) -> None:
    """Give the divided parameters and buffers of this rank's stages its parts of their values.

    They stay the objects that they were, with whatever a script has put on them.
    """
    seen: set[int] = set()
    for root in (each for stage in stages for each in get_segments(stage)):
        for name, tensor in _tensors_of(root):
            if (division := split.divided.get(name)) is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                tensor.data = division.take(tensor.detach(), split.group.shard)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
