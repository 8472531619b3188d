"""llama.cpp: shares of the blocks for each device, on its command line."""

from __future__ import annotations

import re

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.units import format_bytes
from ..gpu_numbers import number_gpus
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, count_blocks, write_header
from .block_counts import MOST_SHOWN

TITLE = "llama.cpp"
CHECKED = (
    "the placement rule of load_tensors in src/llama-model.cpp at 5815cb84, rewritten in float32"
)


def write(plan: Plan) -> Export:
    """Write ``--tensor-split`` so that each device gets exactly its stage's blocks.

    llama.cpp places n blocks and, as one unit more, the output; unit i goes to the first device
    whose cumulative share exceeds i / (n + 1). Shares that add up to n + 1, with the output
    counted on the last device, therefore reproduce the counts. The input embedding stays on the
    CPU. Given shares, llama.cpp reserves nothing for caches and compute buffers by itself, so the
    file says what the plan leaves free on each device.
    """
    counts = list(count_blocks(plan))
    counts[-1] += 1
    numbers, visible = number_gpus(plan)
    devices = f" --device {','.join(map('CUDA{}'.format, numbers))}" * bool(plan.ranks)
    size, number = plan.microbatch_size or 1, plan.num_microbatches
    sequences = size * number
    length = plan.inputs[0].shape[1] if plan.inputs and len(plan.inputs[0].shape) > 1 else 0
    margins = [
        f"Stage {index} leaves {format_bytes(max(0, limit - stage.memory.total_bytes))} of "
        f"{format_bytes(limit)} for the cache and compute buffers."
        for index, stage in enumerate(plan.stages)
        if (limit := stage.memory_limit_bytes) is not None
    ]
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "The last share includes the output layer; the input embedding stays on the CPU.",
        f"-np is the plan's {number} micro-batches of {size} each, the sequences served at once"
        + (f"; -c is {length} tokens for each of them." if length else "."),
        *margins,
        visible=visible,
    )
    context = f" -c {length * sequences}" if length else ""
    command = (
        f"llama-server -m MODEL.gguf{devices} --split-mode layer --tensor-split "
        f"{','.join(map(str, counts))} -ngl all -fit off{context} -np {sequences}"
    )
    return Export(f"{header}{command}\n")


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read ``--tensor-split`` by llama.cpp's rule; shares may be any proportions.

    Raises:
        InvalidInput: There are no shares, they add up to nothing, or other flags leave layers on
            the CPU or divide each of them.
    """
    num_blocks = layers.stack.num_blocks
    on_gpu = settings.words.get("n-gpu-layers", "all")
    if on_gpu != "all" and (not on_gpu.isdigit() or int(on_gpu) < num_blocks + 1):
        raise InvalidInput(
            f"-ngl {on_gpu} leaves layers on the CPU, which is no stage here; give -ngl all, or "
            f"{num_blocks + 1} and more"
        )
    mode = settings.words.get("split-mode", "layer")
    if mode == "none":
        main = int(settings.words.get("main-gpu", 0))
        return layers.cut_by_blocks([num_blocks], gpus=_number_devices([main], settings))
    if mode != "layer":
        raise InvalidInput(
            f"-sm {mode} splits every layer over the devices, which is no cut: only layer and none "
            "are read; plan --tensor prices layers that are split over equal devices"
        )
    given = settings.words.get("tensor-split") or settings.text.strip("[](){}\"' \n")
    parts = [part.strip() for part in re.split("[,/]", given)]
    if not all(re.fullmatch(r"\d{0,9}\.?\d{1,9}", part) for part in parts):
        raise InvalidInput(
            f"expected shares such as --tensor-split 17,20,4 or 0.5,0.5; found "
            f"{given[:MOST_SHOWN]!r}"
        )
    shares = [float(part) for part in parts]
    if sum(shares) <= 0:
        raise InvalidInput("the shares of --tensor-split add up to nothing")
    *devices, output = (place_unit(unit, num_blocks + 1, shares) for unit in range(num_blocks + 1))
    # Devices without any unit stay idle: they are no stages.
    used = sorted({*devices, output})
    counts = [devices.count(device) for device in used]
    return layers.cut_by_blocks(counts, gpus=_number_devices(used, settings))


def _number_devices(used: list[int], settings: Settings) -> tuple[tuple[int, ...], ...]:
    """Return the GPU of each device in use, which ``--device`` puts into another order."""
    listed = settings.words.get("device", "")
    numbers = list(map(int, re.findall(r"\d+", listed))) if listed else range(used[-1] + 1)
    if used[-1] >= len(numbers):
        raise InvalidInput(
            f"--device {listed} has {len(numbers)} devices, but number {used[-1]} of them is to "
            "hold layers; name it, too"
        )
    return tuple((numbers[device],) for device in used)


def place_unit(unit: int, num_units: int, shares: list[float]) -> int:
    """Return the device of a unit: the first whose cumulative share exceeds its position."""
    total = sum(shares)
    reached = 0.0
    for device, share in enumerate(shares):
        reached += share
        # Compared as products, which are exact for whole shares; llama.cpp divides in float32.
        if unit * total < reached * num_units:
            return device
    return len(shares) - 1
