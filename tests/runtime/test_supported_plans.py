"""Plans that would run otherwise than planned are refused before anything runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.capture.capture import capture
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import plan
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.inference.pipeline import InferencePipeline
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.rpc.stage_builder import ModelSource, build
from stagewright.runtime.supported_plans import check_runnable, check_stateful_layers
from stagewright.runtime.verify import verify
from stagewright.schedules.plan_schedule import schedule_of
from tests.builders import chain_profile
from tests.runtime.odd_models import ReadsReference
from tests.torch_models import Case, make_batch, make_case, make_plan, traced_profile


def planned(num_layers=4, num_devices=2, **asked):
    profile = chain_profile([1e-3] * num_layers, forward_bytes=8)
    return plan(profile, Cluster.uniform(num_devices), PlanOptions(**asked))


def replicated():
    made = planned(num_layers=1, max_replicas=2)
    assert made.stages[0].replicas == 2
    return made


def deeper():
    made = planned(num_layers=3, num_devices=3)
    stages = (made.stages[0].model_copy(update={"in_flight": 5}), *made.stages[1:])
    return Plan.model_validate({**dict(made), "stages": stages})


def reordered(made):
    order = tuple(reversed(range(sum(made.balance))))
    return Plan.model_validate({**dict(made), "layer_order": order})


RUN = {
    "replicas": replicated,
    "recomputation": lambda: planned(recompute="always"),
    "depth": deeper,
    "one forward": lambda: planned(objective="latency"),
    **{
        name: lambda name=name: planned(schedule=name)
        for name in ("zero_bubble", "looped_bfs", "zbv")
    },
}


@pytest.mark.parametrize("name", RUN)
def test_processes_run_what_the_planner_makes(name):
    check_runnable(RUN[name]())


def test_processes_run_no_other_order_of_layers():
    with pytest.raises(PlanMismatch, match="in processes: its layers are reordered"):
        check_runnable(reordered(planned()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_what_the_planner_makes_by_default_is_run(schedule, num_microbatches):
    for num_devices in (1, 3):
        made = planned(8, num_devices, schedule=schedule, num_microbatches=num_microbatches)
        for where in ("processes", "devices", "one device"):
            check_runnable(made, where)


def test_an_order_that_changes_nothing_is_run():
    made = planned()
    check_runnable(made.model_copy(update={"layer_order": tuple(range(4))}))


def test_everything_is_named_at_once():
    made = planned(num_layers=2, num_devices=4, max_replicas=2)
    with pytest.raises(PlanMismatch) as caught:
        check_runnable(reordered(made), "devices")
    assert "--order given --max-replicas 1" in str(caught.value)


def test_one_process_takes_schedules_and_on_one_device_more():
    recomputed = planned(recompute="always")
    for made in (planned(schedule="zbv"), planned(objective="latency"), deeper(), recomputed):
        check_runnable(made, "devices")
    check_runnable(replicated(), "one device")
    with pytest.raises(PlanMismatch, match=r"by one process.*or run it in processes"):
        check_runnable(replicated(), "devices")
    with pytest.raises(PlanMismatch, match="--order given") as caught:
        check_runnable(reordered(planned()), "one device")
    assert "stagewright.Pipeline" not in str(caught.value)


class Counting(nn.Module):
    """Divides by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


def stateful_model():
    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))


def plan_for(model, num_devices=2, **asked):
    """A plan by a profile that says nothing about state, as old ones do."""
    profile = traced_profile(Case("own", None, model, torch.ones(2, 4), loss))
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"stateful": ""})})
        for entry in profile.layers
    )
    options = PlanOptions(num_microbatches=4, **asked)
    return plan(
        profile.model_copy(update={"layers": layers}), Cluster.uniform(num_devices), options
    )


STATEFUL = {
    "replicas": (dict(num_devices=3, max_replicas=3, num_stages=1), r"has \d replicas"),
    "recomputation": (dict(recompute="always"), "is recomputed"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_layer_that_keeps_state_is_not_run_by_replicas_or_twice(name):
    """The counter went up in a recomputation too, and every replica had one of its own."""
    asked, words = STATEFUL[name]
    with pytest.raises(PlanMismatch, match=rf"layer '1' changes '1\.calls'.*{words}"):
        verify(stateful_model(), plan_for(stateful_model(), **asked), torch.ones(8, 4), None, loss)


def test_processes_that_recompute_state_refuse_to():
    made = plan_for(stateful_model(), num_devices=1, num_stages=1, recompute="always")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanMismatch, match=r"'1\.calls'.*stage 0 is recomputed"):
            DistributedPipeline(stateful_model(), made, loss_fn=loss)
    finally:
        dist.destroy_process_group()


def test_a_layer_that_keeps_state_takes_micro_batches_in_order():
    made = plan_for(stateful_model(), 1, num_stages=1, schedule="gpipe")
    layers, schedule = capture(stateful_model(), torch.ones(2, 4)).layers, schedule_of(made)
    check_stateful_layers(layers, made, schedule)
    ranks = tuple(tuple(reversed(actions)) for actions in schedule.ranks)
    with pytest.raises(PlanMismatch, match=r"in the order \[3, 2, 1, 0\]"):
        check_stateful_layers(layers, made, schedule.model_copy(update={"ranks": ranks}))


def test_one_process_does_not_recompute_state_either():
    made = plan_for(stateful_model())
    Pipeline(stateful_model(), made)
    with pytest.raises(PlanMismatch, match=r"'1\.calls'.*stage . is recomputed"):
        Pipeline(stateful_model(), made, checkpoint="except_last")


def test_replicas_that_predict_would_each_keep_state_of_their_own():
    made = plan_for(stateful_model(), max_replicas=2, num_stages=1)
    with InferencePipeline(stateful_model(), made) as alone:  # one device has no replicas
        assert len(alone.stages[0]) == 1
    with pytest.raises(PlanMismatch, match=r"layer '1' changes '1\.calls'.*has 2 replicas"):
        InferencePipeline(stateful_model(), made, devices=["cpu"] * 2)


def test_workers_that_recompute_state_refuse_to():
    made = plan_for(stateful_model(), recompute="always")
    source = ModelSource.of(stateful_model(), 0)
    with pytest.raises(PlanMismatch, match=r"'1\.calls'.*stage . is recomputed"):
        build(source, made, {}, torch.ones(2, 4))


def loss(output, target):
    return output.square().mean()


def test_stages_on_other_devices_cannot_reach_each_other_by_reference():
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), ReadsReference(first))
    words = r"stage 1 reads '0\.weight' of another stage through a reference.*another device"
    made = plan_for(model, num_stages=2, no_cut_after=("0",))
    Pipeline(model, made)
    with pytest.raises(PlanMismatch, match=words):
        Pipeline(model, made, devices=["cpu", "cpu"])


def test_distributed_refuses_before_it_looks_for_other_processes():
    case = make_case("mlp")
    made = reordered(make_plan(case, 2))
    with pytest.raises(PlanMismatch, match="--order given"):
        DistributedPipeline(case.model, made, loss_fn=case.loss_fn)


def test_a_schedule_of_several_stages_a_device_computes_the_same():
    case = make_case("mlp")
    made = make_plan(case, 2).model_copy(update={"schedule": "looped_bfs", "chunks": 2})
    batch, target = make_batch(case, made)
    assert verify(case.model, made, batch, target, case.loss_fn).equal(1e-5)


def test_reordered_layers_are_no_other_model():
    """They used to be told to profile the model again, which does not help."""
    case = make_case("mlp")
    made = reordered(make_plan(case, 2))
    batch, target = make_batch(case, made)
    with pytest.raises(PlanMismatch, match=r"layers are reordered.*--order given"):
        Pipeline(case.model, made)
    with pytest.raises(PlanMismatch, match="layers are reordered"):
        verify(case.model, made, batch, target, case.loss_fn)
