"""``stagewright verify``: check that a plan's stages compute what the model computes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.errors import PlanMismatch
from ..options import model as of_model
from ..options import profile as flags
from ..support.load_object import OwnModel
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next
from ..support.read_documents import read_document

if TYPE_CHECKING:
    from ...core.plan.plan import Plan

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-9, 1e-4
"""Largest relative difference, in norm, that another order of summation explains."""


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

    Compares the loss and all gradients, buffers and names. For a plan of your own model, name
    the model and its sample as for 'profile'; a plan of a model family needs neither. Without
    --loss, the loss is the mean square of all outputs. Exits with code 2 if anything differs.
    """
    from ...core.plan.plan import Plan
    from ...runtime.supported_plans import check_runnable
    from ...runtime.verify import DOUBLE, join_samples, seed_generators, verify

    document = read_document(plan, Plan)
    check_runnable(document, "one device")
    own = OwnModel.of("verify", document, model, sample, loss, target)
    # Seeded before the model is built, so that its initial weights are reproducible.
    seed_generators(seed)
    if own is None:
        module, batch, expected, loss_fn = _build_family(document, seed)
    else:
        module, loss_fn = own.build(), own.load_loss()
        batch, expected = map(join_samples, own.make_microbatches(document))
    say("running one step unsplit and one in stages", quiet=as_json)
    dtype = None if single else DOUBLE
    found = verify(module, document, batch, expected, loss_fn, dtype=dtype)
    tolerance = SINGLE_TOLERANCE if single else DOUBLE_TOLERANCE
    is_equal = found.equal(tolerance)
    if as_json:
        emit(json.dumps({**dataclasses.asdict(found), "worst": found.worst, "equal": is_equal}))
    else:
        emit(f"{'equal' if is_equal else 'NOT EQUAL'}: {found}")
    if not is_equal:
        raise PlanMismatch(
            f"the stages do not compute what the model computes: {found}; a difference beyond "
            f"{tolerance:g} is not due to rounding. Please report it with the plan"
        )
    words = own.words if own is not None else []
    say_next(command_line("run", plan, *words, "--compare"), quiet=as_json)


def _build_family(plan: Plan, seed: int) -> tuple[Any, Any, Any, Any]:
    from ...profiler.models.families import build_loss, build_model, training_batch

    assert plan.spec is not None, "a model of one's own is named"
    inputs, target = training_batch(plan.spec, plan.inputs, plan.num_microbatches, seed=seed)
    model = build_model(plan.spec)
    names = {spec.name for spec in plan.inputs}
    batch = inputs if names == set(inputs) else tuple(inputs.values())
    return model, batch, target, build_loss(plan.spec)
