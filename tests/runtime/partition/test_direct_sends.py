"""Values sent past stages that have no use for them: the numbers of the unsplit model."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import DirectSend
from stagewright.runtime.partition.cut import cut, cut_for_plan
from stagewright.runtime.partition.routes import find_routes
from stagewright.runtime.supported_plans import check_runnable
from tests.runtime.forked import run_python
from tests.runtime.odd_models import Base
from tests.torch_models import make_case, make_plan


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_cells_of_the_conformance_table_are_equal(forking_executable, monkeypatch, tmp_path):
    """Gradients, buffers, loss and names; four ranks, 1e-9 relative in double precision.

    What the ranks launch could not wait for ever on NCCL.
    """
    monkeypatch.setenv("CONFORMANCE_AS_ON_NCCL", str(tmp_path))
    done = run_python(forking_executable, "tests/runtime/direct_cells.py", "60", timeout_s=220)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row for row in rows if row["ours"] != "equal"] == [], done.stderr[-3000:]
    assert len(rows) == 7, done.stderr[-3000:]


def by_hops(pieces, *inputs):
    """All stages one after the other in this process, each given what its hops bring."""
    made = {}
    outputs = list(inputs)
    for stage, module in enumerate(pieces.stages):
        if stage:
            outputs = [value for route in pieces.routes.into(stage) for value in made.pop(route)]
        outputs = list(module(*outputs))
        rest = iter(outputs)
        for route in pieces.routes.out_of(stage):
            made[route] = [next(rest) for _ in route.tensors]
    assert not made
    return outputs


class ChangedOnTheWay(Base):
    """The second layer changes in place what the third and the last one read."""

    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.d = nn.Linear(4, 4)

    def forward(self, x):
        skip = self.a(x)
        return self.c(self.d(self.b(skip))) + skip


class TwoSkips(Base):
    """One value is read by the first and the last layer, one by the last alone."""

    def forward(self, x):
        first = self.a(x)
        second = first.tanh()
        h = self.b(first).relu()
        return self.c(h) + second


class ReturnedEarly(Base):
    """What the first layer makes and what the last one reads of the inputs pass by the second."""

    def forward(self, x, late):
        first = self.a(x)
        early = first.tanh()
        return early, self.c(self.b(first).relu()) * late


@pytest.mark.parametrize(
    ("model", "skipping"), [(ChangedOnTheWay, 1), (TwoSkips, 1), (ReturnedEarly, 2)]
)
def test_stages_in_this_process(model, skipping):
    torch.manual_seed(0)
    whole = model().double()
    inputs = [torch.randn(2, 4, dtype=torch.float64)]
    if model is ReturnedEarly:
        inputs.append(torch.randn(2, 1, dtype=torch.float64))
    parts = copy.deepcopy(whole)
    captured = trace(parts, tuple(inputs), check=False)
    pieces = cut(captured, [1] * len(captured.layers), direct=True)
    assert sum(len(route.tensors) for route in pieces.routes.all if route.skips) >= skipping
    found, wanted = by_hops(pieces, *inputs), whole(*inputs)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    sum(value.sum() for value in found).backward()
    sum(value.sum() for value in wanted).backward()
    expected = dict(whole.named_parameters())
    for stage in pieces.stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_a_value_goes_from_reader_to_reader():
    """Of one that is changed in place, what became of it; straight from the first it would not."""
    captured = trace(ChangedOnTheWay(), (torch.randn(2, 4),), check=False)
    assert list(captured.layers.names) == ["a", "b.0", "b.1", "d", "c"]
    routes = find_routes(captured, [1] * 5, direct=True)
    found = [
        (route.source, route.target, [spec.name for spec in route.tensors]) for route in routes.all
    ]
    assert found == [
        (0, 1, ["a"]), (1, 2, ["b_0"]), (2, 3, ["b_1"]), (2, 4, ["b_0"]), (3, 4, ["d"]),
    ]  # fmt: skip


def test_relays_are_hops_to_the_next_stage_of_all_that_is_live():
    captured = trace(TwoSkips(), (torch.randn(2, 4),), check=False)
    balance = [1] * len(captured.layers)
    relayed, direct = (find_routes(captured, balance, direct=way) for way in (False, True))
    assert [(route.source, route.target) for route in relayed.all] == list(
        pairwise(range(len(balance)))
    )
    assert [route.tensors for route in relayed.all] == [
        captured.cuts[stage].boundary.tensors for stage in range(len(balance) - 1)
    ]
    sent = {spec.name for route in direct.all for spec in route.tensors}
    assert sent == {spec.name for route in relayed.all for spec in route.tensors}
    assert sum(len(h.tensors) for h in direct.all) < sum(len(h.tensors) for h in relayed.all)


class InAnotherOrder(Base):
    """What is read next was made last in training, and first in evaluation."""

    def forward(self, x):
        first = self.a(x)
        second = first.tanh()
        if self.training:
            first = first * torch.empty(x.shape[0], 1).bernoulli_(0.5)
        return self.c(self.b(first)) + second


class OtherValues(Base):
    """What passes by the second layer in training is what it reads in evaluation."""

    def forward(self, x):
        first = self.a(x)
        second = first.tanh()
        if self.training:
            noise = torch.empty(x.shape[0], 1).bernoulli_(0.5)
            return self.c(self.b(first * noise)) + second
        return self.c(self.b(second)) + first


def test_an_evaluation_whose_values_go_other_ways_is_refused():
    captured = trace(InAnotherOrder(), (torch.randn(2, 4),))
    assert captured.evaluation is not None
    with pytest.raises(PlanMismatch, match="skips='relay'"):
        find_routes(captured, [1] * len(captured.layers), direct=True)


def test_an_evaluation_of_its_own_goes_the_same_ways():
    torch.manual_seed(0)
    model, x = OtherValues(), torch.randn(2, 4)
    captured = trace(model, (x,))
    assert captured.evaluation is not None
    pieces = cut(captured, [1] * len(captured.layers), direct=True)
    assert any(route.skips for route in pieces.routes.all)
    for stage in pieces.stages:
        stage.eval()
    torch.testing.assert_close(by_hops(pieces, x)[0], model.eval()(x))


def planned_past(plan, source, target):
    send = DirectSend(source=source, target=target, tensors=("somewhere",))
    return plan.model_copy(update={"direct_sends": (send,)})


def test_a_plan_whose_values_go_other_ways_is_refused():
    case = make_case("mlp")
    plan = planned_past(make_plan(case, 4), 0, 2)
    with pytest.raises(PlanMismatch, match="sends 0 tensors directly from stage 0 to stage 2"):
        cut_for_plan(case.model, plan, direct=True)
    relayed = cut_for_plan(case.model, plan)  # where values are relayed whatever the plan says
    assert [route for route in relayed.routes.all if route.skips] == []


def test_a_plan_of_direct_sends_is_run_everywhere():
    plan = planned_past(make_plan(make_case("mlp"), 4), 0, 2)
    for where in ("processes", "devices", "one device"):
        check_runnable(plan, where)
