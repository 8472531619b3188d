"""``stagewright verify``: check that a plan's stages compute what the model computes."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import PlanMismatch
from ..options import model as of_model
from ..options import profile as flags
from ..support.load_object import OwnModel
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next
from ..support.progress import working
from ..support.read_documents import read_document

if TYPE_CHECKING:
    from ...core.plan.plan import Plan
    from ...runtime.verify import Verification

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-9, 1e-4
"""Largest relative difference, in norm, that another order of summation explains."""


MOST_NAMED = 3


def command(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A file written by 'stagewright plan'.")],
    model: of_model.Model = None,
    sample: of_model.SampleObject = None,
    loss: flags.Loss = None,
    target: flags.Target = None,
    single: Annotated[
        bool, Option("--single", help="Use the model's own precision instead of double precision.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the weights and the data.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run one step in the plan's stages and one unsplit, and compare the results.

    Compares the loss and all gradients, buffers and names. Where the plan splits layers over
    devices, the stages run in one process per device, else all in this one. For a plan of your own
    model, name the model and its sample as for 'profile'; a plan of a model family needs neither.
    Without --loss, the loss is the mean square of all outputs. Exits with code 2 if anything
    differs.
    """
    from ...core.plan.plan import Plan

    document = read_document(plan, Plan)
    is_split = any(stage.tensor > 1 for stage in document.stages)
    check = _verify_on_ranks if is_split else _verify_here
    own = OwnModel.of("verify", document, model, sample, loss, target)
    found = check(document, own, seed, is_single=single, quiet=as_json)
    tolerance = SINGLE_TOLERANCE if single else DOUBLE_TOLERANCE
    is_equal = found.equal(tolerance)
    if as_json:
        emit(json.dumps({**dataclasses.asdict(found), "worst": found.worst, "equal": is_equal}))
    else:
        emit(f"{'equal' if is_equal else 'NOT EQUAL'}: {found}")
    if not is_equal:
        largest = ", ".join(found.list_largest(MOST_NAMED))
        raise PlanMismatch(
            f"the stages do not compute what the model computes: {found}; largest: {largest}; "
            f"above {tolerance:g} is not due to rounding. Please report it with the plan"
        )
    words = own.words if own is not None else []
    say_next(command_line("run", plan, *words, "--compare"), quiet=as_json)


def _verify_here(
    plan: Plan, own: OwnModel | None, seed: int, *, is_single: bool, quiet: bool
) -> Verification:
    from ...runtime.supported_plans import check_runnable
    from ...runtime.verify import DOUBLE, verify
    from ..support.verify_worker import build_step

    check_runnable(plan, "one device")
    step = build_step(plan, own, seed)
    say("running one step unsplit and one in stages", quiet=quiet)
    return verify(*step, dtype=None if is_single else DOUBLE)


def _verify_on_ranks(
    plan: Plan, own: OwnModel | None, seed: int, *, is_single: bool, quiet: bool
) -> Verification:
    """Verify a plan whose layers are split, which only processes run."""
    from ...schedules.plan_schedule import count_ranks
    from ..support.launch_ranks import verify_on_ranks
    from ..support.verify_worker import check_machine

    check_machine(plan, own, is_single=is_single)
    count = count_ranks(plan)
    say(f"running one step unsplit and one on {count} processes", quiet=quiet)
    with nullcontext() if quiet else working("verifying"):
        return verify_on_ranks(plan, own=own, seed=seed, is_single=is_single)
