"""A step whose loss or gradient is NaN is refused, and said to have begun where it began."""

import pytest
import torch
import torch.distributed as dist

from stagewright.core.errors import NonFinite
from stagewright.core.plan.schedule import Action
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.finite_check import FiniteCheck
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from tests.torch_models import make_batch, make_case, make_plan

FINE, NAN = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
INFINITE = torch.tensor([1.0, -float("inf")])
FORWARD, BACKWARD = Action.model_validate("1F2"), Action.model_validate("1B2")


def found(*looks, inputs=()):
    check = FiniteCheck()
    for action, arrived, made, loss in looks:
        check.look(action, arrived, [] if loss is None else [loss], made)
    return check.find(inputs)


def test_finite_values_pass():
    assert found() is None
    assert found((FORWARD, [FINE], [FINE, 3, torch.arange(2)], None)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_looked_at(dtype):
    """torch finds no extremes of them, and the step failed."""
    fine, broken = FINE.to(dtype), NAN.to(dtype)
    assert found((FORWARD, [fine], [fine], None), (BACKWARD, [fine], [fine], None)) is None
    assert found((BACKWARD, [fine], [broken], None))[0].endswith("out of finite ones")


def test_complex_numbers_are_looked_at():
    fine, broken = torch.complex(FINE, FINE), torch.complex(FINE, NAN)
    assert found((FORWARD, [fine], [fine.conj()], None), (BACKWARD, [fine], [fine], None)) is None
    assert found((BACKWARD, [fine], [broken], None))[0].endswith("out of finite ones")
    assert found((BACKWARD, [broken.conj()], [fine], None))[1]


def test_other_flags_are_read_in_one_go():
    told = []
    check = FiniteCheck()
    check.read_along(torch.tensor([True, False]), told.append)
    check.look(FORWARD, [FINE], [NAN[1]], [FINE])
    check.read_along(torch.tensor([False]), told.append)
    check.find(())
    assert told == [[True, False], [False]]


def test_activations_alone_do_not_fail_a_step():
    """Masks hold minus infinity, and rows that are masked out may be NaN."""
    assert (
        found((FORWARD, [INFINITE], [INFINITE, NAN], None), (BACKWARD, [FINE], [FINE], None))
        is None
    )


@pytest.mark.parametrize(
    ("looks", "what", "is_received"),
    [
        ([(FORWARD, [FINE], [], NAN[1])], "the loss of micro-batch 2, on stage 1, is", False),
        ([(FORWARD, [NAN], [], NAN[1])], "stage 1 received activations with NaN for micro-b", True),
        (
            [(FORWARD, [FINE], [NAN], None), (BACKWARD, [NAN], [NAN], None)],
            "the forward of micro-batch 2 on stage 1 made NaN, its inputs hold none",
            False,
        ),
        (
            [(FORWARD, [FINE], [FINE], None), (BACKWARD, [INFINITE], [NAN], None)],
            "stage 1 received infinite or NaN gradients for micro-batch 2",
            True,
        ),
        (
            [(FORWARD, [FINE], [FINE], None), (BACKWARD, [FINE], [INFINITE], None)],
            "the backward on stage 1 made infinite or NaN gradients for micro-batch 2",
            False,
        ),
    ],
)
def test_the_first_value_is_named(looks, what, is_received):
    words, received = found(*looks)
    assert words.startswith(what)
    assert received is is_received


def test_an_auxiliary_loss_is_one_wherever_it_arises():
    looks = [(FORWARD, [FINE], [FINE], NAN[1]), (BACKWARD, [FINE], [FINE], None)]
    words, _ = found(*looks)
    assert words == "the loss of micro-batch 2, on stage 1, is infinite or NaN"


def test_inputs_that_hold_nan_are_named():
    first, backward = Action.model_validate("0F1"), Action.model_validate("0B1")
    looks = [(first, [], [NAN], NAN[1]), (backward, [NAN], [], None)]
    assert found(*looks, inputs=[[FINE], [NAN]]) == ("the inputs of micro-batch 1 hold NaN", False)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def poisoned(value=float("nan")):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    with torch.no_grad():
        next(case.model.parameters())[0] = value
    return case, plan, *make_batch(case, plan)


@pytest.mark.distributed
def test_a_rank_refuses_to_train_on(alone):
    case, plan, batch, target = poisoned()
    words = "in step 1, the loss of micro-batch 0, on stage 0"
    with (
        DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as pipeline,
        pytest.raises(NonFinite, match=words),
    ):
        pipeline.step(*batch, target=target)


@pytest.mark.distributed
def test_overflows_under_a_loss_scale_are_the_caller_s(alone):
    case, plan, batch, target = poisoned()
    with DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as pipeline:
        assert pipeline.step(*batch, target=target, loss_scale=1024.0).isnan()
    with DistributedPipeline(
        case.model, plan, loss_fn=case.loss_fn, check_finite=False
    ) as pipeline:
        assert pipeline.step(*batch, target=target).isnan()


def test_one_process_refuses_too():
    case, plan, batch, target = poisoned()
    training = Training(Pipeline(case.model, plan), loss_fn=case.loss_fn)
    with pytest.raises(NonFinite, match="the loss is nan"):
        training.step(*batch, target=target)
    assert all(p.grad is None for p in case.model.parameters())
