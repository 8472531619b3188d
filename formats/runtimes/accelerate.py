"""Accelerate and Transformers: a device map, and split points for a pipelined forward."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate, groupby, islice

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.units import list_some
from ..gpu_numbers import number_gpus
from ..settings import Settings
from ..target import MOST_NAMED, Export, ImportedCut, ModelLayers, parse_literal, write_header

TITLE = "Accelerate"
CHECKED = "accelerate 1.15.0 and transformers 5.23.0, check_device_map and a dispatched forward"

OFFLOADED = ("cpu", "disk")
"""Devices of modules that are brought to a GPU for their forward pass."""

_DEVICE = re.compile(r"(?:torch\.)?device\((?:type=)?[\"']([\w:]+)[\"'](?:, *(?:index=)?(\d+))?\)")


def write(plan: Plan) -> Export:
    """Write ``device_map`` and ``split_points``."""
    layers = ModelLayers.of(plan)
    stack = layers.stack if layers.has_blocks else None
    blocks = {stack.name(block) for block in range(stack.num_blocks)} if stack else set()
    depth = stack.name(0).count(".") + 1 if stack else 0
    cuts = list(accumulate(plan.balance, initial=0))
    device_map: dict[str, int] = {}
    numbers, visible = number_gpus(plan)
    for index, stage in enumerate(plan.stages):
        number = numbers[index]
        names = [*stage.module_fqns, *(name.partition("@")[0] for name in stage.layer_names)]
        for name in names:
            if ".".join(name.split(".")[:depth]) not in blocks:
                device_map.setdefault(name, number)
        if stack:
            own = range(stack.count(cuts[index]), stack.count(cuts[index + 1]))
            device_map.update((stack.name(block), number) for block in own)
    for weight in plan.shared_weights:  # under all of its names, used or not
        number = numbers[sum(cut <= weight.layers[0] for cut in cuts) - 1]
        for name in weight.names:
            device_map.setdefault(name.rpartition(".")[0], number)
    points = [
        stack.name(stack.count(cut)) if stack and cut in stack.starts else plan.layer_names[cut]
        for cut in cuts[1:-1]
    ]
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: AutoModelForCausalLM.from_pretrained(MODEL, device_map=device_map), or "
        "accelerate.dispatch_model(model, device_map).",
        f"Pipelined{f', by ranks on GPUs {numbers}' * bool(plan.ranks)}: "
        "accelerate.prepare_pippy(model, split_points=split_points, num_chunks=num_chunks, "
        "example_args=...), for batches of num_chunks samples; it pads others.",
        visible=visible,
    )
    return Export(
        f"{header}device_map = {json.dumps(device_map, indent=4)}\n"
        f"split_points = {json.dumps(points)}\nnum_chunks = {plan.num_microbatches}\n"
    )


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read a device map, whose numbers are those of GPUs.

    Modules without parameters may be left out, as by check_device_map of accelerate, which asks
    for the tensors of the model's state_dict alone, and may be on any device. Both are priced
    where the layer before them is, whose output they mostly go with.

    Raises:
        InvalidInput: It is no such map, or names unknown modules or devices.
    """
    text = re.split(r"device_map\s*=", settings.text, maxsplit=1)[-1]
    text = _DEVICE.sub(lambda found: repr(":".join(filter(None, found.groups()))), text)
    entries = parse_literal(text, "{")
    if not isinstance(entries, dict) or not entries:
        raise InvalidInput(
            'expected a device map such as {"model.layers.0": 0, "lm_head": "cuda:1"}, from '
            "modules to numbers of GPUs"
        )
    devices = {str(name): _read_device(str(name), given) for name, given in entries.items()}
    found = [_find_entry(layer.partition("@")[0], devices) for layer in layers.names]
    places = [None if name is None else devices[name] for name in found]
    if not devices.keys() & {*found}:
        raise InvalidInput(f"the model has no module {min(devices)!r}")
    moved = []
    for index in sorted(layers.weightless):
        behind = (at for at in range(index + 1, len(places)) if at not in layers.weightless)
        near = [
            places[at] for at in (*range(index)[-1:], *islice(behind, 1)) if places[at] is not None
        ]
        if near and places[index] not in near:
            if found[index] or layers.names[index] in layers.modules:
                moved.append(layers.names[index])
            places[index] = near[0]
    # A stage is a run of layers on one device; of those in no entry, no stage.
    placed = [(device, index) for index, device in enumerate(places) if device is not None]
    runs = [(device, [*run]) for device, run in groupby(placed, key=lambda each: each[0])]
    idle = sorted(map(str, {*devices.values()} - {device for device, _ in runs}))
    unknown = sorted(devices.keys() - {*found})
    if idle and unknown:
        raise InvalidInput(f"device {idle[0]} has no layer of the model; unused: {unknown}")
    note = f"without weights, so priced where their neighbours are: {list_some(moved, MOST_NAMED)}"
    return ImportedCut(
        tuple(tuple(index for _, index in run) for _, run in runs),
        len(layers.names),
        gpus=tuple(() if isinstance(device, str) else (device,) for device, _ in runs),
        num_microbatches=settings.counts.get("num-chunks"),
        notes=(note,) if moved else (),
    )


def _read_device(name: str, given: object) -> int | str:
    """Return the number of a GPU, or ``cpu`` or ``disk`` of offloaded modules."""
    if given in OFFLOADED:
        return str(given)
    found = re.fullmatch(r"(?:cuda:?|xpu:|hip:)?(\d{1,6})|cuda", str(given))
    if found is None or isinstance(given, bool):
        raise InvalidInput(f"{name!r} is on {given!r}; write a GPU's number, such as 1 or 'cuda:1'")
    return int(found[1] or 0)


def _find_entry(layer: str, entries: Mapping[str, int | str]) -> str | None:
    """Return the longest name in the map that is the layer's module or holds it."""
    name = layer
    while True:
        if name in entries:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]
