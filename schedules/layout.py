"""Which rank holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InvalidInput
from ..core.plan.schedule import ScheduleName
from .traits import ANY_REPLICAS, FOLDED, IN_ROUNDS, NAMES, ONE_STAGE_A_RANK


@dataclass(frozen=True)
class Layout:
    """The ranks of a pipeline, in the order of what they hold.

    Attributes:
        stage_ranks: Ranks of each stage; micro-batch k is done by entry k mod length.
        positions: Places along the pipeline, S / chunks; the replicas of a place hold the same
            stages.
        replicas: Ranks at each place.
        chunks: Stages at each place.
        folded: Stages run to the last place and back (a V), not round and round.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    chunks: int
    folded: bool

    @property
    def positions(self) -> int:
        return len(self.replicas)

    @property
    def num_ranks(self) -> int:
        return sum(self.replicas)


def make_layout(
    name: ScheduleName, num_microbatches: int, replicas: Sequence[int], chunks: int
) -> Layout:
    """Ranks numbered place by place: all replicas of the first, then those of the second.

    Raises:
        InvalidInput: Numbers the schedule does not take.
    """
    _check(name, num_microbatches, replicas, chunks)
    positions = len(replicas) // chunks
    places = []
    begin = 0
    for count in replicas[:positions]:
        places.append(tuple(range(begin, begin + count)))
        begin += count
    folded = name in FOLDED
    order = [*places, *reversed(places)] if folded else places * chunks
    return Layout(tuple(order), tuple(replicas[:positions]), chunks, folded)


def _check(name: str, num_microbatches: int, replicas: Sequence[int], chunks: int) -> None:
    if name not in NAMES:
        raise InvalidInput(f"no schedule is called {name!r}; there are {', '.join(NAMES)}")
    num_stages = len(replicas)
    if num_stages < 1 or num_microbatches < 1:
        raise InvalidInput(
            f"a schedule needs at least one stage and one micro-batch, "
            f"not {num_stages} and {num_microbatches}"
        )
    if min(replicas) < 1:
        raise InvalidInput(f"every stage needs at least one replica, not {min(replicas)}")
    _check_chunks(name, num_stages, chunks)
    if name not in ANY_REPLICAS and len(set(replicas)) > 1:
        raise InvalidInput(
            f"the {name} schedule needs equally many replicas of every stage, not "
            f"{'-'.join(map(str, replicas))}; gpipe and 1f1b take any"
        )
    if name in IN_ROUNDS:
        _check_rounds(name, num_stages // chunks, num_microbatches, replicas[0])


def _check_chunks(name: str, num_stages: int, chunks: int) -> None:
    if chunks < 1:
        raise InvalidInput(f"a rank holds at least one stage, not {chunks}")
    if name in ONE_STAGE_A_RANK and chunks != 1:
        raise InvalidInput(f"the {name} schedule puts one stage on a rank, not {chunks}")
    if name in FOLDED and chunks != 2:
        raise InvalidInput(f"the {name} schedule puts two stages on a rank; chunks is {chunks}")
    if num_stages % chunks:
        raise InvalidInput(
            f"{num_stages} stages cannot be dealt {chunks} to a rank; ask for a multiple of "
            f"{chunks} stages"
        )


def _check_rounds(name: str, positions: int, num_microbatches: int, replicas: int) -> None:
    for count in copies(num_microbatches, replicas):
        if not in_equal_rounds(count, positions):
            rounds = count // positions
            raise InvalidInput(
                f"the {name} schedule takes its micro-batches in equal rounds: {count} do not "
                f"divide into {rounds} rounds over {positions} ranks; a multiple of {positions} "
                "micro-batches always does"
            )


def in_equal_rounds(count: int, positions: int) -> bool:
    """The condition of torch for so many micro-batches; Megatron's, m mod S = 0, is a special case.

    Args:
        count: Of one replica.
        positions: Places along the pipeline.
    """
    return count % max(1, count // positions) == 0


def copies(num_microbatches: int, parts: int) -> tuple[int, ...]:
    """The sizes that occur when micro-batches are dealt in turn: at most two, the larger first."""
    most, least = -(-num_microbatches // parts), num_microbatches // parts
    return (most,) if least in (0, most) else (most, least)
