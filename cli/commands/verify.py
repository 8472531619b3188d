"""``stagewright verify``: check that a plan's stages compute what the model computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.errors import InvalidInput, PlanMismatch
from ..options import model as of_model
from ..options import profile as flags
from ..support.load_object import call_object, load_model, load_object
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
    from ...runtime.verify import DOUBLE, seed_generators, verify

    document = read_document(plan, Plan)
    check_runnable(document, "one device")
    # Seeded before the model is built, so that its initial weights are reproducible.
    seed_generators(seed)
    if model is None and sample is None:
        module, batch, expected, loss_fn = _build_family(document, seed)
    else:
        module, batch, expected, loss_fn = _load_own(document, model, sample, loss, target)
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
    if document.spec is not None:
        say_next(command_line("run", plan, "--compare"), quiet=as_json)


def _build_family(plan: Plan, seed: int) -> tuple[Any, Any, Any, Any]:
    from ...profiler.models.families import build_loss, build_model, training_batch

    if plan.spec is None:
        raise InvalidInput(
            "the plan's model is not from a model family; name the model: "
            "stagewright verify PLAN package.module:function --sample package.module:function"
        )
    inputs, target = training_batch(plan.spec, plan.inputs, plan.num_microbatches, seed=seed)
    model = build_model(plan.spec)
    names = {spec.name for spec in plan.inputs}
    batch = inputs if names == set(inputs) else tuple(inputs.values())
    return model, batch, target, build_loss(plan.spec)


def _load_own(
    plan: Plan, model: str | None, sample: str | None, loss: str | None, target: str | None
) -> tuple[Any, Any, Any, Any]:
    """Load the user's model, one sample per micro-batch, the target and the loss."""
    from ...runtime.verify import join_samples, make_dummy_target, mean_of_squares

    module, first = load_model(model, sample)
    if (loss is None) != (target is None):
        raise InvalidInput("--loss and --target must be given together")
    assert sample is not None
    rest = [call_object(sample) for _ in range(plan.num_microbatches - 1)]
    batch = join_samples([first, *rest])
    if loss is None or target is None:
        size = plan.inputs[0].shape[0] * plan.num_microbatches
        return module, batch, make_dummy_target(size), mean_of_squares
    expected = join_samples([call_object(target) for _ in range(plan.num_microbatches)])
    return module, batch, expected, _load_loss(loss)


def _load_loss(name: str) -> Callable[[Any, Any], Any]:
    """Load the user's loss function; an error inside it is reported as `InvalidInput`."""
    from ...runtime.engine.microbatch import describe_shapes

    loss_fn = load_object(name)
    if not callable(loss_fn):
        raise InvalidInput(
            f"{name} is a {type(loss_fn).__name__}, not a function of (output, target)"
        )

    def call_loss(output: Any, target: Any) -> Any:
        try:
            return loss_fn(output, target)
        except Exception as error:
            raise InvalidInput(
                f"the loss {name} failed on a micro-batch, with output {describe_shapes(output)} "
                f"and target {describe_shapes(target)}: {type(error).__name__}: {error}"
            ) from error

    return call_loss
