"""Plans under a target's rules are the best of all that keep them, and can be exported."""

import random
import re
from itertools import combinations, pairwise, permutations

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.graph.graph import Edge
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.block_stack import find_stack
from stagewright.core.profile.forward_only import for_inference
from stagewright.formats.check_cut import check
from stagewright.formats.expressible import Inexpressible
from stagewright.formats.plan_for import plan_for
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import ModelLayers
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile
from tests.formats.runtimes.test_own_parsers import ask, needs_runtimes
from tests.formats.runtimes.test_rules import place_units

NAMES = (
    "embed",
    "layers.0.attention",
    "layers.0.mlp",
    "layers.1",
    "layers.2.attention",
    "layers.2.mlp",
    "layers.3",
    "norm",
    "head",
)


def draw_profile(draw):
    times = [draw.uniform(0.2, 3) * 1e-3 for _ in NAMES]
    costs = chain_profile(times, forward_bytes=draw.choice([0, 10**5, 10**6]), saved_bytes=100)
    # Each cut is crossed by a value of its own.
    boundaries = tuple(
        gap.model_copy(
            update={
                "tensors": tuple(
                    each.model_copy(update={"name": f"{each.name}{gap.after}"})
                    for each in gap.tensors
                )
            }
        )
        for gap in costs.boundaries
    )
    return rename(costs, NAMES).model_copy(update={"boundaries": boundaries})


def rename(profile, names):
    """Return the profile with other names of its layers."""
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, names, strict=True)
    )
    return profile.model_copy(update={"layers": layers})


def keeps_rules(cuts, rules):
    """Return whether cuts keep a target's rules, by the names written above alone."""
    if rules.unit != "block":
        return True
    between, edges = {3, 4, 6}, {1, 7}
    if rules.cuts_behind_blocks:
        between.add(7)
    if not set(cuts) <= (between | edges if rules.cuts_around_blocks else between):
        return False
    blocks = [
        sum(first <= start < last for start in (1, 3, 4, 6))
        for first, last in pairwise((0, *cuts, 9))
    ]
    return not rules.equal_blocks or len(set(blocks)) == 1


@pytest.mark.parametrize("name", TARGETS)
def test_no_cut_within_the_rules_has_a_shorter_step(name):
    target = TARGETS[name]
    draw = random.Random(name)
    schedule = (target.rules.schedules or ("1f1b",))[0]
    options = PlanOptions(schedule=schedule, num_microbatches=6)
    for _ in range(12):
        profile = draw_profile(draw)
        found = plan_for(target, profile, "3xcpu", options)
        costs = for_inference(profile) if target.rules.inference else profile
        best = min(
            plan_from_balance(
                costs, "3xcpu", options, [last - first for first, last in pairwise((0, *cuts, 9))]
            ).step_time_s
            for stages in range(1, 4)
            for cuts in combinations(range(1, 9), stages - 1)
            if keeps_rules(cuts, target.rules)
        )
        assert found.plan.step_time_s <= best * (1 + 1e-9)
        assert found.plan.proof.simulated_lower_bound_s <= best * (1 + 1e-9)
        assert found.price >= -1e-12
        text = export(found.plan, name).text
        assert import_cut(text, name, ModelLayers(NAMES)).balance == found.plan.balance


CASES = [
    (name, schedule)
    for name, target in TARGETS.items()
    for schedule in (target.rules.schedules or ("1f1b", "gpipe"))
]


def draw_cluster(draw):
    """Two or three CPUs, of which none is as fast as another."""
    cluster = Cluster.parse(f"{draw.choice([2, 3])}xcpu")
    devices = tuple(
        each.model_copy(update={"speed": draw.uniform(0.5, 2), "kind": each.name})
        for each in cluster.devices
    )
    return cluster.model_copy(update={"devices": devices})


def try_every_cut(profile, cluster, options, rules):
    """Return the shortest step of all cuts that keep the rules, on the devices in every order."""
    several = options.schedule not in ("gpipe", "1f1b", "zero_bubble")
    chunks = 2 if several else 1
    steps = []
    for places in range(1, len(cluster.devices) + 1):
        for cuts in combinations(range(1, 9), chunks * places - 1):
            if not keeps_rules(cuts, rules):
                continue
            balance = [last - first for first, last in pairwise((0, *cuts, 9))]
            for order in permutations(cluster.devices, places):
                some = cluster.model_copy(update={"devices": order})
                steps.append(plan_from_balance(profile, some, options, balance).step_time_s)
    return min(steps)


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_every_schedule_on_unequal_devices(name, schedule):
    target = TARGETS[name]
    draw = random.Random(f"{name} {schedule}")
    options = PlanOptions(schedule=schedule, num_microbatches=6)
    for _ in range(3):
        profile, cluster = draw_profile(draw), draw_cluster(draw)
        costs = for_inference(profile) if target.rules.inference else profile
        found = plan_for(target, profile, cluster, options).plan
        best = try_every_cut(costs, cluster, options, target.rules)
        assert found.step_time_s <= best * (1 + 1e-9)
        assert found.proof.simulated_lower_bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name, t in TARGETS.items() if t.default_split])
def test_a_plan_is_never_slower_than_the_target_s_own_split(name):
    target = TARGETS[name]
    draw = random.Random(name)
    schedule = (target.rules.schedules or ("1f1b",))[0]
    for _ in range(20):
        profile = draw_profile(draw)
        options = PlanOptions(schedule=schedule, num_microbatches=6)
        plan = plan_for(target, profile, "3xcpu", options).plan
        stack = find_stack(NAMES)
        for stages in (2, 3):
            counts = target.default_split(stack.num_blocks, stages)
            if not counts:  # four blocks are not three equal stages
                assert target.rules.equal_blocks or name == "megatron"
                continue
            balance = tuple(map(len, ModelLayers(NAMES).cut_by_blocks(counts).stages))
            costs = for_inference(profile) if target.rules.inference else profile
            split = plan_from_balance(costs, "3xcpu", options, balance)
            assert plan.step_time_s <= split.step_time_s * (1 + 1e-9)


def ask_default(name, profile, num_stages):
    """Return the layers of each stage that a runtime's own code cuts without being told."""
    if name == "torchgpipe":
        from torchgpipe.balance.blockpartition import solve

        times = [
            round((entry.forward.median_s + entry.backward.median_s) * 1e9)
            for entry in profile.layers
        ]
        return [len(part) for part in solve(times, num_stages)]
    if name == "deepspeed":
        # partition_method="parameters", the default: layers are weighted by their parameters.
        weights = [entry.layer.parameter_bytes // 4 for entry in profile.layers]
        [parts] = ask("deepspeed's default", [{"weights": weights, "num_stages": num_stages}])
        return [last - first for first, last in pairwise(parts)]
    # llama.cpp gives equal devices equal shares: its placement, in float32.
    placed = place_units([1] * num_stages, 4)
    counts = [list(placed[:-1]).count(device) for device in range(num_stages)]
    return list(map(len, ModelLayers(NAMES).cut_by_blocks(counts).stages))


@needs_runtimes
@pytest.mark.parametrize("name", ["deepspeed", "torchgpipe", "llama.cpp"])
def test_a_plan_is_never_slower_than_what_the_target_s_own_code_cuts(name):
    draw, target = random.Random(f"default of {name}"), TARGETS[name]
    options = PlanOptions(schedule=(target.rules.schedules or ("1f1b",))[0], num_microbatches=6)
    faster = 0
    for _ in range(6):
        profile = draw_profile(draw)
        layers = tuple(
            entry.model_copy(
                update={
                    "layer": entry.layer.model_copy(
                        update={"parameter_bytes": 4 * draw.randint(10, 90)}
                    )
                }
            )
            for entry in profile.layers
        )
        profile = profile.model_copy(update={"layers": layers})
        made = plan_for(target, profile, "3xcpu", options).plan
        costs = for_inference(profile) if target.rules.inference else profile
        for num_stages in (2, 3):
            own = plan_from_balance(
                costs, "3xcpu", options, ask_default(name, profile, num_stages)
            ).step_time_s
            assert made.step_time_s <= own * (1 + 1e-9)
            faster += made.step_time_s < own * (1 - 1e-9)
    assert faster


def test_recomputation_is_one_way_for_all_where_the_target_has_one():
    """Never and always are planned, and the faster is taken."""
    profile = draw_profile(random.Random(1))
    options = PlanOptions(schedule="gpipe", num_microbatches=4, recompute="auto")
    plan = plan_for(TARGETS["torchgpipe"], profile, "2xcpu", options).plan
    assert len({stage.recompute for stage in plan.stages}) == 1


def test_equal_stages_that_do_not_exist_are_infeasible():
    profile = draw_profile(random.Random(2))
    options = PlanOptions(schedule="gpipe", num_stages=3)
    with pytest.raises(Infeasible, match="4 blocks cannot be cut into stages of equally many"):
        plan_for(TARGETS["maxtext"], profile, "3xcpu", options)


@pytest.mark.parametrize("name", [n for n, t in TARGETS.items() if t.rules.inference])
def test_schedules_of_training_are_refused_for_inference(name):
    """Two stages a device were taken, and exported as if each had a rank."""
    for schedule in ("zbv", "interleaved_1f1b", "zero_bubble"):
        with pytest.raises(InvalidInput, match=f"has no schedule {schedule} of forward passes"):
            plan_for(name, draw_profile(random.Random(3)), "2xcpu", PlanOptions(schedule=schedule))


def test_remedies_are_what_the_target_allows():
    """Recomputation of single stages, replicas and cuts inside blocks were recommended."""
    profile = chain_profile([1e-3] * 8, parameter_bytes=1000, saved_bytes=3000)
    cluster = Cluster.parse("2xcpu")
    small = tuple(each.model_copy(update={"memory_bytes": 30_000}) for each in cluster.devices)
    cluster = cluster.model_copy(update={"devices": small})
    options = PlanOptions(num_microbatches=8, schedule="1f1b")
    with pytest.raises(Infeasible) as error:
        plan(profile, cluster, options)
    free = [each.text for each in error.value.remedies]
    assert "recompute='auto'" in free
    with pytest.raises(Infeasible) as error:
        plan_for("megatron", profile, cluster, options)
    allowed = [each.text for each in error.value.remedies]
    assert set(allowed) < set(free)
    assert not any("recompute" in each or "replicas" in each for each in allowed)
    assert "recompute" not in str(error.value)
    for remedy in error.value.remedies:
        made = plan_for("megatron", profile, remedy.cluster, remedy.options).plan
        assert export(made, "megatron").text


def test_layers_recompute_only_where_they_are_the_blocks():
    """A runtime that recomputes blocks got plans whose heads recompute, too, and refused them."""
    saved = {"saved_bytes": 3000, "forward_bytes": 100}
    names = ["embed", *(f"layers.{index}" for index in range(8))]
    blocks = rename(chain_profile([1e-3] * 9, **saved), names)
    headed = rename(chain_profile([1e-3] * 10, **saved), [*names, "head"])
    asked = PlanOptions(num_microbatches=8, recompute="layers")
    for name in ("megatron", "torchtitan"):
        made = plan_for(name, blocks, "2xcpu", asked).plan
        assert made.stages[-1].recompute == "layers"
        assert export(made, name).text
        with pytest.raises(InvalidInput, match="recomputes whole blocks, and here other layers"):
            plan_for(name, headed, "2xcpu", asked)
        auto = plan_for(name, headed, "2xcpu", asked.model_copy(update={"recompute": "auto"}))
        assert {stage.recompute for stage in auto.plan.stages} == {"never"}


def test_no_remedies_are_named_that_the_target_cannot_do():
    """Recomputation and other schedules were among the "changes tried", also for vLLM."""
    profile = chain_profile([1e-3] * 4, parameter_bytes=1000, saved_bytes=3000)
    devices = Cluster.parse("4xcpu").devices
    small = tuple(each.model_copy(update={"memory_bytes": 500}) for each in devices)
    cluster = Cluster.parse("4xcpu").model_copy(update={"devices": small})
    with pytest.raises(Infeasible, match=r"none of the changes tried helps; use devices"):
        plan(profile, cluster)
    for name in ("megatron", "vllm", "colossalai"):
        with pytest.raises(
            Infeasible, match=r"tried and allowed helps; use devices with more memory$"
        ) as error:
            plan_for(name, profile, cluster)
        assert not re.search("recompute|recomputation|schedule|optimizer", str(error.value))
    report = check("2,2", "vllm", profile, cluster)
    assert "nothing fits" in str(report)
    assert not re.search("recompute|recomputation|schedule|optimizer", report.best_reason)


def test_a_plan_under_rules_is_not_sent_to_them_again():
    """MaxText was sent to 1f1b, and `--for megatron` to `--for megatron`."""
    options = PlanOptions(schedule="looped_bfs", num_microbatches=4)
    with pytest.raises(Infeasible, match="it would fit with schedule='gpipe'") as error:
        plan_for("maxtext", chain_profile([1e-3] * 5), "2xcpu", options)
    assert "1f1b" not in str(error.value)
    options = PlanOptions(schedule="interleaved_1f1b", num_microbatches=4)
    with pytest.raises(Inexpressible, match=r"one rank has all 2 stages.*\(schedule='1f1b'\)$"):
        plan_for("megatron", chain_profile([1e-3] * 8), "1xcpu", options)


def test_a_check_keeps_the_remedies_that_every_runtime_has():
    profile = chain_profile([1e-3] * 8, parameter_bytes=1000, saved_bytes=3000)
    cluster = Cluster.parse("2x30KB")
    with pytest.raises(Infeasible) as error:
        plan(profile, cluster)
    assert "recompute='auto'" in str(error.value)
    report = check("4,4", "colossalai", profile, cluster)
    assert re.search(r"it would fit with .*\d devices", report.best_reason)
    assert "recompute" not in report.best_reason


def test_a_model_without_blocks_is_refused_by_what_counts_them():
    profile = chain_profile([1e-3] * 3)
    renamed = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, ("stem", "body", "head"), strict=True)
    )
    profile = profile.model_copy(update={"layers": renamed})
    with pytest.raises(InvalidInput, match="no layer is part of a numbered block"):
        plan_for(TARGETS["megatron"], profile, "2xcpu")


@pytest.mark.parametrize("name", ["torch", "deepspeed", "torchtitan"])
def test_calls_of_one_module_stay_together(name):
    """A plan between them was found, and only its export refused."""
    draw = random.Random(4)
    names = ("act", "layers.0", "layers.1", "act@1", "layers.2", "layers.3", "norm", "head", "out")
    profile = draw_profile(draw)
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": each})})
        for entry, each in zip(profile.layers, names, strict=True)
    )
    profile = profile.model_copy(update={"layers": layers})
    target = TARGETS[name]
    schedule = target.rules.schedules[0]
    options = PlanOptions(schedule=schedule, num_microbatches=6)
    plan = plan_for(target, profile, "3xcpu", options).plan
    (stage,) = (stage for stage in plan.stages if "act" in stage.layer_names)
    assert "act@1" in stage.layer_names
    assert plan.num_stages > 1
    assert export(plan, name).text


def test_other_objectives_are_compared_by_themselves():
    profile = draw_profile(random.Random(6))
    options = PlanOptions(schedule="1f1b", objective="throughput", recompute="auto")
    found = plan_for(TARGETS["deepspeed"], profile, "3xcpu", options)
    assert found.plan.proof.value <= found.free.proof.value * (1 + 1e-9) * (1 + found.price)
    assert found.price == pytest.approx(found.plan.proof.value / found.free.proof.value - 1)


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
def test_replicas_are_equally_many_where_the_target_needs_it(name):
    target, draw = TARGETS[name], random.Random(f"replicas {name}")
    options = PlanOptions(schedule="1f1b", num_microbatches=8, max_replicas=2)
    for _ in range(4):
        profile = draw_profile(draw)
        plan = plan_for(target, profile, "4xcpu", options).plan
        assert len({stage.replicas for stage in plan.stages}) == 1
        assert import_cut(export(plan, name).text, name, ModelLayers(NAMES)).balance == plan.balance
        best = min(
            plan_from_balance(
                profile,
                "4xcpu",
                options,
                [last - first for first, last in pairwise((0, *cuts, 9))],
                replicas=[replicas] * (len(cuts) + 1),
            ).step_time_s
            for replicas in (1, 2)
            for stages in range(1, 4 // replicas + 1)
            for cuts in combinations(range(1, 9), stages - 1)
            if keeps_rules(cuts, target.rules)
        )
        assert plan.step_time_s <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (((-1, 0), (0, 1), (0, 2), (1, 2)), "layer '2' reads 'v0' of '0', not of the layer"),
        (((-1, 0), (-1, 1), (0, 1), (1, 2)), "layer '1' reads 'v-1' of the model's input"),
        (((-1, 0), (1, 2)), "layer '1' reads nothing that the one before it returned"),
    ],
)
@pytest.mark.parametrize("name", ["deepspeed", "torchgpipe"])
def test_edges_tell_that_a_model_is_no_chain(name, pairs, expected):
    """Estimated Llamas read their rotary embeddings in every block, and capture left it open."""
    costs = chain_profile([1e-3] * 3)
    edges = tuple(
        Edge(
            source=source,
            target=target,
            tensor=TensorSpec(name=f"v{source}", shape=(1,), dtype="float32"),
        )
        for source, target in pairs
    )
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": str(index)})})
        for index, entry in enumerate(costs.layers)
    )
    profile = costs.model_copy(update={"layers": layers, "edges": edges, "chain_break": None})
    with pytest.raises(InvalidInput, match=re.escape(expected)):
        plan_for(name, profile, "2xcpu")
    schedule = PlanOptions(schedule=TARGETS[name].rules.schedules[0])
    made = plan(profile, "2xcpu", schedule)
    with pytest.raises(InvalidInput, match=re.escape(expected)):
        export(made, name)
    validate(made, profile, "2xcpu")
    in_a_row = tuple(edge for edge in edges if edge.source == edge.target - 1)
    if len(in_a_row) == len(layers):
        # Operations between modules leave no trace in edges, so it has to be said.
        known = profile.model_copy(update={"edges": in_a_row, "chain_break": ""})
        older = known.model_copy(update={"chain_break": None})
        plan_for(name, known, "2xcpu", schedule)
        with pytest.raises(InvalidInput, match="does not say whether the model is one"):
            plan_for(name, older, "2xcpu", schedule)


def test_choices_left_open_are_those_that_megatron_interleaves():
    """On three ranks it stops at 8 and 16 micro-batches with virtual stages."""
    profile = chain_profile([1e-2] * 24)
    options = PlanOptions(auto=("schedule", "chunks", "num_microbatches"))
    made = plan_for("megatron", profile, "3xcpu", options).plan
    assert made.chunks > 1
    assert made.num_microbatches % 3 == 0
    assert f"{made.num_microbatches} micro-batches chosen: a multiple of 3" in str(made.notes)
    fixed = PlanOptions(auto=("schedule", "chunks"), num_microbatches=8)
    made = plan_for("megatron", profile, "3xcpu", fixed).plan
    assert (made.schedule, made.num_microbatches) == ("1f1b", 8)
    assert "schedule 1f1b chosen: with virtual stages on 3 ranks" in str(made.notes)
    export(made, "megatron")
