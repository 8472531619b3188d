"""Layout of stages on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InvalidInput
from ..core.plan.plan import Plan
from ..core.plan.schedule import ScheduleName
from .traits import ANY_REPLICAS, FOLDED, IN_ROUNDS, NAMES, ONE_STAGE_A_RANK


@dataclass(frozen=True)
class Layout:
    """Ranks of a pipeline, numbered place by place.

    The pipeline has S / chunks places; the replicas of a place hold the same stages. Micro-batch k
    of a stage runs on entry k mod length of its ranks. Folded stages run to the last place and back
    (a V) instead of round and round.
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

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages a rank runs, in order."""
        return tuple(stage for stage, ranks in enumerate(self.stage_ranks) if rank in ranks)


def lay_out(plan: Plan) -> Layout:
    """Return which stages each rank of a plan runs."""
    replicas = [stage.replicas for stage in plan.stages]
    return make_layout(plan.schedule, plan.num_microbatches, replicas, plan.chunks)


def make_layout(
    name: ScheduleName, num_microbatches: int, replicas: Sequence[int], chunks: int
) -> Layout:
    """Return the layout of a pipeline whose ranks are numbered place by place."""
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
        raise InvalidInput(f"unknown schedule {name!r}; choose one of {', '.join(NAMES)}")
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
            f"the {name} schedule needs the same number of replicas for every stage, not "
            f"{'-'.join(map(str, replicas))}; gpipe and 1f1b support any"
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
            f"{num_stages} stages cannot be placed {chunks} to a rank; ask for a multiple of "
            f"{chunks} stages"
        )


def _check_rounds(name: str, positions: int, num_microbatches: int, replicas: int) -> None:
    for count in copies(num_microbatches, replicas):
        if not in_equal_rounds(count, positions):
            rounds = count // positions
            raise InvalidInput(
                f"the {name} schedule runs its micro-batches in equal rounds: {count} cannot be "
                f"divided into {rounds} rounds over {positions} ranks; use a multiple of "
                f"{positions} micro-batches"
            )


def in_equal_rounds(count: int, positions: int) -> bool:
    """Return True if torch's interleaved schedules accept a replica's number of micro-batches.

    Megatron's condition, m mod S = 0, is a special case.
    """
    return count % max(1, count // positions) == 0


def copies(num_microbatches: int, parts: int) -> tuple[int, ...]:
    """Return the one or two share sizes of micro-batches dealt round-robin, larger first."""
    most, least = -(-num_microbatches // parts), num_microbatches // parts
    return (most,) if least in (0, most) else (most, least)
