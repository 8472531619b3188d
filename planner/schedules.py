"""The order of work of each schedule, one stage a rank."""

from __future__ import annotations

from ..core.errors import InvalidInput
from ..core.schedule import Action, Schedule, ScheduleName, Work

Order = list[tuple[Work, int]]
"""Work and micro-batch of one rank's actions, first to last."""


def make_schedule(name: ScheduleName, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of that name with stage s on rank s.

    The orders are those of ``torch.distributed.pipelining`` (``ScheduleGPipe``,
    ``Schedule1F1B``), so a plan is priced by the order it will run in.

    Raises:
        InvalidInput: An unknown name, or fewer than one stage or micro-batch.
    """
    _check(name, num_stages, num_microbatches)
    ranks = []
    for stage in range(num_stages):
        if name == "1f1b":
            order = _one_forward_one_backward(stage, num_stages, num_microbatches)
        else:
            order = _fill_drain(num_microbatches, backward=name == "gpipe")
        ranks.append(
            tuple(Action(stage=stage, work=work, microbatch=index) for work, index in order)
        )
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_rank=tuple(range(num_stages)),
        ranks=tuple(ranks),
    )


def in_flight(name: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Most micro-batches whose activations a stage holds at once.

    GPipe keeps all m (Huang et al. 2019); 1F1B keeps min(m, S - s), the stages from this one to
    the end (PipeDream-Flush, Narayanan et al. 2021). Without a backward nothing is kept beyond
    the micro-batch at work.
    """
    _check(name, num_stages, num_microbatches)
    if not 0 <= stage < num_stages:
        raise InvalidInput(f"stage {stage} is not one of {num_stages} stages")
    if name == "gpipe":
        return num_microbatches
    if name == "1f1b":
        return min(num_microbatches, num_stages - stage)
    return 1


def too_many_stages(name: ScheduleName, num_stages: int, num_microbatches: int) -> str | None:
    """Why the runtime would refuse so many stages, and the way out; `None` if it would not.

    torch's ``Schedule1F1B`` wants at least as many micro-batches as stages; GPipe takes any.
    """
    if name != "1f1b" or num_stages <= num_microbatches:
        return None
    return (
        f"the 1f1b schedule needs at least as many micro-batches as stages: {num_stages} stages, "
        f"but num_microbatches is {num_microbatches}; ask for num_microbatches={num_stages} or "
        "more, or for the gpipe schedule"
    )


def _check(name: str, num_stages: int, num_microbatches: int) -> None:
    if name not in ("gpipe", "1f1b", "forward_only"):
        raise InvalidInput(
            f"no schedule is called {name!r}; there are 'gpipe', '1f1b' and 'forward_only'"
        )
    if num_stages < 1 or num_microbatches < 1:
        raise InvalidInput(
            f"a schedule needs at least one stage and one micro-batch, "
            f"not {num_stages} and {num_microbatches}"
        )


def _fill_drain(num_microbatches: int, *, backward: bool) -> Order:
    """All forwards, then all backwards in the same order (the first micro-batch first)."""
    order = [(Work.FORWARD, index) for index in range(num_microbatches)]
    if backward:
        order += [(Work.BACKWARD, index) for index in range(num_microbatches)]
    return order


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left."""
    warm_up = min(num_microbatches, num_stages - stage)
    order = [(Work.FORWARD, index) for index in range(warm_up)]
    for index in range(num_microbatches):
        order.append((Work.BACKWARD, index))
        if warm_up + index < num_microbatches:
            order.append((Work.FORWARD, warm_up + index))
    return order
