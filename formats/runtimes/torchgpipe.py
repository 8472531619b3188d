"""torchgpipe: a balance, the number of layers of a Sequential in each stage."""

from __future__ import annotations

import re

from ...core.plan.plan import Plan
from ..gpu_numbers import number_gpus
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, Rejection, write_header
from .block_counts import find_setting, parse_counts

TITLE = "torchgpipe"
CHECKED = "torchgpipe 0.0.7, its own GPipe"


def write(plan: Plan) -> Export:
    """Write the arguments of ``torchgpipe.GPipe``."""
    numbers, visible = number_gpus(plan)
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: model = torchgpipe.GPipe(model, balance, devices=devices, chunks=chunks, "
        "checkpoint=checkpoint)",
        f"for a Sequential of {len(plan.layer_names)} modules: {plan.layer_names[0]} to "
        f"{plan.layer_names[-1]}.",
        visible=visible,
    )
    text = (
        f"{header}balance = {list(plan.balance)}\ndevices = {numbers}\n"
        f"chunks = {plan.num_microbatches}\n"
        f'checkpoint = "{plan.stages[0].recompute}"\n'
    )
    return Export(text)


def check_duplicates(plan: Plan) -> tuple[Rejection, ...]:
    """Refuse modules and weights in two places: GPipe raises for them, whatever the balance."""
    again = next((name for name in plan.layer_names if "@" in name), None)
    shared = [entry.names[0] for entry in plan.shared_weights]
    if again is None and not shared:
        return ()
    what = repr(again or shared[0])
    reason = f"two layers use {what}, and {TITLE} takes no module or weight twice"
    remedy = "give each layer a module of its own, or use stagewright plan --for torch"
    return (Rejection("shared modules", reason, remedy, is_of_model=True),)


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read ``balance``, ``devices``, ``chunks`` and ``checkpoint``, or a balance alone."""
    text = settings.text
    counts = parse_counts(find_setting(text, "balance") or text, "balance = [3, 5]")
    devices = re.search(r"devices\s*=\s*\[([\d, ]*)\]", text)
    chunks = re.search(r"chunks\s*=\s*(\d{1,6})", text)
    mode = re.search(r"checkpoint\s*=\s*[\"'](never|always|except_last)[\"']", text)
    return layers.cut_by_layers(
        counts,
        gpus=tuple((int(number),) for number in devices[1].split(",")) if devices else (),
        schedule="gpipe",
        num_microbatches=int(chunks[1]) if chunks else None,
        recompute=mode[1] if mode else "except_last",
    )
