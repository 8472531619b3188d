"""Refusal of processes that need more memory than this machine has, before they are started.

Linux ends processes when memory is used up, and others with them.
"""

from __future__ import annotations

from ...core.errors import OutOfMemory
from ...core.plan.plan import Plan
from ...core.units import count, format_bytes
from ...profiler.machine.memory import free_memory_bytes
from ...schedules.plan_schedule import count_ranks

PROCESS_BYTES = 250 * 2**20
"""Memory of a process of a group without a model: 207 MiB of its own were measured on Linux."""


def check_memory(required_bytes: int, reason: str, remedy: str) -> None:
    """Raise `OutOfMemory` if so many bytes are not free; ``reason`` says what takes them."""
    available = free_memory_bytes()
    if available is not None and required_bytes > available:
        raise OutOfMemory(
            f"{reason}: about {format_bytes(required_bytes)}, and this machine has "
            f"{format_bytes(available)} free; {remedy}",
            required_bytes=required_bytes,
            available_bytes=available,
        )


def check_training_memory(plan: Plan) -> None:
    """Check that this machine can train a plan with one process per device.

    Each process builds the model, and has its stages' gradients and activations. This is less than
    they take where a plan's weights are narrower than the float32 they are built in.

    Raises:
        OutOfMemory: Memory is short; the message has both numbers.
    """
    ranks = count_ranks(plan)
    model_bytes = sum(stage.memory.weights_bytes for stage in plan.stages)
    own_bytes = sum(
        len(stage.devices) * (stage.memory.gradients_bytes + stage.memory.activations_bytes)
        for stage in plan.stages
    )
    check_memory(
        ranks * (PROCESS_BYTES + model_bytes) + own_bytes,
        f"training takes {count(ranks, 'process')} here, each with a copy of the "
        f"model's {format_bytes(model_bytes)}, and {format_bytes(own_bytes)} of gradients and "
        "activations",
        "run the plan where there is more, or plan fewer blocks",
    )
