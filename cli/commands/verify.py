"""``stagewright verify``: does a plan compute what the model computes?"""

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
from ..options.model import own_model
from ..support.load_object import call_target, load_target
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next
from ..support.read_documents import read_document

if TYPE_CHECKING:
    from ...core.plan.plan import Plan

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-9, 1e-4
"""Relative, in norm: what another order of sums may change, in double and in single precision."""


def command(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A file written by 'stagewright plan'.")],
    model: of_model.Model = None,
    sample: of_model.SampleObject = None,
    loss: flags.Loss = None,
    target: flags.Target = None,
    single: Annotated[
        bool, Option("--single", help="Keep the model's precision instead of double.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Of the weights and the data.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Take one step in the plan's stages and one unsplit, and compare all they compute.

    Loss, every gradient, every buffer and every name. A plan of a family needs nothing else; for
    a model of your own name it and its sample as for profile. Without --loss it is the mean of
    the squares of all outputs. Exits 1 where something differs.
    """
    from ...core.plan.plan import Plan
    from ...runtime.supported_plans import check_runnable
    from ...runtime.verify import DOUBLE, seed_generators, verify

    document = read_document(plan, Plan)
    check_runnable(document, "one device")
    seed_generators(seed)
    if model is None and sample is None:
        module, batch, wanted, loss_fn = _of_family(document, seed)
    else:
        module, batch, wanted, loss_fn = _of_own(document, model, sample, loss, target)
    say("one step unsplit, one in stages", quiet=as_json)
    dtype = None if single else DOUBLE
    found = verify(module, document, batch, wanted, loss_fn, dtype=dtype)
    tolerance = SINGLE_TOLERANCE if single else DOUBLE_TOLERANCE
    is_equal = found.equal(tolerance)
    if as_json:
        emit(json.dumps({**dataclasses.asdict(found), "worst": found.worst, "equal": is_equal}))
    else:
        emit(f"{'equal' if is_equal else 'NOT EQUAL'}: {found}")
    if not is_equal:
        raise PlanMismatch(
            f"the stages do not compute what the model computes: {found}; beyond {tolerance:g} it "
            "is no rounding. Please report it with the plan"
        )
    if document.spec is not None:
        say_next(command_line("run", plan, "--compare"), quiet=as_json)


def _of_family(plan: Plan, seed: int) -> tuple[Any, Any, Any, Any]:
    from ...profiler.models.families import build_loss, build_model, training_batch

    if plan.spec is None:
        raise InvalidInput(
            "this plan was not made from a model family, so the model cannot be built here; name "
            "it: stagewright verify PLAN package.module:function --sample package.module:function"
        )
    inputs, target = training_batch(plan.spec, plan.inputs, plan.num_microbatches, seed=seed)
    model = build_model(plan.spec)
    names = {spec.name for spec in plan.inputs}
    batch = inputs if names == set(inputs) else tuple(inputs.values())
    return model, batch, target, build_loss(plan.spec)


def _of_own(
    plan: Plan, model: str | None, sample: str | None, loss: str | None, target: str | None
) -> tuple[Any, Any, Any, Any]:
    """The user's model, a batch of as many samples as there are micro-batches, target, loss."""
    from ...runtime.verify import join_samples, make_dummy_target, mean_of_squares

    module, first = own_model(model, sample)
    if (loss is None) != (target is None):
        raise InvalidInput("give --loss and --target together, or neither")
    assert sample is not None
    rest = [call_target(sample) for _ in range(plan.num_microbatches - 1)]
    batch = join_samples([first, *rest])
    if loss is None or target is None:
        size = plan.inputs[0].shape[0] * plan.num_microbatches
        return module, batch, make_dummy_target(size), mean_of_squares
    wanted = join_samples([call_target(target) for _ in range(plan.num_microbatches)])
    return module, batch, wanted, _own_loss(loss)


def _own_loss(name: str) -> Callable[[Any, Any], Any]:
    """The user's loss, whose errors are the user's.

    Raises:
        InvalidInput: It is no function; when called: it failed.
    """
    from ...runtime.engine.microbatch import describe_shapes

    loss_fn = load_target(name)
    if not callable(loss_fn):
        raise InvalidInput(
            f"{name} is a {type(loss_fn).__name__}, not a function of output, target"
        )

    def called(output: Any, target: Any) -> Any:
        try:
            return loss_fn(output, target)
        except Exception as error:
            raise InvalidInput(
                f"the loss {name} failed on a micro-batch, with output {describe_shapes(output)} "
                f"and target {describe_shapes(target)}: {type(error).__name__}: {error}"
            ) from error

    return called
