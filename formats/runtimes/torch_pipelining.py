"""torch.distributed.pipelining: split points, the order of work as CSV, and a script with both."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.plan.schedule import Action, Schedule, ScheduleName, Work
from ...schedules.plan_schedule import schedule_of
from ...schedules.traits import FOLDED
from ..settings import Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    Rejection,
    find_skipping_value,
    parse_literal,
    write_header,
)

TITLE = "torch.distributed.pipelining"
CHECKED = "torch 2.13.0, its own pipeline() and _load_csv on two to four processes"

CSV_NAME, COMMUNICATION_NAME = "schedule.csv", "schedule_comms.csv"

SCHEDULE_CLASSES: dict[ScheduleName, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""torch's classes with the same orders of work; zero_bubble is the interleaved one with one stage a
rank."""

_SCRIPT = '''\
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.pipelining import {imports}
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.export import export

SPLIT_SPEC = {{{split_spec}}}
STAGES_OF_RANK = {stages_of_rank}
NUM_MICROBATCHES = {num_microbatches}
SCHEDULE_CSV = Path(__file__).with_name("{csv_name}")


def build_schedule(model, microbatch, rank, device, loss_fn, group=None):
    """Return this rank's stage modules, for the optimizer, and its schedule.

    ``microbatch`` is the model's positional arguments at the size of one micro-batch. Then
    ``schedule.step(batch)`` on rank 0, ``schedule.step(target=target, losses=losses)`` on the rank
    of the last stage (both on a rank with both), ``schedule.step()`` elsewhere. Gradients are
    averaged over micro-batches.
    """
    refuse_gradient_modes(export(model, microbatch))
    with without_modes():
        refuse_gradient_modes(export(model, microbatch), also_equal=True)
        cut = pipeline(model, mb_args=microbatch, split_spec=SPLIT_SPEC)
    stages = [{stage} for index in STAGES_OF_RANK[rank]]
    schedule = _PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=loss_fn)
    schedule._load_csv(str(SCHEDULE_CSV))
    return [stage.submod for stage in stages], schedule


def refuse_gradient_modes(program, also_equal=False):
    """Refuse operations under no_grad or autocast that would compute something else without it.

    pipeline() loses both. Without either, an operation is the same if no parameter goes into it,
    such as those of rotary embeddings.
    """
    reached = set()
    for node in program.graph.nodes:
        region = str(node.target)
        if node.name in program.graph_signature.inputs_to_parameters or (
            reached.intersection(node.all_input_nodes) and "aten.detach" not in region
        ):
            reached.add(node)
        if region == "wrap_with_set_grad_enabled":
            is_same = node.args[0] or node not in reached
            inner = getattr(program.graph_module, node.args[1].target)
            is_same &= not any("autocast" in str(each.target) for each in inner.graph.nodes)
        elif region == "wrap_with_autocast":
            is_same = False
        else:
            continue
        if also_equal or not is_same:
            name = [*node.meta["nn_module_stack"].values()][-1][0] or "the model"
            raise NotImplementedError(
                f"{{name}} has operations under torch.no_grad or autocast, which pipeline() loses; "
                "detach() their results, or run the whole step under autocast"
            )


@contextmanager
def without_modes():
    """Have ``torch.no_grad`` do nothing; ``torch.set_grad_enabled`` still does what it does."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.no_grad, "__enter__", lambda mode: None))
        stack.enter_context(patch.object(torch.no_grad, "__exit__", lambda mode, *error: None))
        yield
'''


# In torch 2.13 stages made by build_stage greet both neighbours by a message before the first step.
# Where a rank holds both (the turn of a V) it would send to itself, which gloo refuses. A
# PipelineStage has no such greeting, but only sends to the next stage.
_FOLDED_STAGE = (
    "PipelineStage(cut.get_stage_module(index), index, cut.num_stages, device, group=group)"
)


def check_folded(plan: Plan) -> tuple[Rejection, ...]:
    """Refuse values that skip a stage under a V-shaped schedule."""
    if plan.schedule not in FOLDED:
        return ()
    passed = find_skipping_value(plan.boundaries)
    if not passed:
        return ()
    reason = f"{passed!r} crosses two cuts, which torch cannot carry under {plan.schedule}"
    return (Rejection("values that skip a stage", reason, "schedule='1f1b'"),)


def write(plan: Plan) -> Export:
    """Write a script that builds the schedule, and the order of work in both forms of torch."""
    cuts = list(accumulate(plan.balance))[:-1]
    points = "".join(f'\n    "{plan.layer_names[cut]}": SplitPoint.BEGINNING,' for cut in cuts)
    schedule = schedule_of(plan)
    is_folded = plan.schedule in FOLDED
    stages_of_rank = [list(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))]
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        f"Its own class for this order of work is {SCHEDULE_CLASSES[plan.schedule]}; the private "
        "_load_csv takes",
        f"the plan's, from {CSV_NAME}. {COMMUNICATION_NAME} is the same with sends and receives "
        '(format="compute_comms").',
        "build_schedule refuses autocast regions, and no_grad ones that parameters go into: plans "
        "do not know of them.",
    )
    script = _SCRIPT.format(
        split_spec=points + "\n" * bool(points),
        stages_of_rank=stages_of_rank,
        num_microbatches=plan.num_microbatches,
        csv_name=CSV_NAME,
        imports="PipelineStage, SplitPoint, pipeline" if is_folded else "SplitPoint, pipeline",
        stage=_FOLDED_STAGE if is_folded else "cut.build_stage(index, device, group)",
    )
    return Export(
        header + script,
        {CSV_NAME: write_compute_csv(plan), COMMUNICATION_NAME: write_communication_csv(schedule)},
    )


def write_compute_csv(plan: Plan) -> str:
    """Write the actions of every rank, a row each, as ``_load_csv`` reads ``compute_only``."""
    return _write_rows(tuple(map(str, actions)) for actions in schedule_of(plan).ranks)


def write_communication_csv(schedule: Schedule) -> str:
    """Write the actions of every rank with its sends and receives (``compute_comms``)."""
    return _write_rows(map(tuple, add_communication(schedule)))


def _write_rows(rows: Iterator[tuple[str, ...]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def add_communication(schedule: Schedule) -> list[list[str]]:
    """Return each rank's actions with their sends, receives and, last, reductions of gradients.

    All ranks are replayed together. The moment an action is done its send is appended to its rank
    and the receive to its partner, so each pair of ranks lists their messages in one order, and no
    receive stands in front of an action that its sender waits for: whatever the partner has listed
    by then needs nothing that is yet to come. That is what keeps blocking messages from deadlock.

    Raises:
        InvalidInput: The order of work waits for itself.
    """
    rank_of = {stage: ranks[0] for stage, ranks in enumerate(schedule.stage_ranks)}
    last = schedule.num_stages - 1
    listed: list[list[str]] = [[] for _ in schedule.ranks]
    # torch averages a stage's gradients over the micro-batches when it meets this action.
    last_of_stage = {
        action.stage: action
        for actions in schedule.ranks
        for action in actions
        if action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
    }
    arrived: set[tuple[int, str, int]] = set()
    position = [0] * len(schedule.ranks)
    while any(
        place < len(actions) for place, actions in zip(position, schedule.ranks, strict=True)
    ):
        advanced = False
        for rank, actions in enumerate(schedule.ranks):
            if position[rank] == len(actions):
                continue
            action = actions[position[rank]]
            if not _is_ready(action, last, arrived):
                continue
            position[rank] += 1
            advanced = True
            listed[rank].append(str(action))
            if action == last_of_stage.get(action.stage):
                listed[rank].append(f"{action.stage}REDUCE_GRAD")
            target, kind = _find_reader(action, last)
            if target is None:
                continue
            arrived.add((target, kind, action.microbatch))
            if rank_of[target] != rank:
                listed[rank].append(f"{action.stage}SEND_{kind}{action.microbatch}")
                listed[rank_of[target]].append(f"{target}RECV_{kind}{action.microbatch}")
        if not advanced:
            raise InvalidInput("the order of work waits for itself: no rank can go on")
    return listed


def _is_ready(action: Action, last: int, arrived: set[tuple[int, str, int]]) -> bool:
    if action.work is Work.FORWARD:
        return action.stage == 0 or (action.stage, "F", action.microbatch) in arrived
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        return action.stage == last or (action.stage, "B", action.microbatch) in arrived
    return True


def _find_reader(action: Action, last: int) -> tuple[int | None, str]:
    """Return the stage that reads what an action makes, and the kind of message."""
    if action.work is Work.FORWARD and action.stage < last:
        return action.stage + 1, "F"
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT) and action.stage > 0:
        return action.stage - 1, "B"
    return None, ""


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read the split points of a script or dict, or of a list of module names.

    Raises:
        InvalidInput: There are none, or they name modules that begin no layer.
    """
    text = settings.text
    spec = re.search(r"(?:split_spec|SPLIT_SPEC)\s*=\s*\{([^}]*)\}", text)
    if spec:
        lines = "\n".join(line.partition("#")[0] for line in spec[1].splitlines())
        points = re.findall(r"[\"']([^\"']+)[\"']\s*:\s*SplitPoint\.BEGINNING", lines)
        if "SplitPoint.END" in spec[1]:
            raise InvalidInput(
                "split points at the END of a module are not read; name the next module's BEGINNING"
            )
    else:
        points = parse_literal(text, "[") or []
    is_whole = spec is not None and not spec[1].strip()
    if not (points or is_whole) or not all(isinstance(point, str) for point in points):
        raise InvalidInput(
            'expected split points such as {"model.layers.2": SplitPoint.BEGINNING}, or a list of '
            "module names"
        )
    cuts = sorted(_find_cut(point, layers.names) for point in points)
    counts = [last - first for first, last in pairwise([0, *cuts, len(layers.names)])]
    first_rank = re.search(r"STAGES_OF_RANK\s*=\s*\[(\[[^\]]*\])", text)
    chunks = len(first_rank[1].split(",")) if first_rank else 1
    number = re.search(r"NUM_MICROBATCHES\s*=\s*(\d{1,7})", text)
    return layers.cut_by_layers(
        counts,
        schedule=find_schedule(text, chunks),
        chunks=chunks,
        ranks_setting="" if first_rank else "STAGES_OF_RANK",
        num_microbatches=int(number[1]) if number else None,
    )


def find_schedule(text: str, chunks: int) -> ScheduleName | None:
    """Return the schedule whose class in torch a text names; `None` if it names none."""
    found = {word.lower() for word in re.findall(r"\bSchedule\w+", text)}
    names = [ours for ours, name in SCHEDULE_CLASSES.items() if name.lower() in found]
    # Both zero-bubble schedules are one class, which tells them apart by the stages of a rank.
    return names[-1 if chunks > 1 else 0] if names else None


def _find_cut(point: str, names: Sequence[str]) -> int:
    """Return the position of a module's first layer."""
    for index, name in enumerate(names):
        if f"{name.partition('@')[0]}.".startswith(f"{point}."):
            return index
    raise InvalidInput(f"no layer begins with module {point!r}")
