"""PipeDream's objective: values by hand, by trying every split, and bounds that hold."""

import itertools
import math
import random
import time

import pytest

from benchmarks.pipedream_study.graphs import (
    CostGraph,
    graph_states,
    pipedream_split,
    pipedream_value,
)
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.planner.dag.downsets import Dag
from stagewright.planner.pipedream import search as pipedream_search
from stagewright.planner.pipedream.objective import PipeDreamStage, pipedream_chain

CLUSTERS = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (1, 2), (2, 1)]


def random_graph(draw, num_nodes):
    """Branches, several sources and sinks, ties, nodes that cost nothing."""
    density = draw.choice([0.3, 0.5, 0.8])
    edges = [
        (source, target)
        for target in range(num_nodes)
        for source in range(target)
        if (target - source == 1 and draw.random() < 0.7) or draw.random() < density / 2
    ]
    scale = draw.choice([0.1, 1.0, 10.0])
    return CostGraph(
        node_ids=tuple(f"n{node}" for node in range(num_nodes)),
        dag=Dag(num_nodes, tuple(edges)),
        times_s=tuple(draw.choice([0.0, 1.0, draw.uniform(0, 3)]) for _ in range(num_nodes)),
        parameter_bytes=tuple(
            draw.choice([0.0, 1.0, draw.uniform(0, 3)]) for _ in range(num_nodes)
        ),
        activation_bytes=tuple(
            scale * draw.choice([0.0, 1.0, draw.random()]) for _ in range(num_nodes)
        ),
    )


class Oracle:
    """Every nested sequence of states with every choice of replicas, level inside level."""

    def __init__(self, graph, machines, bandwidths):
        self.graph, self.machines, self.bandwidths = graph, machines, bandwidths
        count = graph.dag.num_nodes
        self.readers = {v: {b for a, b in graph.dag.edges if a == v} for v in range(count)}
        self.closure = {}
        for node in graph.dag.order:
            before = [a for a, b in graph.dag.edges if b == node]
            self.closure[node] = frozenset({node}).union(*(self.closure[a] for a in before))
        waiting, self.states = [self.closure[graph.dag.sources[0]]], set()
        while waiting:
            state = waiting.pop()
            if state not in self.states:
                self.states.add(state)
                waiting += [state | self.closure[b] for a in state for b in self.readers[a]]
        self.everything = max(self.states, key=len)
        self.known = {}

    def boundary(self, state):
        tops = [x for x in state if not self.readers[x] & state]
        charged = set(tops)
        for x in tops:
            charged |= {p for p in self.closure[x] if self.readers[p] - self.closure[x]}
        return sum(self.graph.activation_bytes[p] for p in charged)

    def work(self, level, first, last):
        """Seconds of what one machine of a level does with a range."""
        if level == 0:
            return sum(self.graph.times_s[v] for v in last - first)
        return self.best(level - 1, first, last)

    def best(self, level, first=frozenset(), last=None):
        last = last or self.everything
        if (level, first, last) not in self.known:
            self.known[level, first, last] = min(
                self.cost(level, sets, replicas)
                for sets in self.nested(first, last, self.machines[level])
                for replicas in compositions(self.machines[level], len(sets) - 1)
            )
        return self.known[level, first, last]

    def nested(self, first, last, most):
        """Sequences of states from one to another with at most so many steps."""
        yield [first, last]
        if most > 1:
            for state in self.states:
                if first < state < last:
                    for rest in self.nested(state, last, most - 1):
                        yield [first, *rest]

    def cost(self, level, sets, replicas):
        bandwidth = self.bandwidths[level]
        worst = 0.0
        for place, (before, after) in enumerate(itertools.pairwise(sets)):
            r = replicas[place]
            sync = 4 * (r - 1) * sum(self.graph.parameter_bytes[v] for v in after - before)
            sync /= bandwidth * r
            if place == 0:
                sync /= self.machines[level - 1] if level else 1
            else:
                worst = max(worst, 2 * self.boundary(before) / (bandwidth * r))
                if after != self.everything:
                    worst = max(worst, 2 * self.boundary(after) / (bandwidth * r))
            worst = max(worst, (self.work(level, before, after) + sync) / r)
        return worst


def compositions(total, parts):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise([0, *cuts, total])]


def instances(count, first_seed=0):
    for seed in range(first_seed, first_seed + count):
        draw = random.Random(seed)
        machines = draw.choice(CLUSTERS)
        bandwidths = [draw.choice([0.5, 2.0, 10.0]) for _ in machines]
        yield random_graph(draw, draw.randint(1, 6)), machines, bandwidths


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_the_value_is_the_least_of_all_splits(first_seed):
    for graph, machines, bandwidths in instances(100, first_seed):
        split = pipedream_split(graph, machines, bandwidths)
        best_s = Oracle(graph, machines, bandwidths).best(len(machines) - 1)
        assert split.value_s == pytest.approx(best_s, rel=1e-12, abs=1e-15)
        assert split.lower_bound_s == split.value_s
        again_s = pipedream_value(graph, split.stages, machines, bandwidths)
        assert again_s == pytest.approx(split.value_s, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("first_seed", range(1000, 1500, 100))
def test_the_search_without_tables_brackets_the_least_value(monkeypatch, first_seed):
    monkeypatch.setattr(pipedream_search, "COARSE_STATES", 2)
    monkeypatch.setattr(pipedream_search, "TABLE_ENTRIES", 0)
    for graph, machines, bandwidths in instances(100, first_seed):
        split = pipedream_split(graph, machines, bandwidths)
        best_s = Oracle(graph, machines, bandwidths).best(len(machines) - 1)
        assert split.lower_bound_s <= best_s * (1 + 1e-12) + 1e-15
        assert split.value_s >= best_s * (1 - 1e-12) - 1e-15
        assert split.gap <= 2e-4
        again_s = pipedream_value(graph, split.stages, machines, bandwidths)
        assert again_s == pytest.approx(split.value_s, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("limits", [{"MAX_POINTS": 0}, {"MAX_WALK": 1}])
def test_bounds_hold_where_the_search_gives_up(monkeypatch, limits):
    for name, limit in {"COARSE_STATES": 2, "TABLE_ENTRIES": 0, **limits}.items():
        monkeypatch.setattr(pipedream_search, name, limit)
    for graph, machines, bandwidths in instances(100, 2000):
        split = pipedream_split(graph, machines, bandwidths)
        best_s = Oracle(graph, machines, bandwidths).best(len(machines) - 1)
        assert split.lower_bound_s <= best_s * (1 + 1e-12) + 1e-15
        assert split.value_s >= best_s * (1 - 1e-12) - 1e-15


def fork(times_s=(2.0, 3.0, 5.0, 1.0), parameter_bytes=(8.0, 0.0, 0.0, 40.0)):
    """a is read by b and c, both by d; outputs of 10, 1, 2 and 4 bytes."""
    return CostGraph(
        node_ids=("a", "b", "c", "d"),
        dag=Dag(4, ((0, 1), (0, 2), (1, 3), (2, 3))),
        times_s=times_s,
        parameter_bytes=parameter_bytes,
        activation_bytes=(10.0, 1.0, 2.0, 4.0),
    )


def stage(nodes, replicas, *inner):
    return PipeDreamStage(tuple(nodes), replicas, inner)


def test_the_formula_by_hand_on_one_level():
    graph, bandwidth = fork(), [2.0]
    # One stage on three machines: (11 + 4 * 2 * 48 / (2 * 3)) / 3.
    assert pipedream_value(graph, [stage("abcd", 3)], [3], bandwidth) == pytest.approx(75 / 3)
    # a, c | b, d. Behind a, c: c (2) is maximal, a (10) is read by b outside c's closure: 12
    # bytes, 2 * 12 / (2 * 1) = 12 s. First stage (7 + 4 * 8 / (2 * 2)) / 2 = 7.5 s.
    two = [stage("ac", 2), stage("bd", 1)]
    assert pipedream_value(graph, two, [3], bandwidth) == pytest.approx(12)
    # a, b, c | d. The fork a counts although all its branches are inside: 10 + 1 + 2 bytes over
    # two machines, 2 * 13 / (2 * 2) = 6.5 s; d itself (1 + 4 * 40 / (2 * 2)) / 2 = 20.5 s.
    two = [stage("abc", 1), stage("d", 2)]
    assert pipedream_value(graph, two, [3], bandwidth) == pytest.approx(20.5)


def test_the_first_stage_is_not_charged_for_what_it_sends():
    graph = CostGraph(("a", "b"), Dag(2, ((0, 1),)), (1.0, 1.0), (0.0, 0.0), (6.0, 0.0))
    # The cut costs 2 * 6 / (1 * 3) to the three machines behind it, not 12 to the one in front.
    assert pipedream_value(graph, [stage("a", 1), stage("b", 3)], [4], [1.0]) == pytest.approx(4)


def test_only_the_first_stage_of_a_higher_level_shares_its_exchange_out():
    graph = CostGraph(("a", "b"), Dag(2, ((0, 1),)), (0.0, 0.0), (30.0, 30.0), (0.0, 0.0))
    inner_a, inner_b = stage("a", 5), stage("b", 5)
    # Inside: 4 * 4 * 30 / (1e9 * 5) / 5 s, next to nothing. Outside a: 4 * 30 / 2 / 5 / 2 = 6 s
    # on two machines of five; b: 4 * 30 / 2 / 2 = 30 s.
    stages = [stage("a", 2, inner_a), stage("b", 2, inner_b)]
    assert pipedream_value(graph, stages, [5, 4], [1e9, 1.0]) == pytest.approx(30)
    stages = [stage("a", 3, inner_a), stage("b", 1, inner_b)]
    assert pipedream_value(graph, stages, [5, 4], [1e9, 1.0]) == pytest.approx(80 / 5 / 3)


def test_every_machine_is_used_even_where_it_harms():
    graph = CostGraph(("a",), Dag(1, ()), (1.0,), (100.0,), (0.0,))
    split = pipedream_split(graph, [2], [1.0])
    assert split.value_s == pytest.approx((1 + 4 * 100 / 2) / 2)
    assert split.stages == (stage("a", 2),)


def test_nodes_apart_from_the_first_source_are_left_out_and_named():
    graph = CostGraph(("a", "b", "c"), Dag(3, ((0, 1),)), (1.0, 1.0, 9.0), (0.0,) * 3, (0.0,) * 3)
    split = pipedream_split(graph, [2], [1.0])
    assert (split.left_out, split.value_s, split.num_states) == (("c",), 1.0, 2)


@pytest.mark.parametrize(
    ("stages", "machines", "said"),
    [
        ([stage("abcd", 2)], [3], r"\[2\] do not add up to the 3"),
        ([stage("abc", 1)], [1], "'d'. are missing"),
        ([stage("ab", 1), stage("bcd", 1)], [2], "b is placed twice"),
        ([stage("abx", 1), stage("cd", 1)], [2], "unknown nodes"),
        ([stage("bc", 1), stage("ad", 1)], [2], "not one of PipeDream's states"),
        ([stage("abcd", 0), stage("", 1)], [1], "no nodes, no replicas"),
        ([stage("abcd", 1, stage("abcd", 1))], [1], "lowest level has stages inside"),
        ([stage("abcd", 1)], [1, 1], "do not have its nodes"),
    ],
)
def test_what_is_no_split_has_no_value(stages, machines, said):
    with pytest.raises(InvalidInput, match=said):
        pipedream_value(fork(), stages, machines, [1.0] * len(machines))


@pytest.mark.parametrize(
    ("machines", "bandwidths", "said"),
    [
        ([], [], "at least one level"),
        ([2, 2], [1.0], "2 numbers of machines and 1 bandwidths"),
        ([0], [1.0], "0 machines"),
        ([513], [1.0], "1 to 512"),
        ([2], [0.0], "bandwidth 0.0"),
        ([2], [math.nan], "bandwidth nan"),
        ([2], [math.inf], "bandwidth inf"),
    ],
)
def test_clusters_that_make_no_sense_are_refused(machines, bandwidths, said):
    with pytest.raises(InvalidInput, match=said):
        pipedream_split(fork(), machines, bandwidths)


def test_costs_that_make_no_sense_are_refused():
    with pytest.raises(InvalidInput, match=r"times_s\[1\] is nan"):
        fork(times_s=(1.0, math.nan, 1.0, 1.0))
    with pytest.raises(InvalidInput, match=r"parameter_bytes\[0\] is -1"):
        fork(parameter_bytes=(-1.0, 0.0, 0.0, 0.0))
    with pytest.raises(InvalidInput, match="boundary_bytes has 2 entries, expected 1"):
        pipedream_chain([1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [2], [1.0])
    with pytest.raises(InvalidInput, match="no layers"):
        pipedream_chain([], [], [], [2], [1.0])
    with pytest.raises(InvalidInput, match="no nodes"):
        CostGraph((), Dag(0, ()), (), (), ())


def test_too_many_states_are_refused():
    wide = Dag(12, tuple((0, node) for node in range(1, 12)))
    graph = CostGraph(tuple(map(str, range(12))), wide, (1.0,) * 12, (0.0,) * 12, (0.0,) * 12)
    assert len(graph_states(graph, limit=2**11)) == 2**11 + 1
    with pytest.raises(Infeasible, match="more than 2047 states"):
        graph_states(graph, limit=2**11 - 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_of_layers_is_the_graph_of_its_layers(seed):
    draw = random.Random(seed)
    count, machines = draw.randint(1, 9), draw.choice(CLUSTERS)
    bandwidths = [draw.choice([0.5, 2.0, 10.0]) for _ in machines]
    times_s, weights, sent = (
        [draw.choice([0.0, draw.uniform(0, 3)]) for _ in range(count)] for _ in range(3)
    )
    chain = pipedream_chain(times_s, weights, sent[:-1], machines, bandwidths)
    graph = CostGraph(
        tuple(map(str, range(count))),
        Dag(count, tuple((layer, layer + 1) for layer in range(count - 1))),
        tuple(times_s), tuple(weights), tuple(sent),
    )  # fmt: skip
    split = pipedream_split(graph, machines, bandwidths)
    assert chain.value_s == pytest.approx(split.value_s, rel=1e-12)
    again_s = pipedream_value(graph, chain.stages, machines, bandwidths)
    assert again_s == pytest.approx(chain.value_s, rel=1e-12)


def test_equal_layers_without_communication_are_shared_out_evenly():
    split = pipedream_chain([1.0] * 200, [0.0] * 200, [0.0] * 199, [64], [1.0])
    assert split.value_s == pytest.approx(200 / 64)
    assert sum(part.replicas for part in split.stages) == 64
    assert [node for part in split.stages for node in part.node_ids] == [str(n) for n in range(200)]


def test_two_hundred_layers_on_sixty_four_machines_are_quick():
    draw = random.Random(1)
    times_s = [draw.uniform(0.5, 1.5) for _ in range(200)]
    begin_s = time.process_time()
    pipedream_chain(times_s, [1e6] * 200, [1e5] * 199, [64], [1e8])
    assert time.process_time() - begin_s < 2, "0.3 s on a quiet core"


def branching(num_blocks, seed):
    """Blocks of four branches one after the other: too many states for tables."""
    draw = random.Random(seed)
    edges, costs, top = [], 1, 0
    for _ in range(num_blocks):
        ends = []
        for _ in range(4):
            previous = top
            for _ in range(4):
                edges.append((previous, costs))
                previous, costs = costs, costs + 1
            ends.append(previous)
        edges += [(end, costs) for end in ends]
        top, costs = costs, costs + 1
    return CostGraph(
        tuple(map(str, range(costs))), Dag(costs, tuple(edges)),
        tuple(draw.uniform(0, 2) for _ in range(costs)),
        tuple(draw.uniform(0, 1e6) for _ in range(costs)),
        tuple(draw.uniform(0, 1e6) for _ in range(costs)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("machines", "bandwidths"), [([4], [1e6]), ([16], [1e6]), ([4, 2], [1e8, 2e5])]
)
def test_thousands_of_states_are_solved_to_a_small_gap(machines, bandwidths):
    graph = branching(6, seed=3)
    split = pipedream_split(graph, machines, bandwidths)
    assert split.num_states > 3500
    assert split.gap <= 1e-3
    again_s = pipedream_value(graph, split.stages, machines, bandwidths)
    assert again_s == pytest.approx(split.value_s, rel=1e-9)
