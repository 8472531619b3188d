"""Memory that the replicas of a stage share between them, by strategy, and what they send for it.

`docs/concepts/planner.md` has the formulas. Functions take numbers or arrays of stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.errors import InvalidInput
from ...core.models.training_memory import training_bytes
from ...core.plan.plan import PlanOptions, Sharing
from ...schedules.traits import ONE_STAGE_A_RANK, SPLIT_BACKWARD
from .chain import CostColumns


class SharedBytes(NamedTuple):
    """Bytes of a stage that its replicas may share.

    Attributes:
        divided: What is spread evenly.
        whole: What each replica holds at times beside its part.
        weights: Weights that are gathered for every pass over a micro-batch.
        gradients: Gradients that are summed after every backward, not once a step.
    """

    divided: Any
    whole: Any
    weights: Any
    gradients: Any


def list_strategies(options: PlanOptions) -> list[tuple[Sharing, ...]]:
    """Return the strategies to plan one by one, that of least memory first.

    ``zero1`` takes no longer than whole copies; ``fully_shard`` sends more, and holds less.
    """
    others = tuple(name for name in options.strategies if name != "fully_shard")
    every: list[tuple[Sharing, ...]] = [("fully_shard",), others]
    return [some for some in every if some and set(some) <= set(options.strategies)]


def choose_sharing(options: PlanOptions) -> Sharing:
    """Return the strategy by which replicas share, where that saves memory."""
    order: tuple[Sharing, ...] = ("zero1", "fully_shard")
    return next((name for name in order if name in options.strategies), "replicate")


def check_gathering(options: PlanOptions, replicas: int, positions: int) -> None:
    """Refuse replicas that would wait for each other without end, gathering weights out of step.

    They share a schedule of several stages a device, on so many ``positions``.

    Raises:
        InvalidInput: They do not divide the micro-batches, and so differ in their rounds.
    """
    m, name = options.num_microbatches, options.schedule
    least, most = m // replicas, -(-m // replicas)
    if name == "interleaved_1f1b":  # in step with as many rounds, the last of which may be longer
        least, most = max(1, least // positions), max(1, most // positions)
    keep_step = least == most or name in (*ONE_STAGE_A_RANK, "looped_bfs")
    if choose_sharing(options) == "fully_shard" and not keep_step:
        raise InvalidInput(
            f"by fully_shard the replicas of the {name} schedule gather weights in the same order, "
            f"and {m} micro-batches for {replicas} of them differ in theirs; use a multiple of "
            f"{replicas} micro-batches"
        )


def divided_bytes(options: PlanOptions, weights: Any, gradients: Any, elements: Any) -> Any:
    """Return the bytes that replicas divide of weights that a single layer uses.

    ``gradients`` are those of the trained weights in the weights' type, which have ``elements``.
    """
    sharing = choose_sharing(options)
    if sharing == "replicate" or options.objective == "latency":
        return elements * 0
    training = training_bytes(options.precision, options.optimizer)
    update = training.of_update(elements)
    if sharing == "zero1":
        return update
    return weights + gradients + training.gradients * elements + update


def list_shared(options: PlanOptions, costs: CostColumns, at: Any) -> SharedBytes:
    """Return what replicas may share of the stages at some places of their tables.

    By ``zero1`` each replica updates whole weights, the largest dealt out first, each to the
    replica that has least: none has more than the largest and an equal part of the others (Graham
    1969). By ``fully_shard`` it gathers one layer at a time, whose gradient is there twice while it
    is summed. The second part of a backward in two gathers all layers.
    """
    elements = costs.shareable_elements[at]
    weights, gradients = costs.shareable_bytes[at], costs.shareable_gradients_bytes[at]
    if choose_sharing(options) != "fully_shard" or options.objective == "latency":
        divided = divided_bytes(options, weights, gradients, elements - costs.largest_elements[at])
        return SharedBytes(divided, elements * 0, elements * 0, elements * 0)
    divided = divided_bytes(options, weights, gradients, elements)
    wider = training_bytes(options.precision, options.optimizer).gradients
    gradients = gradients + wider * elements
    layer = costs.layer_bytes[at]
    summed = layer + wider * costs.layer_elements[at]
    gathered = weights + gradients if options.schedule in SPLIT_BACKWARD else layer + summed
    return SharedBytes(divided, gathered + summed, weights, gradients)


def sent_each_round(options: PlanOptions, shared: SharedBytes, recompute: Any) -> Any:
    """Return the size of an all-reduce that takes as long as a micro-batch's collectives.

    A gathering is half of one, and so is a summing in which each replica gets its part.
    """
    passes = 2 + recompute + (options.schedule in SPLIT_BACKWARD)
    return -(-(passes * shared.weights + shared.gradients) // 2)


def saves_memory(shared: SharedBytes, replicas: int) -> Any:
    """Return True if so many replicas hold less with their strategy than with whole copies."""
    return held_share(shared, replicas) < shared.divided


def held_share(shared: SharedBytes, replicas: int) -> Any:
    """Return the bytes that one replica holds of the shared ones, rounded up."""
    return -(-shared.divided // replicas) + shared.whole
