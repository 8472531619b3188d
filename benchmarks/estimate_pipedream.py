"""PipeDream's published profiles as measurements of a GPU: what each module does, and its time.

The profiles do not name their GPU. Of those in the paper (Narayanan et al. 2019, table 2: V100 and
Titan X) it is the V100: the ReLU of 1.6 GB in `vgg16` reads and writes 740 GB/s, and a Titan X's
memory gives 480 at most. Each module is run on the meta device on the output of those before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stagewright.core.cluster.accelerators import Backend
from stagewright.profiler.estimates.calibration import CalibrationPoint
from stagewright.profiler.estimates.flops import Cost
from stagewright.profiler.estimates.layer_costs import CostRecorder
from stagewright.profiler.estimates.meta_device import DeviceKernels

NAMES = ("alexnet", "vgg16", "squeezenet1_0", "resnet50")
"""Chains and sums of modules with images as input; the others have inputs of several kinds."""

SIDE = 224
"""Pixels a side of their images; how many there are, the bytes of the input tell."""

LAYERS = {
    "Conv2d": nn.Conv2d,
    "BatchNorm2d": nn.BatchNorm2d,
    "ReLU": nn.ReLU,
    "MaxPool2d": nn.MaxPool2d,
    "AvgPool2d": nn.AvgPool2d,
    "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d,
    "Linear": nn.Linear,
    "Dropout": nn.Dropout,
}


def pipedream_cases(folder: Path) -> list[tuple[str, CalibrationPoint]]:
    """Every profile with its modules' operations and measured times."""
    return [(name, _case((folder / f"{name}.txt").read_text())) for name in NAMES]


def _case(text: str) -> CalibrationPoint:
    nodes, sources = _read(text)
    outputs: dict[str, Tensor] = {}
    costs: list[tuple[Cost, ...]] = []
    times: list[float] = []
    for name in _in_order(nodes, sources):
        description, forward_s, backward_s, size_bytes = nodes[name]
        given = [outputs[source] for source in sources[name]]
        if description.startswith("Input"):
            batch = int(size_bytes) // (4 * 3 * SIDE**2)
            outputs[name] = torch.empty(batch, 3, SIDE, SIDE, device="meta")
            continue
        forward, backward, output = _run(description, given, is_first=not costs)
        assert output.numel() * 4 == size_bytes or description.startswith("Size"), description
        outputs[name] = output
        if forward_s + backward_s > 0:
            costs += [forward, backward]
            times += [forward_s, backward_s]
    return CalibrationPoint(costs, times)


def _read(text: str) -> tuple[dict[str, tuple[str, float, float, float]], dict[str, list[str]]]:
    """Return description, seconds forward and backward, bytes of every node; and what it reads."""
    nodes: dict[str, tuple[str, float, float, float]] = {}
    sources: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("\t"):
            source, reader = line.strip().split(" -- ")
            sources.setdefault(reader, []).append(source)
        elif line.strip():
            name, description, numbers = line.split(" -- ")[:3]
            values = [float(part.partition("=")[2]) for part in numbers.split(", ")]
            nodes[name] = (description, values[0] / 1e3, values[1] / 1e3, values[2])
    return nodes, {name: sources.get(name, []) for name in nodes}


def _in_order(nodes: Iterable[str], sources: dict[str, list[str]]) -> list[str]:
    """Nodes behind all they read, by their numbers where that leaves a choice."""
    order: list[str] = []
    waiting = sorted(nodes, key=lambda name: int(name.removeprefix("node")))
    while waiting:
        ready = next(name for name in waiting if all(s in order for s in sources[name]))
        waiting.remove(ready)
        order.append(ready)
    return order


def _run(
    description: str, given: list[Tensor], *, is_first: bool
) -> tuple[tuple[Cost, ...], tuple[Cost, ...], Tensor]:
    """Operations of a module's forward and backward, and its output."""
    leaves = [tensor.detach().requires_grad_(not is_first) for tensor in given]
    kind = description.partition("(")[0]
    if kind in LAYERS:
        return recorded(_module(description), leaves, "cuda", winograd=True)
    if kind.startswith("Add"):
        return (), (), given[0]
    if kind.startswith("Concat"):
        return (), (), torch.cat(given, dim=1)
    if kind == "Size":  # a number; the view reads it beside the tensor it flattens
        return (), (), torch.empty((), device="meta")
    if kind == "View":
        return (), (), max(given, key=torch.Tensor.numel).flatten(1)
    raise ValueError(f"no module is known for {description!r}")


def recorded(
    module: nn.Module, inputs: Sequence[Tensor], backend: Backend, *, winograd: bool = False
) -> tuple[tuple[Cost, ...], tuple[Cost, ...], Tensor]:
    """Operations of one module's forward and backward on the meta device, and its output."""
    forward, backward = CostRecorder(winograd), CostRecorder(winograd)
    with DeviceKernels(backend), forward:
        output: Tensor = module(*inputs)
    gradient = torch.ones_like(output)
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    if wanted and output.requires_grad:
        with backward:
            torch.autograd.grad([output], wanted, [gradient])
    return tuple(forward.costs), tuple(backward.costs), output.detach()


def _module(description: str) -> nn.Module:
    """``Conv2d(3, 64, kernel_size=(3, 3))`` as a module on the meta device."""
    kind, _, inside = description.partition("(")
    inside = inside.rsplit(")", 1)[0]
    parts = re.split(r", (?![^(]*\))", inside) if inside else []
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            args.append(name == "inplace" or _value(name))
        else:
            kwargs[name] = _value(value)
    if kind in ("ReLU", "Dropout"):  # in place they would change what others read
        args, kwargs = [], {}
    with torch.device("meta"):
        return LAYERS[kind](*args, **kwargs).train()


def _value(text: str) -> object:
    numbers = re.fullmatch(r"\((.*)\)", text)
    if numbers:
        return tuple(int(part) for part in numbers[1].split(",") if part.strip())
    if text in ("True", "False"):
        return text == "True"
    return float(text) if re.search(r"[.e]", text) else int(text)
