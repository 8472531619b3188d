"""What is seen of a plan is the plan's, the profile's and the timeline's own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import get_args

import pytest

from stagewright import plan
from stagewright.api.planning.what_if import compare
from stagewright.cli.main import main
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Edge
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.plan.schedule import TrainingSchedule
from stagewright.core.profile.profile import Provenance, SplitLayer, TensorSplit
from stagewright.core.service.documents import StoredPlan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.view.build_plan_view import NOT_SEARCHED, build_plan_view
from stagewright.view.meshes import describe_mesh
from stagewright.view.module_parts import MAX_PARTS
from tests.builders import chain_profile, random_profile, split_profile

CLUSTER = Cluster.parse("2x24GB")


def a_profile(count=8):
    times = [0.001 * (1 + index % 3) for index in range(count)]
    return chain_profile(times, forward_bytes=1000, parameter_bytes=4000, saved_bytes=5000)


def planned(profile=None, cluster=CLUSTER, **options):
    return plan(profile or a_profile(), cluster, PlanOptions(**options))


@pytest.mark.parametrize("schedule", get_args(TrainingSchedule))
def test_boxes_and_curves_are_the_timelines(schedule):
    made = planned(schedule=schedule, num_stages=4 if schedule in CHUNKED else 2)
    timeline, view = plan_timeline(made), build_plan_view(made, a_profile(), CLUSTER)
    assert view.boxes is not None
    assert len(view.boxes.kinds) == len(timeline.events)
    for index, event in enumerate(timeline.events):
        assert view.boxes.ranks[index] == event.rank
        assert view.boxes.kinds[index] == event.kind
        assert (view.boxes.start_s[index], view.boxes.end_s[index]) == (event.start_s, event.end_s)
    changes = [(c.rank, c.time_s, c.held_bytes) for c in timeline.memory]
    seen = [
        (rank, time_s, held)
        for rank, curve in enumerate(view.memory)
        for time_s, held in zip(curve.time_s, curve.held_bytes, strict=True)
    ]
    assert seen == changes
    for rank, curve in enumerate(view.memory):
        assert curve.peak_bytes == made.memory_by_device()[view.lanes[rank].device]
        assert curve.fixed_bytes + max(curve.held_bytes) <= curve.peak_bytes
        if schedule in ("gpipe", "1f1b"):
            assert curve.fixed_bytes + max(curve.held_bytes) == curve.peak_bytes
    busy_s = sum(lane.busy_s for lane in view.lanes)
    idle = 1 - busy_s / (len(view.lanes) * made.step_time_s)
    assert idle == pytest.approx(made.bubble_fraction, abs=1e-9)


def test_a_lane_has_the_memory_of_all_stages_of_its_device():
    made = planned(schedule="interleaved_1f1b", num_stages=4)
    view = build_plan_view(made, a_profile(), CLUSTER, with_step=False)
    for lane in view.lanes:
        held = [made.stages[stage].memory.total_bytes for stage in lane.stages]
        assert len(held) == 2
        assert lane.memory_bytes == sum(held)
        assert lane.memory_limit_bytes == made.stages[0].memory_limit_bytes
        share = f"{lane.memory_bytes / lane.memory_limit_bytes:.0%}"
        listed = ", ".join(map(str, lane.stages))
        assert re.search(
            f"device {lane.device} holds .* [(]{share}[)] in stages {listed}\n", str(made)
        )
    assert "holds" not in str(planned())


CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def test_recomputed_activations_are_held_once():
    made = planned(recompute="always")
    view = build_plan_view(made, a_profile(), CLUSTER)
    for curve in view.memory:
        assert curve.fixed_bytes + max(curve.held_bytes) == curve.peak_bytes


def test_the_header_has_the_numbers_of_a_comparison():
    profile = random_profile(3, 12, illegal=0)
    made = plan(profile, Cluster.parse("2x24GB"), PlanOptions(num_microbatches=6))
    stored = StoredPlan(
        id="plan_1",
        created_at="2026-01-01T00:00:00Z",
        status="planned",
        profile_id=made.profile_id,
        cluster=CLUSTER,
        options=made.options,
        plan=made,
    )
    (compared,) = compare((stored,)).plans
    header = build_plan_view(made, profile, CLUSTER).header
    assert header.step_time_s == compared.step_time_s
    assert header.num_samples == 2 * 6
    assert header.samples_per_s == compared.samples_per_s == 2 * 6 / made.step_time_s
    assert header.bubble_fraction == compared.bubble_fraction
    assert header.peak_memory_bytes == compared.peak_memory_bytes
    equal = made.baseline("equal_layers")
    assert equal is not None
    assert equal.step_time_s is not None
    assert header.gain == equal.step_time_s / made.step_time_s - 1


def test_a_device_with_two_stages_holds_both():
    made = planned(schedule="interleaved_1f1b", num_stages=4)
    stages = [stage.memory.total_bytes for stage in made.stages]
    assert build_plan_view(made).header.peak_memory_bytes == max(
        stages[0] + stages[2], stages[1] + stages[3]
    )


def test_layers_stand_in_the_plans_order_with_the_profiles_costs():
    profile = random_profile(5, 10)
    made = plan(profile, Cluster.parse("3x24GB"))
    layers = build_plan_view(made, profile).layers
    assert layers.names == made.layer_names
    assert [layers.stages.count(index) for index in range(made.num_stages)] == list(made.balance)
    assert layers.forward_s == tuple(entry.forward.median_s for entry in profile.layers)
    for gap in profile.boundaries:
        assert bool(layers.cut_reasons[gap.after]) is not gap.legal
    only = build_plan_view(made).layers
    assert (only.names, only.forward_s) == (layers.names, ())


def test_another_models_profile_is_refused():
    made = planned()
    with pytest.raises(ValueError, match="profile it was made from"):
        build_plan_view(made, a_profile(9), CLUSTER)


def test_too_much_to_draw_is_left_out_of_the_drawing():
    made = planned(num_microbatches=8)
    wide = made.model_copy(update={"num_microbatches": 2**18})
    view = build_plan_view(wide, a_profile())
    assert view.boxes is None
    assert all(curve.time_s == () for curve in view.memory)


def boxes_of_stage(view, stage):
    """What stands in a column: rows that are in no other, single layers between them."""
    graph, first = view.graph, sum(view.balance[:stage])
    last = first + view.balance[stage]
    rows = {
        graph.first_layers[row]: graph.num_layers[row]
        for row, parent in enumerate(graph.parents)
        if parent < 0
    }
    sizes = []
    while first < last:
        sizes.append(rows.get(first, 1))
        first += sizes[-1]
    assert first == last
    return sizes


@pytest.mark.parametrize("count", [2, 30, 2000])
def test_boxes_of_the_graph_are_their_layers_together(count):
    profile = a_profile(count)
    made = plan_from_balance(profile, CLUSTER, PlanOptions(), (count // 2, count - count // 2))
    view = build_plan_view(made, profile)
    graph = view.graph
    for stage in range(2):
        assert 1 <= len(boxes_of_stage(view, stage)) <= MAX_PARTS
    for row, first in enumerate(graph.first_layers):
        layers = slice(first, first + graph.num_layers[row])
        costs = (*view.layers.forward_s[layers], *view.layers.backward_s[layers])
        assert graph.time_s[row] == pytest.approx(sum(costs))
        assert graph.parameter_bytes[row] == sum(view.layers.parameter_bytes[layers])
    assert graph.cut_bytes == (made.stages[0].send_forward_bytes,)


def test_what_skips_layers_is_told():
    tensor = TensorSpec(name="mask", shape=(7,), dtype="uint8")
    edges = (Edge(source=0, target=5, tensor=tensor), Edge(source=2, target=3, tensor=tensor))
    profile = a_profile(6).model_copy(update={"edges": edges})
    made = planned(profile, num_stages=2)
    graph = build_plan_view(made, profile).graph
    assert (graph.skip_sources, graph.skip_targets, graph.skip_bytes) == ((0,), (5,), (7,))


def test_assumptions_are_said_once():
    profile = a_profile()
    view = build_plan_view(planned(profile), profile, CLUSTER)
    assert view.assumptions
    assert not set(view.assumptions) & set(view.notes)
    assert set(view.assumptions) <= set(planned(profile).notes)


def test_a_command_with_any_name_is_seen_whole_and_means_that_name():
    name = "it's\n\\ a \u202ename\x1b1 caf\u00e9\u00a0\u00ad0\x80\x9f\U000e0001"
    made = planned().model_copy(update={"options": PlanOptions(no_cut_after=(name,))})
    shell = build_plan_view(made).reproduce.shell
    assert shell.isprintable()
    script = shell.replace("stagewright", "printf '%s\\0'", 1)
    words = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
    assert words.stdout.split("\0")[-4:-3] == [name]


def test_a_plan_that_was_only_priced_has_no_proof():
    made = planned()
    assert any(
        "above the lower bound" in line or "optimal" in line
        for line in build_plan_view(made).header.proof
    )
    (line,) = build_plan_view(made, searched=False).header.proof
    assert line == NOT_SEARCHED


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp32", "reserves": {}},
        {"num_microbatches": 4, "schedule": "gpipe", "recompute": "auto"},
        {"max_replicas": None, "together": (("layer.0", "layer.2"),), "memory_fraction": 0.5},
        {"no_cut_after": ("layer.3",), "pins": ({"layer": "layer.7", "stage": 1},)},
    ],
)
def test_the_commands_make_the_plan_again(options, device, tmp_path, monkeypatch, capsys):
    """Empty reserves were left out of the command, which then reserves the usual on GPUs."""
    profile = a_profile().model_copy(update={"provenance": Provenance(device=device)})
    made = planned(profile, **options)
    again = build_plan_view(made, profile, CLUSTER).reproduce
    monkeypatch.chdir(tmp_path)
    profile.write("profile.json")
    assert main(shlex.split(again.shell)[1:]) == 0
    written = type(made).read("plan.json")
    assert written == made
    capsys.readouterr()
    exec(again.python, {})
    assert capsys.readouterr().out == f"{made}\n"
    body = json.loads(shlex.split(again.curl.replace("\\\n", " "))[6])
    assert body["profile_id"] == made.profile_id
    assert PlanOptions.model_validate(body.get("options", {})) == made.options


def test_a_lane_stands_for_the_devices_that_split_its_layers():
    profile = chain_profile([1.0] * 4, parameter_bytes=4000)
    half = SplitLayer(compute_share=0.5, parameter_bytes=2000)
    split = TensorSplit(degree=2, layers=(half,) * 4)
    profile = profile.model_copy(update={"splits": (split,)})
    made = plan(profile, "4xcpu", PlanOptions(num_microbatches=2, tensor=2, num_stages=2))
    view = build_plan_view(made)
    assert [lane.device for lane in view.lanes] == ["cpu:0 +1", "cpu:2 +1"]
    assert [lane.memory_bytes for lane in view.lanes] == [
        stage.memory.total_bytes for stage in made.stages
    ]
    assert made._repr_html_()


def planned_with_split_layers(cluster, **options):
    """A plan of 2 stages of 2 replicas times 2 devices."""
    profile = split_profile()
    asked = PlanOptions(tensor=2, num_stages=2, max_replicas=2, num_microbatches=4, **options)
    return profile, plan(profile, cluster, asked)


def linked(bandwidth, latency_s):
    return Cluster.uniform(8, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_collectives_of_split_layers_are_what_links_add_to_the_plans_times(recompute):
    """Found without the view's formula: by the plan of equal devices on links that take no time."""
    cluster = linked(1e9, 1e-4)
    profile, made = planned_with_split_layers(cluster, recompute=recompute)
    _, free = planned_with_split_layers(linked(1e30, 0.0), recompute=recompute)
    assert made.balance == free.balance
    view = build_plan_view(made, profile, cluster)
    for row, stage, bare in zip(view.stages, made.stages, free.stages, strict=True):
        forward_s = stage.forward_time_s - bare.forward_time_s
        assert row.collective_forward_s == pytest.approx(forward_s)
        assert row.collective_forward_s > 0.01
        backward_s = stage.backward_time_s - bare.backward_time_s
        if recompute == "always":  # drawn as a box of its own
            backward_s -= forward_s
        assert row.collective_backward_s == pytest.approx(backward_s)
    without = build_plan_view(made, profile).stages
    assert [row.collective_forward_s for row in without] == [None, None]
    whole = planned()
    assert build_plan_view(whole, a_profile(), CLUSTER).stages[0].collective_backward_s is None


def test_a_stages_devices_are_said_in_words():
    _, made = planned_with_split_layers(linked(1e9, 1e-4), strategies=("replicate", "zero1"))
    row = build_plan_view(made).stages[0]
    assert (row.mesh, row.tensor, len(row.devices)) == ("2 replicas × 2, zero1", 2, 4)
    assert build_plan_view(planned()).stages[0].mesh == "1 device"
    alone = made.stages[0].model_copy(update={"replicas": 1, "devices": ("a", "b")})
    assert describe_mesh(alone) == "layers split over 2"
    whole = made.stages[0].model_copy(update={"tensor": 1, "devices": ("a", "b")})
    assert describe_mesh(whole) == "2 replicas, zero1"
