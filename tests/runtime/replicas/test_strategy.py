"""Which strategies are refused, and what a sharded stage holds while a step runs."""

import copy
import gc
import random
import weakref
from itertools import pairwise, product

import networkx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.capture.capture import trace
from stagewright.capture.program.segment import get_segments
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.plan.schedule import BACKWARDS, Schedule, Work
from stagewright.runtime.engine.keyed_dropout import keyed_dropout
from stagewright.runtime.replicas.deadlock_check import (
    Round,
    are_equal,
    can_finish,
    list_rounds,
)
from stagewright.runtime.replicas.sharded import ShardedStage, select_shardable
from stagewright.runtime.replicas.shared_weights import WeightPlacement
from stagewright.runtime.replicas.strategy import apply_strategies, choose_strategies
from stagewright.schedules.make_schedule import make_schedule
from tests.runtime.odd_models import DropPath
from tests.runtime.replicas.test_strategies import EACH_WAITS
from tests.torch_models import make_case, make_plan


@pytest.fixture(scope="module")
def plan():
    return make_plan(make_case("mlp"), 2, num_microbatches=6)


@pytest.mark.parametrize(
    ("strategy", "replicas", "error", "words"),
    [
        (
            "shard",
            (2, 2),
            InvalidInput,
            "unknown strategy 'shard'; use reduce, ddp, fully_shard",
        ),
        ({2: "ddp"}, (2, 2), InvalidInput, "stage 2; this plan has stages 0 to 1"),
        ({1: "ddp"}, (2, 1), PlanMismatch, "stage 1 has one device; stages with several: 0"),
        ("fully_shard", (1, 1), PlanMismatch, "no stage of this plan has any"),
        ({1: "ddp"}, (1, 7), PlanMismatch, "rank 7 has no micro-batch of stage 1.*at least 7"),
    ],
)
def test_what_cannot_be_is_refused(plan, strategy, replicas, error, words):
    schedule = make_schedule("1f1b", 2, 6, replicas=replicas)
    with pytest.raises(error, match=words):
        choose_strategies(plan, schedule, strategy)


def test_ddp_is_refused_where_backwards_are_in_two_parts(plan):
    schedule = make_schedule("zero_bubble", 2, 6, replicas=(2, 2))
    with pytest.raises(PlanMismatch, match=r"two parts.*'fully_shard'.*--schedule 1f1b"):
        choose_strategies(plan, schedule, "ddp")
    sharded = {0: "fully_shard", 1: "fully_shard"}
    assert choose_strategies(plan, schedule, "fully_shard") == sharded


def test_replicas_that_wait_for_each_other_for_ever_are_refused(plan):
    schedule = Schedule.model_validate(EACH_WAITS)
    for strategy in ("ddp", "fully_shard"):
        with pytest.raises(PlanMismatch, match=r"stages 1 would deadlock"):
            choose_strategies(plan, schedule, strategy)


def test_replicas_that_work_in_unlike_orders_are_refused(plan):
    schedule = make_schedule("1f1b", 1, 3, replicas=(2,))
    order = ["0F0", "0B0", "0F2", "0B2"], ["0F1", "0B1"]
    schedule = Schedule.model_validate({**schedule.model_dump(), "ranks": order})
    assert choose_strategies(plan, schedule, {0: "fully_shard"}) == {0: "fully_shard"}
    order = ["0F0", "0F2", "0B0", "0B2"], ["0F1", "0B1"]
    three = ["0F0", "0F2", "0F4", "0B0", "0B2", "0B4"], ["0F1", "0B1", "0F3", "0B3"]
    schedule = make_schedule("1f1b", 1, 5, replicas=(2,))
    schedule = Schedule.model_validate({**schedule.model_dump(), "ranks": three})
    with pytest.raises(PlanMismatch, match=r"stage 0 cannot gather .* another order; use"):
        choose_strategies(plan, schedule, {0: "fully_shard"})


def test_replicas_with_fewer_microbatches_go_along_with_the_others():
    schedule = make_schedule("1f1b", 1, 5, replicas=(2,))
    rows = list_rounds(schedule, 0)
    assert ["".join(each.work.value for each in row) for row in rows] == ["FBFBFB"] * 2
    assert [[each.is_own for each in row] for row in rows] == [[True] * 6, [True] * 4 + [False] * 2]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_planned_orders_never_deadlock_for_any_number_of_replicas(name):
    counts = (1, 2, 3, 5)
    for replicas in (
        product(counts, repeat=3) if name != "zero_bubble" else [(each,) * 3 for each in counts]
    ):
        for microbatches in (5, 7, 12):
            schedule = make_schedule(name, 3, microbatches, replicas=replicas)
            several = [stage for stage, count in enumerate(replicas) if count > 1]
            assert all(list_rounds(schedule, stage) for stage in several)
            assert can_finish(schedule, several, ()), (replicas, microbatches)


def test_what_is_not_asked_is_what_the_plan_says(plan):
    schedule = make_schedule("1f1b", 2, 6, replicas=(2, 2))
    assert (
        choose_strategies(plan, schedule, None) == choose_strategies(plan, schedule, "reduce") == {}
    )
    stages = (plan.stages[0], plan.stages[1].model_copy(update={"strategy": "fully_shard"}))
    planned = plan.model_copy(update={"stages": stages})
    assert choose_strategies(planned, schedule, None) == {1: "fully_shard"}
    assert choose_strategies(planned, schedule, {0: "ddp"}) == {0: "ddp"}


def waits_in_a_circle(schedule, every, last):
    """By networkx: every meeting one node, an edge from what comes before to what comes after."""
    graph, node = networkx.DiGraph(), {}
    for stage, replicas in enumerate(schedule.stage_ranks):
        own = [[a for a in schedule.ranks[rank] if a.stage == stage] for rank in replicas]
        for each, actions in enumerate(own):
            backwards = [a for a in actions if a.work in BACKWARDS]
            for place, action in enumerate(actions):
                alone = (stage, each, place)
                meets = stage in every or (stage in last and action == backwards[-1])
                node[action] = (stage, place if stage in every else "last") if meets else alone
    graph.add_nodes_from(node.values())
    by_key = {(a.stage, a.work, a.microbatch): n for a, n in node.items()}
    for actions in schedule.ranks:
        graph.add_edges_from((node[a], node[b]) for a, b in pairwise(actions))
        for a in actions:
            behind = a.stage - 1 if a.work is Work.FORWARD else a.stage + 1
            for work in (Work.FORWARD,) if a.work is Work.FORWARD else BACKWARDS[:2]:
                if a.work is not Work.BACKWARD_WEIGHT and (behind, work, a.microbatch) in by_key:
                    graph.add_edge(by_key[behind, work, a.microbatch], node[a])
    return not networkx.is_directed_acyclic_graph(graph)


def test_steps_that_end_are_told_from_those_that_do_not():
    chance, found = random.Random(0), {True: 0, False: 0}
    for _ in range(500):
        replicas = [chance.choice((1, 2, 3)) for _ in range(chance.choice((2, 3)))]
        microbatches = chance.choice((6, 12))
        deepest = [microbatches // count for count in replicas]
        schedule = make_schedule("1f1b", len(replicas), microbatches, replicas=replicas)
        order = [list(actions) for actions in schedule.ranks]
        most = [depth for depth, r in zip(deepest, replicas, strict=True) for _ in range(r)]
        for actions, deep in zip(order, most, strict=True):
            forwards = [a for a in actions if a.work is Work.FORWARD]
            backwards = [a for a in actions if a.work is Work.BACKWARD]
            depth = chance.randint(1, deep)
            actions[:] = forwards[:depth]
            for number, backward in enumerate(backwards):
                actions += [backward, *forwards[depth + number : depth + number + 1]]
        schedule = schedule.model_copy(update={"ranks": tuple(map(tuple, order))})
        if waits_in_a_circle(schedule, (), ()):
            continue
        stages = [s for s, count in enumerate(replicas) if count > 1]
        every = {s for s in stages if are_equal(list_rounds(schedule, s)) and chance.random() < 0.5}
        last = {s for s in stages if s not in every and chance.random() < 0.5}
        wanted = not waits_in_a_circle(schedule, every, last)
        assert can_finish(schedule, every, last) == wanted, (schedule, every, last)
        found[wanted] += 1
    assert min(found.values()) > 10, found


@pytest.mark.parametrize(
    ("name", "stages", "chunks"),
    [
        ("gpipe", 3, 1), ("1f1b", 3, 1), ("zero_bubble", 3, 1), ("interleaved_1f1b", 6, 2),
        ("looped_bfs", 6, 2), ("interleaved_zero_bubble", 6, 2), ("zbv", 6, 2), ("dualpipev", 6, 2),
    ],
)  # fmt: skip
def test_with_equal_replicas_every_schedule_ends(name, stages, chunks):
    schedule = make_schedule(name, stages, 12, replicas=(2,) * stages, chunks=chunks)
    everywhere = set(range(stages))
    assert all(are_equal(list_rounds(schedule, stage)) for stage in everywhere)
    assert can_finish(schedule, everywhere, ())


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def whole_bytes(parameters):
    return sum(parameter.untyped_storage().nbytes() for parameter in parameters)


ONE_ROUND = [Round(Work.FORWARD, True), Round(Work.BACKWARD, True)]


class Watched(nn.Module):
    """Layers of unequal sizes that note which of their weights are whole when they run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=at > 0) for at in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def shard(model, group, rounds, sample=None):
    """Return a model as one sharded stage of a single replica, and its whole weights by layer."""
    captured = trace(model, torch.randn(2, 4) if sample is None else sample)
    stage = captured.segment(0, len(captured.layers), blocks=True)
    names = [name for name, _ in stage.named_parameters()]
    return stage, ShardedStage(stage, names, group, torch.device("cpu"), rounds)


def find_whole(strategy):
    """Return the numbers of the blocks whose weights are gathered."""
    return [unit for unit, weights in enumerate(strategy._weights) if whole_bytes(weights)]


def run_step(stage, strategy, rounds, batch):
    """Run a step of one micro-batch; return the blocks that were whole when each was needed."""
    seen = []
    for unit, weights in enumerate(strategy._weights):
        for weight in (each for each in weights if each.requires_grad):
            weight.register_hook(lambda g, unit=unit: seen.append((unit, find_whole(strategy))))
    strategy.begin(trains=True, sums=True)
    strategy.action_begins(Work.FORWARD, last=False)
    (output,) = stage(batch)
    strategy.action_ended(Work.FORWARD, last=False)
    assert find_whole(strategy) == []
    strategy.action_begins(Work.BACKWARD, last=True)
    output.square().sum().backward()
    strategy.action_ended(Work.BACKWARD, last=True)
    strategy.finish()
    return seen


def test_one_block_at_a_time_is_whole_and_its_gradient_gone_after_it(alone):
    model = Watched()
    wanted = copy.deepcopy(model)
    stage, strategy = shard(model, alone, ONE_ROUND)
    batch = torch.randn(6, 4)
    seen = run_step(stage, strategy, ONE_ROUND, batch)
    assert [unit for unit, _ in seen] == [2, 2, 1, 1, 0]  # weights and biases, last first
    assert all(whole == [unit] for unit, whole in seen)
    assert find_whole(strategy) == []
    assert all(weight.grad is None for weights in strategy._weights for weight in weights)
    wanted(batch).square().sum().backward()
    for name, parameter in wanted.named_parameters():
        found = stage.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad)


class Views(nn.Module):
    """A layer that hands out a view of its own weight, which a later layer reads."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 4)

    def forward(self, x):
        rows = self.table[:2]
        return self.mix(x) * rows + self.mix(rows)


class Frozen(nn.Module):
    """Frozen layers around a trained one, one weight that two layers read, and one in place."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.middle(torch.relu_(self.first(x)))).mul_(2)


@pytest.mark.parametrize("make", [Views, Frozen, Watched])
def test_whatever_layers_do_with_weights_gradients_are_those_of_the_model(alone, make):
    model = make()
    wanted = copy.deepcopy(model)
    batch = torch.randn(2, 4)
    stage, strategy = shard(model, alone, ONE_ROUND, batch)
    state = torch.get_rng_state()
    run_step(stage, strategy, ONE_ROUND, batch)
    torch.set_rng_state(state)
    wanted(batch).square().sum().backward()
    for name, parameter in wanted.named_parameters():
        found = stage.get_parameter(name).grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            torch.testing.assert_close(found, parameter.grad)


def test_keyed_dropout_gathers_blocks_as_well(alone):
    """Keyed random numbers are drawn by code of its own, split in the same blocks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    wanted = trace(copy.deepcopy(model), torch.randn(2, 4))
    whole = wanted.segment(0, len(wanted.layers))
    stage, strategy = shard(model, alone, ONE_ROUND)
    batch, cpu = torch.randn(2, 4), torch.device("cpu")
    with keyed_dropout(stage, seed=3, step=1, microbatch=0, device=cpu):
        run_step(stage, strategy, ONE_ROUND, batch)
    with keyed_dropout(whole, seed=3, step=1, microbatch=0, device=cpu):
        whole(batch)[0].square().sum().backward()
    for name, parameter in whole.named_parameters():
        found = stage.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad)


def test_an_interrupted_step_leaves_no_whole_weights_or_gradients(alone):
    stage, strategy = shard(Watched(), alone, ONE_ROUND)
    strategy.begin(trains=True, sums=True)
    strategy.action_begins(Work.FORWARD, last=False)
    (output,) = stage(torch.ones(2, 4))
    strategy.action_begins(Work.BACKWARD, last=True)
    output.sum().backward()  # and an error follows
    assert find_whole(strategy)
    strategy.begin(trains=True, sums=True)
    assert find_whole(strategy) == []
    assert all(weight.grad is None for weights in strategy._weights for weight in weights)


def test_what_cannot_be_sharded_stays_whole():
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    stage[1].bfloat16()
    stage[2].weight = nn.Parameter(torch.randn(4, 2).t())
    stage.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    stage[0].bias.requires_grad_(False).data = stage[0].bias.data.half()
    names = [name for name, _ in stage.named_parameters()]
    assert select_shardable(stage, names) == ["0.weight", "0.bias", "2.bias"]


def sharded_alone(model, group):
    """A whole model as one sharded stage of a single replica."""
    captured = trace(model, torch.randn(2, 4))
    stage = captured.segment(0, len(captured.layers), blocks=True)
    schedule, cpu = make_schedule("gpipe", 1, 1), torch.device("cpu")
    placement = WeightPlacement(captured.graph.parameters, [len(captured.layers)], schedule)
    strategies = apply_strategies(
        {0: "fully_shard"}, schedule, {0: stage}, placement, {(0,): group}, cpu, captured.roots
    )
    return stage, strategies[0]


def test_the_model_keeps_no_whole_weights(alone):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    whole = [weakref.ref(parameter) for parameter in model.parameters()]
    sharded_alone(model, alone)
    gc.collect()
    assert not any(reference() is not None for reference in whole)


def test_another_graph_for_evaluation_reads_the_trained_weights(alone):
    model = DropPath()
    stage, strategy = sharded_alone(model, alone)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.to_local().fill_(0.5)
    stage.eval()
    assert len(get_segments(stage)) == 2
    strategy.begin(trains=False, sums=False)
    strategy.action_begins(Work.FORWARD, last=False)
    (output,) = stage(torch.ones(2, 4))
    strategy.action_ended(Work.FORWARD, last=False)
    strategy.finish()
    torch.testing.assert_close(output, torch.full((2, 4), 5.5))
