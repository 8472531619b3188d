"""Plans that would run otherwise than planned are refused before anything runs."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import plan
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.supported_plans import check_runnable
from stagewright.runtime.verify import verify
from tests.builders import chain_profile
from tests.torch_models import make_batch, make_case, make_plan


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
