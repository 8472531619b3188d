"""Command-line flags of plan options, for commands and pages; imports no pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ..core.cluster.reserves import MemoryReserves
    from ..core.plan.plan import PlanOptions

FLAGS = {
    "num_microbatches": "--microbatches",
    "batch_size": "--batch-size",
    "schedule": "--schedule",
    "chunks": "--chunks",
    "max_extra_in_flight": "--extra-in-flight",
    "objective": "--objective",
    "num_stages": "--stages",
    "max_stages": "--max-stages",
    "max_replicas": "--max-replicas",
    "tensor": "--tensor",
    "strategies": "--strategies",
    "recompute": "--recompute",
    "layer_order": "--order",
    "skips": "--skips",
    "together": "--together",
    "no_cut_after": "--no-cut-after",
    "pins": "--pin",
    "tied": "--tied",
    "cut_at": "--cut-at",
    "regular": "--regular",
    "regular_within": "--regular-within",
    "optimizer": "--optimizer",
    "precision": "--precision",
    "memory_fraction": "--memory-fraction",
    "reserves": "--reserves",
    "gap": "--gap",
    "robust": "--robust",
    "deadline_s": "--deadline",
    "budget_s": "--budget",
    "num_threads": "--threads",
    "busy_neighbours": "--neighbours",
}
"""The flag of each option field (a test compares them with the commands)."""


def flags_of_options() -> dict[str, str]:
    """Return the flag of each option; those that are ``auto`` have no flag of their own."""
    from ..core.plan.plan import PlanOptions

    return {name: FLAGS[name] for name in PlanOptions.model_fields if name != "auto"}


def flags_of(options: PlanOptions) -> list[str]:
    """Return the command-line words for these options; defaults of the command are left out."""
    from ..core.plan.plan import PlanOptions
    from ..schedules.traits import FOLDED, SEVERAL_STAGES

    words: list[str] = []
    # The command chooses what it is not told; of a batch, the planner chooses the micro-batches.
    chosen = {"schedule"}
    if options.schedule in SEVERAL_STAGES and options.schedule not in FOLDED:
        chosen.add("chunks")
    if options.batch_size is None:
        chosen.add("num_microbatches")
    for name, flag in flags_of_options().items():
        value = getattr(options, name)
        if value == PlanOptions.model_fields[name].default and name not in chosen:
            continue
        if value is True:
            words.append(flag)
            continue
        for text in _format_value(name, value):
            words += [flag, text]
    return words


def _format_value(name: str, value: object) -> list[str]:
    """Format an option's value for the command line; several texts if the flag is repeated."""
    if name == "max_replicas" and value is None:
        return ["any"]
    if name == "strategies" and isinstance(value, tuple):
        return [",".join(value)]
    if name == "pins" and isinstance(value, tuple):
        # A pin may name a stage and a kind of device, which takes two flags.
        return [
            f"{pin.layer}={target}"
            for pin in value
            for target in (pin.stage, None if pin.kind is None else f"@{pin.kind}")
            if target is not None
        ]
    if name == "reserves" and (reserves := cast("MemoryReserves | None", value)) is not None:
        terms = (
            ("context", reserves.context_bytes),
            ("communication", reserves.communication_bytes),
            ("fragmentation", reserves.fragmentation),
        )
        return [",".join(f"{term}={size}" for term, size in terms if size) or "none"]
    if isinstance(value, tuple):
        return [entry if isinstance(entry, str) else ":".join(entry) for entry in value]
    return [str(value)]
