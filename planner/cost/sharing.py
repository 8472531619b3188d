"""Memory that the replicas of a stage share between them, by strategy.

`docs/concepts/planner.md` has the formulas. Functions take numbers or arrays of stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.models.training_memory import TrainingBytes
from ...core.plan.plan import PlanOptions, Sharing


class SharedBytes(NamedTuple):
    """Bytes of a stage that its replicas may share.

    Attributes:
        update: What only the optimizer's update needs.
        gathered: Weights of which each replica keeps its part beside the whole ones.
    """

    update: Any
    gathered: Any


def choose_sharing(options: PlanOptions) -> Sharing:
    """Return the strategy by which replicas share, where that saves memory."""
    order: tuple[Sharing, ...] = ("zero1", "fully_shard")
    return next((name for name in order if name in options.strategies), "replicate")


def list_shared(
    training: TrainingBytes, options: PlanOptions, weights: Any, elements: Any, largest: Any
) -> SharedBytes:
    """Return what replicas may share of trainable weights and their elements.

    Elements are those of weights that a single layer uses: others stay whole. By ``zero1`` each
    replica updates whole weights, the largest dealt out first, each to the replica that has least:
    none has more than the ``largest`` and an equal part of the others (Graham 1969).
    """
    sharing = choose_sharing(options)
    if sharing == "replicate" or options.objective == "latency":
        return SharedBytes(elements * 0, elements * 0)
    gathered = weights if sharing == "fully_shard" else elements * 0
    return SharedBytes(training.of_update(count_shared(sharing, elements, largest)), gathered)


def count_shared(sharing: Sharing, elements: Any, largest: Any) -> Any:
    """Return the elements that are divided evenly."""
    return elements - largest if sharing == "zero1" else elements


def saves_memory(shared: SharedBytes, replicas: int) -> bool:
    """Return True if so many replicas hold less with their strategy than with whole copies."""
    return bool(held_share(shared, replicas) < shared.update)


def held_share(shared: SharedBytes, replicas: int) -> Any:
    """Return the bytes that one replica holds of the shared ones, rounded up."""
    return -(-(shared.update + shared.gathered) // replicas)
