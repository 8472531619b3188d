"""Comparison of what the ranks of a pipeline were given, before they depend on each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest

from ...core.document import json_digest
from ...core.errors import PlanMismatch
from ...core.units import list_some
from .failure_detection import ConnectionEnded, FailureDetector

Facts = Mapping[str, Sequence[str]]
"""Lines that describe what a rank was given, by the name of what they describe."""

LONGEST_LINE = 200
MOST_NAMED = 6


def check_consistency(
    detector: FailureDetector, facts: Facts, plan_id: str, *, topic: str = "plan and model"
) -> None:
    """Check that all ranks were given equal facts; called on every rank, once for each topic.

    Plans whose ids differ may still be run alike, so the id is only mentioned. Ranks publish
    digests, which rank 0 compares. Only where they differ are lines sent, by one rank that differs
    and by one of the others, so that the cost does not grow with the model.

    Raises:
        PlanMismatch: Some ranks differ from most; all ranks raise it, and it says which and in
            what.
        ConnectionEnded: A rank failed, or published nothing within the group's timeout.
    """
    detector.set_activity(f"the wait for {topic} of the other ranks")
    detector.publish(topic, json.dumps(_digest(facts)))
    # Rank 0 alone reads every digest: n reads instead of n squared. It answers even if all agree,
    # since the others wait for its answer.
    if detector.rank == 0:
        everyone = range(detector.num_ranks)
        found = [json.loads(detector.wait_for(topic, rank)) for rank in everyone]
        detector.publish(f"difference in {topic}", json.dumps(_find_difference(found)))
    difference = json.loads(detector.wait_for(f"difference in {topic}", 0))
    if difference is None:
        detector.set_activity("setting up")
        return
    # From here on every rank raises. The first rank of either side shows its lines to all of them.
    name, usual, unusual = difference
    if detector.rank in (usual[0], unusual[0]):
        detector.publish(f"lines of {topic}", json.dumps([list(facts[name]), plan_id]))
    (theirs, their_plan), (its, its_plan) = (
        json.loads(detector.wait_for(f"lines of {topic}", side[0])) for side in (usual, unusual)
    )
    detector.publish(f"understood of {topic}", "")
    # Rank 0 may host the store, without which the others could not read on: it raises last. A rank
    # that has ended in the meantime needs no more lines.
    if detector.rank == 0:
        with suppress(ConnectionEnded):
            for rank in everyone:
                detector.wait_for(f"understood of {topic}", rank)
    sides = [name_ranks(unusual), name_ranks(usual)]
    if its_plan != their_plan:
        sides = [f"{sides[0]} ({its_plan})", f"{sides[1]} ({their_plan})"]
    raise PlanMismatch(f"the ranks disagree on {name}: {_describe_difference(its, theirs, *sides)}")


def compare_facts(facts: Mapping[str, Facts]) -> None:
    """Check that workers, by name, were given equal facts; see `check_consistency`."""
    workers = list(facts)
    if (found := _find_difference([_digest(each) for each in facts.values()])) is None:
        return
    name, *sides = found
    theirs, its = (facts[workers[side[0]]][name] for side in sides)
    usual, unusual = (", ".join(workers[index] for index in side) for side in sides)
    words = _describe_difference(its, theirs, unusual, usual)
    raise PlanMismatch(f"the workers disagree on {name}: {words}")


def _digest(facts: Facts) -> dict[str, str]:
    return {name: json_digest(list(lines)) for name, lines in facts.items()}


def _find_difference(
    digests: Sequence[Mapping[str, str]],
) -> tuple[str, list[int], list[int]] | None:
    """Return the first fact that differs, the ranks that most agree with, and the others."""
    for name in digests[0]:
        found = [digest.get(name) for digest in digests]
        if len(set(found)) > 1:
            return name, *_split(dict(enumerate(found)))
    return None


def split_by_agreement(values: Mapping[int, object]) -> tuple[str, str]:
    """Return in words the ranks whose value is the most frequent, and those with others."""
    usual, unusual = _split(values)
    return name_ranks(usual), name_ranks(unusual)


def _split(values: Mapping[int, object]) -> tuple[list[int], list[int]]:
    # Of values that equally many ranks have, `Counter` gives the one that comes first.
    most = Counter(values.values()).most_common(1)[0][0]
    agree = [rank for rank, value in values.items() if value == most]
    return agree, [rank for rank in values if rank not in agree]


def _describe_difference(
    its: Sequence[str], theirs: Sequence[str], unusual: str, usual: str
) -> str:
    """Return the first line that differs, as both sides have it, and the remedy."""
    pairs = zip_longest(its, theirs, fillvalue="nothing more")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"{here[:LONGEST_LINE]} on {unusual}, but {there[:LONGEST_LINE]} on {usual}. Start all of "
        "them with one plan file, one version of the code and the same options"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {list_some([str(rank) for rank in ranks], MOST_NAMED)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
