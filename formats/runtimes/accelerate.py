"""Accelerate and Transformers: a device map, and split points for a pipelined forward."""

from __future__ import annotations

import json
import re
from itertools import accumulate

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, list_devices, parse_literal, write_header

TITLE = "Accelerate"
CHECKED = "accelerate 1.15.0 and transformers 5.23.0, check_device_map and a dispatched forward"


def write(plan: Plan) -> Export:
    """Write ``device_map`` and ``split_points``."""
    layers = ModelLayers.of(plan)
    stack = layers.stack if layers.has_blocks else None
    blocks = {stack.name(block) for block in range(stack.num_blocks)} if stack else set()
    depth = stack.name(0).count(".") + 1 if stack else 0
    cuts = list(accumulate(plan.balance, initial=0))
    device_map: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        names = [*stage.module_fqns, *(name.partition("@")[0] for name in stage.layer_names)]
        for name in names:
            if ".".join(name.split(".")[:depth]) not in blocks:
                device_map.setdefault(name, index)
        if stack:
            own = range(stack.count(cuts[index]), stack.count(cuts[index + 1]))
            device_map.update((stack.name(block), index) for block in own)
    for weight in plan.shared_weights:  # under all of its names, used or not
        index = sum(cut <= weight.layers[0] for cut in cuts) - 1
        for name in weight.names:
            device_map.setdefault(name.rpartition(".")[0], index)
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
        "Pipelined: accelerate.prepare_pippy(model, split_points=split_points, "
        "num_chunks=num_chunks, example_args=...), for batches of num_chunks samples; it pads "
        "others.",
        f"{list_devices(plan)}.",
    )
    return Export(
        f"{header}device_map = {json.dumps(device_map, indent=4)}\n"
        f"split_points = {json.dumps(points)}\nnum_chunks = {plan.num_microbatches}\n"
    )


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read a device map whose devices are numbers.

    Modules without parameters may be left out, as by check_device_map of accelerate, which asks
    for the tensors of the model's state_dict alone. They run where the layer before them does.

    Raises:
        InvalidInput: It is no such map, names unknown modules, or puts layers on "cpu" or "disk".
    """
    at = re.search(r"device_map\s*=", settings.text)
    entries = parse_literal(settings.text[at.start() :] if at else settings.text, "{")
    if not isinstance(entries, dict) or not entries:
        raise InvalidInput(
            'expected a device map such as {"model.layers.0": 0, "lm_head": 1}, from modules to '
            "numbers of devices"
        )
    wrong = [name for name, device in entries.items() if type(device) is not int or device < 0]
    if wrong:
        raise InvalidInput(
            f"{wrong[0]!r} is on {entries[wrong[0]]!r}; only numbered devices are stages"
        )
    devices = sorted(set(entries.values()))
    held: dict[int, list[int]] = {device: [] for device in devices}
    used: set[str] = set()
    places = [_find_entry(layer.partition("@")[0], entries) for layer in layers.names]
    first = next((name for name in places if name is not None), None)
    device = None if first is None else entries[first]
    buffers = []
    for index, name in enumerate(places):
        if name is not None:
            used.add(name)
            device = entries[name]
        elif index not in layers.weightless:
            continue
        elif layers.names[index] in layers.modules:
            buffers.append(layers.names[index])
        if device is not None:
            held[device].append(index)
    unknown = sorted(entries.keys() - used)
    if unknown and not any(held.values()):
        raise InvalidInput(f"the model has no module {unknown[0]!r}")
    idle = [device for device in devices if not held[device]]
    if idle:
        raise InvalidInput(f"device {idle[0]} has no layer of the model; unused: {unknown}")
    # Devices run in the order in which their layers stand in the model.
    stages = sorted(tuple(held[device]) for device in devices)
    note = f"in no entry, which Accelerate allows for buffers outside the state_dict: {buffers}"
    return ImportedCut(
        tuple(stages),
        len(layers.names),
        num_microbatches=settings.counts.get("num-chunks"),
        notes=(note,) if buffers else (),
    )


def _find_entry(layer: str, entries: dict[str, int]) -> str | None:
    """Return the longest name in the map that is the layer's module or holds it."""
    name = layer
    while True:
        if name in entries:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]
